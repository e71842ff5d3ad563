"""yunchang's ring functions equal one process with every option, forward and backward; half a subclass is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from foci import cli
from foci.compat import yunchang
from foci.compat.yunchang import AttnType, RingFlashAttnFunc, ring_flash_attn_func
from foci.compat.yunchang.ring import RING_IMPL_DICT, RING_IMPL_QKVPACKED_DICT
from foci.core.errors import Unsupported
from foci.core.world import World
from tests.compat.dense import parameters
from tests.compat.yunchang.proof import DROPS, OPTIONS, compare, draw, mine, whole

Worlds = Callable[[int], World]
_REST = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False, group=None, attn_type=<AttnType.FA: 'fa'>, attn_processor=None"
)


@pytest.mark.parametrize("kind", ["ring_flash_attn", "zigzag_ring_flash_attn", "stripe_flash_attn"])
def test_signatures_are_the_peer_s(kind: str) -> None:
    for name, tensors in (("", "q, k, v"), ("_kvpacked", "q, kv"), ("_qkvpacked", "qkv")):
        assert parameters(getattr(yunchang, f"{kind}{name}_func")) == f"({tensors}, {_REST})"


def on_rank(order: str, inputs: dict[str, Tensor], options: dict[str, Any]) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    leaves = mine(inputs, order, rank, size, size, 1)
    torch.manual_seed(DROPS)
    out = RING_IMPL_DICT[order](**leaves, **options)
    out.sin().sum().backward()
    return out.detach(), {name: x.grad for name, x in leaves.items()}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("order", RING_IMPL_DICT)
def test_equal_to_one_process(worlds: Worlds, order: str, options: dict[str, Any]) -> None:
    inputs = draw()
    compare(worlds(3).run(on_rank, order, inputs, options), inputs, options, order, 3, 1)


def packed(inputs: dict[str, Tensor]) -> list[Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    leaves = mine(inputs, "zigzag", rank, size, size, 1)
    q, k, v = leaves.values()
    out, lse, nothing = yunchang.zigzag_ring_flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    both = torch.stack([k, v], 2)
    every = RING_IMPL_QKVPACKED_DICT["zigzag"](torch.stack([q, k, v], 2), causal=True)
    (out.sin().sum() + 0.0 * lse.sum()).backward()
    (gradient,) = torch.autograd.grad(yunchang.zigzag_ring_flash_attn_kvpacked_func(q, both).sum(), [q])
    return [out.detach(), lse.detach(), nothing, every.detach(), q.grad, gradient.shape]


def test_packed_forms_and_the_lse(worlds: Worlds) -> None:
    inputs = draw(H=2, G=2, alibi=False)
    out, lse, gradients = whole(inputs, {"causal": True})
    cut = yunchang.EXTRACT_FUNC_DICT["zigzag"]
    for rank, (ours, logs, nothing, every, gradient, shape) in enumerate(worlds(2).run(packed, inputs)):
        torch.testing.assert_close(ours, cut(out, rank, 2, 2, 1))
        assert torch.equal(ours, every) and nothing is None and shape == ours.shape
        torch.testing.assert_close(logs, cut(lse, rank, 2, 2, 1, dim=2))
        torch.testing.assert_close(gradient, cut(gradients["q"], rank, 2, 2, 1))


def bits(options: dict[str, Any]) -> bool:
    inputs = draw(alibi=False)
    runs = []
    for _ in range(2):
        leaves = mine(inputs, "basic", dist.get_rank(), dist.get_world_size(), dist.get_world_size(), 1)
        out = ring_flash_attn_func(**leaves, **options)
        out.sin().sum().backward()
        runs.append([out, *(x.grad for x in leaves.values())])
    return all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def test_deterministic_is_the_same_bits_forward_and_backward(worlds: Worlds) -> None:
    assert worlds(3).run(bits, {"deterministic": True, "causal": True}) == [True] * 3


def refused() -> list[str]:
    q, k, v = draw(alibi=False).values()
    said = []
    for options in ({"attn_type": AttnType.SAGE_FP8}, {"attn_processor": torch.nn.Identity()}):
        try:
            ring_flash_attn_func(q, k, v, **options)
        except Unsupported as error:
            said.append(str(error))
    return said


def test_what_is_not_exact_is_refused(worlds: Worlds) -> None:
    for kernel, processor in worlds(2).run(refused):
        assert "SAGE_FP8" in kernel and "Identity" in processor


def test_a_subclass_that_overrides_forward_alone_is_refused_where_it_is_defined() -> None:
    with pytest.raises(TypeError, match="Mine overrides forward of RingFlashAttnFunc and keeps its backward"):

        class Mine(RingFlashAttnFunc):
            @staticmethod
            def forward(ctx: Any, q: Tensor, joint: Tensor) -> Tensor:
                return q

    with pytest.raises(TypeError, match="Half overrides backward of ZigZagRingFlashAttnFunc and keeps its forward"):

        class Half(yunchang.ZigZagRingFlashAttnFunc):
            @staticmethod
            def backward(ctx: Any, *grads: Tensor) -> Any:
                return grads


def test_a_subclass_of_both_halves_or_of_none_is_fine() -> None:
    class Named(RingFlashAttnFunc):
        """The same by another name."""

    class Doubled(RingFlashAttnFunc):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return 2 * grads[0]

    x = torch.ones(3, requires_grad=True)
    assert torch.autograd.grad(Doubled.apply(x).sum(), x)[0].tolist() == [2.0] * 3
    with pytest.raises(TypeError, match="apply takes 14 arguments, q to attn_processor, got 1"):
        Named.apply(x)


HALF = """
from foci.compat.yunchang import RingFlashAttnFunc


class WithText(RingFlashAttnFunc):
    @staticmethod
    def forward(ctx, q, k, v, text_k, text_v, group):
        return q


def attend(q, k, v):
    return WithText.apply(q, k, v, k[:, :0], v[:, :0], None)
"""


def test_foci_check_says_so(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "half_a_function.py").write_text(HALF)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.main(["check", "half_a_function:attend", "--like", "softmax", "--world", "2"])
    printed = capsys.readouterr()
    assert ended.value.code not in (0, None)
    assert "WithText overrides forward of RingFlashAttnFunc and keeps its backward" in printed.out + printed.err
