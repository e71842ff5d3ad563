"""`attention` by torch's own op: what that is asked for, and that who computes it again saves the same."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import foci
from foci.core.library import listening
from foci.ops.masks import Causal
from foci.ops.softmax import aten
from foci.ops.softmax.aten_cuda import CUDA_KERNELS
from foci.ops.softmax.call import bind
from tests.ops.softmax import fused
from tests.ops.softmax.fused import rows

CUDNN, FLASH, EFFICIENT = CUDA_KERNELS


def nodes(out: Tensor) -> set[str]:
    """Of the graph behind it."""
    found, left = set[str](), [out.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node.name() not in found:
            found.add(node.name())
            left += [before for before, _ in node.next_functions]
    return found


@pytest.mark.parametrize("wanted", ["q", "k", "v", ""])
def test_an_lse_is_made_only_for_a_gradient(wanted: str, counted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aten, "_kernels", lambda call: (CUDNN,))
    for _ in range(3):
        inputs = rows()
        for name in wanted:
            inputs[name].requires_grad_()
        counted.clear()
        out = foci.attention(**inputs, mask=Causal(), backend="aten")
        assert ("an lse" in counted) == bool(wanted) == out.requires_grad
        if wanted:
            assert "OpBackward" in nodes(out) and not any("softmax" in name for name in nodes(out))
            (found,) = torch.autograd.grad(out.sum(), inputs[wanted])
            truth = foci.attention(**inputs, mask=Causal(), backend="reference")
            torch.testing.assert_close(found, torch.autograd.grad(truth.sum(), inputs[wanted])[0])
        with torch.no_grad():
            counted.clear()
            foci.attention(**inputs, backend="aten")
            assert "an lse" not in counted


@pytest.mark.parametrize("G", [2, 4])
def test_heads_are_repeated_for_a_kernel_that_knows_no_groups(
    G: int, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aten, "_kernels", lambda call: (EFFICIENT,))
    inputs = {n: x.requires_grad_() for n, x in rows(G=G).items()}
    for _ in range(3):
        out = foci.attention(**inputs, backend="aten")
        assert ("OpBackward" in nodes(out)) == (G == 4)
        torch.testing.assert_close(out, foci.attention(**inputs, backend="reference"))


def test_of_heads_first_torch_would_keep_another_out_so_it_has_only_little() -> None:
    for T, taken in ((64, True), (4096, False)):
        x = torch.empty(2, 8, T, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for q, kept in ((x.transpose(1, 2), taken), (x.view(2, T, 8, 64), True)):
            call = bind(q, q, q)
            assert (FLASH.torch_op(call, False) is not None) == kept
            assert (CUDNN.torch_op(call, False) is not None) == (q.stride(1) > q.stride(2))
            with torch.no_grad():
                assert all(kernel.torch_op(bind(q, q, q), False) is not None for kernel in (FLASH, CUDNN))


def test_cudnn_is_given_every_dout_in_one_layout(counted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By its hook, as torch's op takes what autograd has; its plan knows the layouts of q, k and v alone."""
    seen: list[Tensor] = []

    def back(dout: Tensor, *given: Any) -> tuple[Tensor, ...]:
        seen.append(dout)
        return right(dout, *given)

    right = fused.back
    monkeypatch.setattr(fused, "back", back)
    monkeypatch.setattr(aten, "_kernels", lambda call: (CUDNN,))
    inputs = {name: x.requires_grad_() for name, x in rows().items()}
    for _ in range(3):  # as written, and then as calls that are played
        out = foci.attention(**inputs, mask=Causal(), backend="aten")
        assert "OpBackward" in nodes(out)
        truth = foci.attention(**inputs, mask=Causal(), backend="reference")
        B, T, H, K = out.shape
        wide = torch.randn(B, T, H * K + 24, dtype=out.dtype)[..., : H * K].unflatten(-1, (H, K))
        between = torch.randn(out.numel() + 1, dtype=out.dtype)[1:].view(out.shape)
        heads_first = torch.randn(B, H, T, K, dtype=out.dtype).transpose(1, 2)
        for dout in (wide, between, heads_first, wide[:1, :1, :1, :1].expand(out.shape), wide.contiguous()):
            found = torch.autograd.grad(out, list(inputs.values()), dout, retain_graph=True)
            wanted = torch.autograd.grad(truth, list(inputs.values()), dout, retain_graph=True)
            torch.testing.assert_close(found, wanted)
    assert len(seen) == 15 and {x.stride() for x in seen} == {out.transpose(1, 2).stride()}
    assert all(x.data_ptr() % 16 == 0 for x in seen)


@pytest.mark.parametrize("trains", [True, False])
def test_whoever_listens_hears_every_call_though_torchs_op_or_a_plan_makes_it(trains: bool, counted: list[str]) -> None:
    inputs = {name: x.requires_grad_(trains) for name, x in rows().items()}
    for _ in range(3):
        foci.attention(**inputs, backend="aten")  # of its kind nothing is dispatched any more
    heard: list[Any] = []
    with listening(heard.append):
        for _ in range(3):
            assert foci.attention(**inputs, backend="aten").requires_grad == trains
        with torch.no_grad():
            foci.attention_with_lse(**inputs, backend="aten")
    foci.attention(**inputs, backend="aten")
    assert len(heard) == 4 and all(call.q is inputs["q"] for call in heard)


@pytest.mark.parametrize("order", ["tokens first", "heads first", "one row for all", "one head for all"])
def test_cudnn_is_given_every_out_in_one_layout(
    order: str, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own lies as q does: its plan, made for that, would read the out of a Function beside its memory."""
    seen: list[Tensor] = []

    def back(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        seen.append(out)
        return right(dout, q, k, v, out, *rest)

    right = fused.back
    monkeypatch.setattr(fused, "back", back)
    monkeypatch.setattr(aten, "_kernels", lambda call: (CUDNN,))
    lie: dict[str, Callable[[Tensor], Tensor]] = {
        "tokens first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "one row for all": lambda x: x[:1].expand(x.shape),
        "one head for all": lambda x: x[:, :, :1].expand(x.shape),
    }
    inputs = {name: lie[order](x).requires_grad_() for name, x in rows().items()}
    for attend in (foci.attention, lambda **given: foci.attention_with_lse(**given)[0], foci.attention):
        out, truth = attend(**inputs, backend="aten"), foci.attention(**inputs, backend="reference")
        dout = torch.randn(out.shape, dtype=out.dtype)
        found, wanted = (torch.autograd.grad(x, list(inputs.values()), dout) for x in (out, truth))
        torch.testing.assert_close(found, wanted)
    assert len(seen) == 3 and {x.stride() for x in seen} == {torch.empty(out.shape).transpose(1, 2).stride()}


@pytest.mark.parametrize("kernel", CUDA_KERNELS[:2], ids=lambda kernel: kernel.name)
def test_many_douts_at_once(kernel: Any, counted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`is_grads_batched`, and so a vectorised Jacobian: they have no memory of their own."""
    monkeypatch.setattr(aten, "_kernels", lambda call: (kernel,))
    inputs = {name: x.requires_grad_() for name, x in rows(G=4).items()}
    for _ in range(3):
        out, truth = (foci.attention(**inputs, backend=backend) for backend in ("aten", "reference"))
        assert "OpBackward" in nodes(out)
        douts = torch.randn(3, *out.shape, dtype=out.dtype)
        found = torch.autograd.grad(out, list(inputs.values()), douts, is_grads_batched=True)
        each = [torch.autograd.grad(truth, list(inputs.values()), dout, retain_graph=True) for dout in douts]
        torch.testing.assert_close(found, tuple(map(torch.stack, zip(*each, strict=True))))


class Watched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("mode", [Watched, lambda: torch.device("cpu"), torch.profiler.profile])
@pytest.mark.parametrize("first", [True, False], ids=["forward", "backward"])
def test_a_checkpoint_saves_the_same_whoever_watches_one_of_both(
    first: bool, mode: Callable[[], Any], reentrant: bool, counted: list[str]
) -> None:
    before, behind = (mode, nullcontext) if first else (nullcontext, mode)
    inputs = {n: x.requires_grad_() for n, x in rows().items()}
    truth = torch.autograd.grad(foci.attention(**inputs, backend="reference").sum(), list(inputs.values()))
    for _ in range(3):
        for x in inputs.values():
            x.grad = None
        with before():
            out = checkpoint(lambda *x: foci.attention(*x, backend="aten"), *inputs.values(), use_reentrant=reentrant)
        with behind():
            out.sum().backward()
        for x, right in zip(inputs.values(), truth, strict=True):
            torch.testing.assert_close(x.grad, right)


def test_the_choice_is_told_whether_out_is_all(counted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    monkeypatch.setattr(aten, "prefers", lambda call, single: told.append(single) or "")
    inputs = rows()
    foci.attention(**inputs)
    foci.attention_with_lse(**inputs)
    torch.func.vmap(lambda q: foci.attention(**inputs | {"q": q}))(inputs["q"][None])
    foci.explain("softmax", **inputs)
    assert told == [True, False, False, True]


def test_on_the_cpu_nobody_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """There a tiny call would be half as long again."""
    monkeypatch.setattr(aten, "torch_op", lambda call: pytest.fail("asked"))
    inputs = {n: x.float().requires_grad_() for n, x in rows().items()}
    foci.attention(**inputs).sum().backward()
