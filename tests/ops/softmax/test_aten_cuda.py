"""torch's CUDA kernels behind the contract: shapes on the meta device, and refusals. The numbers need a GPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import foci
from foci.core import device, plans
from foci.core.errors import Unsupported
from foci.ops.masks import Causal, Dense, Lengths, Packed
from foci.ops.softmax import aten, aten_cuda
from foci.ops.softmax.aten import reasons, torch_op
from foci.ops.softmax.aten_cuda import CUDA_KERNELS, cuda_kernels, folds_dlse, slow
from foci.ops.softmax.call import bind
from tests.ops.softmax.fused import rows
from tests.ops.softmax.in_out import InOut
from tests.ops.softmax.problems import assert_close, evaluate

KERNELS = pytest.mark.parametrize("kernel", CUDA_KERNELS, ids=[kernel.name for kernel in CUDA_KERNELS])


pytestmark = pytest.mark.usefixtures("hopper")


def tensors(T: int = 50, S: int = 50, H: int = 8, G: int = 2, K: int = 60, dtype: torch.dtype = torch.bfloat16):
    return tuple(torch.empty(2, n, heads, K, dtype=dtype, device="meta") for n, heads in ((T, H), (S, G), (S, G)))


@KERNELS
@pytest.mark.parametrize("width", [60, 64, 127])
def test_shapes_are_normalised(kernel, width: int) -> None:
    q, k, v = (x.transpose(1, 2) for x in tensors(K=width))
    out, lse = kernel.forward(q, k, v, None, True, 0.1)
    assert out.shape == q.shape
    assert lse.shape == (2, 8, 50)
    assert lse.dtype == torch.float32
    grads = kernel.backward(torch.empty_like(out), q, k, v, out, lse, None, True, 0.1)
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]


def test_efficient_takes_a_broadcast_mask_of_any_width() -> None:
    kernel = next(kernel for kernel in CUDA_KERNELS if kernel.name == "efficient")
    q, k, v = (x.transpose(1, 2) for x in tensors())
    for shape in ((2, 1, 1, 50), (1, 8, 50, 50), (1, 1, 50, 1)):
        out, lse = kernel.forward(q, k, v, torch.empty(shape, device="meta"), False, 0.1)
        assert (out.shape, lse.shape) == (q.shape, (2, 8, 50))


@pytest.mark.parametrize("S", [48, 50])
def test_a_bias_whose_heads_lie_last_is_turned(S: int) -> None:
    """T5's: [T, S, H], permuted. A kernel wants keys one after another, and padding keeps an order of channels last."""
    bias = torch.randn(50, S, 8).permute(2, 0, 1)[None]
    q, k = torch.empty(2, 8, 50, 64), torch.empty(2, 8, S, 64)
    readable = aten_cuda._readable(bias, q, k)
    assert readable.stride(-1) == 1 and torch.equal(readable, bias.expand(2, 8, 50, S))


@KERNELS
def test_refusals_name_the_feature(kernel) -> None:
    q, k, v = tensors(dtype=torch.float64)
    assert any("float64 is not supported" in reason for reason in kernel.reasons(bind(q, k, v)))
    q, k, v = tensors()
    assert kernel.reasons(bind(q, k, v, mask=Causal())) == []
    masked = kernel.reasons(bind(q, k, v, mask=Dense(torch.empty(1, 1, 50, 50, dtype=torch.bool, device="meta"))))
    assert bool(masked) is not kernel.takes_mask
    bias = torch.empty(50, 50, device="meta")
    rounded = kernel.reasons(bind(q, k, v, bias=bias))
    assert ("a bias of float32 would be rounded to bfloat16" in rounded) is kernel.takes_mask
    assert bool(kernel.reasons(bind(q, k, v, bias=bias.bfloat16()))) is not kernel.takes_mask
    q, k, v = tensors(K=300)
    assert any("wider than" in reason for reason in kernel.reasons(bind(q, k, v)))
    q, k, v = tensors()
    for scale in (0.0, -0.3):
        assert "the scale must be positive: -inf is multiplied by it" in kernel.reasons(bind(q, k, v, scale=scale))
    for nothing in (bind(q[:0], k[:0], v[:0]), bind(q[:, :, :0], k, v)):  # None, or an assertion
        assert "there are no heads of any row" in kernel.reasons(nothing)


@KERNELS
def test_causal_pieces_that_are_not_square_are_left_to_the_kernel_that_aligns_them_top_left(kernel) -> None:
    lengths = torch.empty(2, dtype=torch.int64, device="meta")
    square, cached, one = tensors(), tensors(S=80), tensors(T=1)
    offsets = [torch.empty(3, dtype=torch.int64, device="meta") for _ in range(2)]
    packed = [x[:1] for x in square]
    unequal = [
        bind(*square, mask=Causal() & Lengths(lengths)),
        bind(*cached, mask=Causal("top-left")),
        bind(*one, mask=Causal("top-left")),
        bind(*packed, mask=Causal("top-left") & Packed(*offsets)),
    ]
    equal = [
        bind(*square, mask=Lengths(lengths)),
        bind(*packed, mask=Causal() & Packed(offsets[0])),
        bind(*cached),
    ]
    assert all(bool(kernel.reasons(call)) is not kernel.takes_mask for call in unequal)
    single = [bind(*one, mask=Causal() & Lengths(lengths))]  # to which cuDNN has another objection
    equal += [] if kernel.name == "cudnn" else single
    assert all(kernel.reasons(call) == [] for call in equal)
    assert not any("square" in reason or "causal" in reason for call in single for reason in kernel.reasons(call))


def test_cudnn_is_given_dout_and_out_in_one_layout_and_nothing_that_begins_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plan is kept for those of q, k and v alone."""
    given: list[tuple[Tensor, ...]] = []

    def back(*tensors: Any, **options: Any) -> tuple[Tensor, ...]:
        given.append(tensors[:5])
        return tensors[1:4]

    monkeypatch.setattr(aten_cuda, "_aten", SimpleNamespace(_scaled_dot_product_cudnn_attention_backward=back))
    B, T, H, K = 2, 74, 4, 16
    x = torch.randn(B, T, H, K, dtype=torch.bfloat16)
    wide = torch.randn(B, T, H * K + 256, dtype=torch.bfloat16)[..., : H * K].unflatten(-1, (H, K))
    between = torch.empty(x.numel() + 3, dtype=torch.bfloat16)[3:].view(x.shape).copy_(x)
    heads_first = x.transpose(1, 2).contiguous().transpose(1, 2)
    lse = torch.zeros(B, H, T, 1)
    for dout in (x, wide, between, heads_first, x[:, :1, :1, :1].expand(x.shape)):
        for out in (x, heads_first):
            q, k, v, o, do = (each.transpose(1, 2) for each in (x, between, x, out, dout))
            CUDA_KERNELS[0]._backward(do, q, k, v, o, lse, None, False, 0.25)
            assert torch.equal(given[-1][0], do) and torch.equal(given[-1][4], o) and torch.equal(given[-1][2], k)
    assert {each.stride() for dout, *_, out in given for each in (dout, out)} == {x.transpose(1, 2).stride()}
    assert all(each.data_ptr() % 16 == 0 for tensors in given for each in tensors)


def test_efficient_is_given_out_in_the_memory_order_that_it_walks(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = next(kernel for kernel in CUDA_KERNELS if kernel.name == "efficient")
    given = []

    def backward(dout, q, k, v, mask, out, *rest, **scale):
        given.append(out)
        return q, k, v, None

    monkeypatch.setattr(aten_cuda, "_aten", SimpleNamespace(_scaled_dot_product_efficient_attention_backward=backward))
    q, k, v = (x.transpose(1, 2) for x in tensors())
    for out in (torch.empty_like(q), torch.empty(q.shape, dtype=q.dtype, device="meta")):
        kernel.backward(out, q, k, v, out, torch.empty(2, 8, 50, device="meta"), None, False, 0.1)
    assert all(out.transpose(1, 2).is_contiguous() for out in given)


@pytest.mark.parametrize("kernel", CUDA_KERNELS[:2], ids=["cudnn", "flash"])
def test_grouped_heads_are_not_repeated(kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each key is read once, and the gradients of keys come back with as many heads."""
    seen, name = [], f"_scaled_dot_product_{kernel.name}_attention"
    for way in ("forward", "backward"):
        there = getattr(torch, name) if way == "forward" else getattr(torch.ops.aten, f"{name}_backward")

        def spy(*args, there=there, **kwargs):
            seen.append([x.shape[1] for x in args[:4] if isinstance(x, torch.Tensor) and x.dim() == 4])
            return there(*args, **kwargs)

        q, k, v = (x.transpose(1, 2) for x in tensors(K=64))
        if way == "forward":
            monkeypatch.setattr(torch, name, spy)
            out, lse = kernel.forward(q, k, v, None, True, 0.1)
        else:
            monkeypatch.setattr(aten_cuda, "_aten", SimpleNamespace(**{f"{name}_backward": spy}))
            assert [x.shape[1] for x in kernel.backward(out, q, k, v, out, lse, None, True, 0.1)] == [8, 2, 2]
    assert seen == [[8, 2, 2], [8, 8, 2, 2]]


def test_hopper_begins_with_cudnn_and_older_cards_with_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    assert [kernel.name for kernel in cuda_kernels(gpu)] == ["cudnn", "flash", "efficient"]
    place = device.Platform("cuda", (2, 13, 0), (13, 0), (9, 20, 0), (8, 0))
    monkeypatch.setattr(aten_cuda, "platform", lambda _: place)
    assert [kernel.name for kernel in cuda_kernels(gpu)] == ["flash", "cudnn", "efficient"]
    q, k, v = tensors(K=256)
    assert CUDA_KERNELS[0].reasons(bind(q, k, v)) == ["heads wider than 128 are not supported"]


def test_a_single_query_is_not_the_same_twice_in_cudnn() -> None:
    """Law 9, as measured on an H100; with a single key its gradient ends the process, too."""
    for S in 1, 512:
        assert "a single query differs" in "".join(CUDA_KERNELS[0].reasons(bind(*tensors(T=1, S=S))))
    assert not CUDA_KERNELS[0].reasons(bind(*tensors(T=2, S=512)))


def test_triton_is_preferred_for_little_and_for_few_queries_and_masks() -> None:
    large = tensors(T=2048, S=2048)
    assert not slow(bind(*large)) and slow(bind(*tensors()))
    assert not slow(bind(*tensors(dtype=torch.float32)))
    assert slow(bind(*large, bias=torch.empty(1, 1, 2048, 2048, dtype=torch.bfloat16, device="meta")))
    assert slow(bind(*large, mask=Dense(torch.empty(2048, 2048, dtype=torch.bool, device="meta"))))
    assert slow(bind(*tensors(T=16, S=65536))) and not slow(bind(*tensors(T=17, S=2049)))


def test_in_float32_triton_is_preferred_for_narrow_heads_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(**kind: Any) -> bool:
        return slow(bind(*tensors(dtype=torch.float32, **({"T": 2048, "S": 2048, "K": 64} | kind))))

    for capability, faster in (((8, 0), False), ((9, 0), True)):
        place = device.Platform("cuda", (2, 13, 0), (13, 0), (9, 20, 0), capability)
        monkeypatch.setattr(aten_cuda, "platform", lambda _, place=place: place)
        assert found() == faster
        assert not (found(K=72) or found(T=50, S=50) or found(T=16, S=65536))


@pytest.mark.parametrize(("T", "S", "better"), [(1, 65536, True), (4, 65536, True), (5, 65536, False)])
def test_with_gradients_triton_is_preferred_where_one_tile_has_all_queries(T: int, S: int, better: bool) -> None:
    q, k, v = tensors(T=T, S=S)
    call = bind(q.requires_grad_(), k, v)
    assert slow(call) == call.few == better
    with torch.no_grad():
        assert slow(call)


@pytest.mark.parametrize(
    ("T", "more", "single", "trains", "chosen"),
    [
        (50, {}, True, True, "aten"),
        (50, {}, False, True, "triton"),
        (50, {}, True, False, "triton"),
        (1, {}, True, True, "triton"),
        (2048, {}, False, True, "aten"),
        (50, {"K": 60}, True, True, "triton"),
    ],
    ids=["out alone", "lse too", "inference", "few queries", "much", "no whole eights"],
)
def test_for_a_gradient_of_little_torch_is_preferred_where_its_own_op_gives_all(
    T: int, more: dict[str, int], single: bool, trains: bool, chosen: str
) -> None:
    with FakeTensorMode():
        made = partial(torch.empty, dtype=torch.bfloat16, device="cuda", requires_grad=trains)
        call = bind(*(made(2, n, 8, more.get("K", 64)) for n in (T, max(T, 512), max(T, 512))))
        assert (aten.prefers(call, single) or "aten") == chosen


def test_what_only_efficient_takes_is_left_to_triton() -> None:
    with FakeTensorMode():
        made = partial(torch.empty, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        call = bind(*(made(2, n, 8, 64) for n in (64, 128, 128)), mask=Causal("top-left"))
        assert torch_op(call).func.__self__.name == "efficient" and aten.prefers(call, True) == "triton"


def test_little_goes_to_what_is_quick_to_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aten, "_kernels", lambda call: CUDA_KERNELS)
    for T, quick, much in ((64, "flash", "cudnn"), (4096, "cudnn", "cudnn")):
        call = bind(*tensors(T=T, S=T, K=64))
        assert (torch_op(call).func.__self__.name, aten._kernel(call).name) == (quick, much)


class TestFolded(InOut):
    """By torch, where no kernel of ours is."""

    fold = staticmethod(aten_cuda._folded)


@pytest.mark.parametrize(
    ("dtype", "V", "folds"), [(torch.bfloat16, 3, True), (torch.bfloat16, 2, False), (torch.float16, 64, False)]
)
def test_where_out_has_no_room_a_gradient_of_lse_has_a_column(dtype: torch.dtype, V: int, folds: bool) -> None:
    q, k, _ = tensors(dtype=dtype)
    assert folds_dlse(bind(q, k, k.new_empty(*k.shape[:-1], V))) == folds


@pytest.mark.parametrize(("dtype", "taken"), [(torch.bfloat16, True), (torch.float16, False)])
def test_heads_as_wide_as_a_kernel_takes_leave_no_column(dtype: torch.dtype, taken: bool) -> None:
    kernel = next(kernel for kernel in CUDA_KERNELS if kernel.name == "flash")
    assert kernel.reasons(bind(*tensors(K=256, dtype=dtype))) == (
        [] if taken else ["heads wider than 256 are not supported"]
    )


def test_the_ledger_is_asked() -> None:
    """cuDNN 9.26 on Hopper gives NaN gradients for a single query: refused with its issue, for gradients only."""
    kernel = next(kernel for kernel in CUDA_KERNELS if kernel.name == "cudnn")
    q, k, v = tensors(T=1)
    place = device.Platform("cuda", (2, 13, 0), (13, 0), (9, 26, 0), (9, 0))
    aten_cuda.platform = lambda _: place  # the fixture puts it back
    assert not any("ledger" in reason for reason in kernel.reasons(bind(q, k, v)))
    assert any("cudnn-frontend#1072" in reason for reason in kernel.reasons(bind(q.requires_grad_(), k, v)))


@pytest.mark.parametrize("mask", ["packed", "lengths"])
def test_what_lies_on_the_gpu_is_not_waited_for(mask: str) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(1, 8, 2, 64, dtype=torch.bfloat16, device="cuda")
        given = torch.empty(3 if mask == "packed" else 1, dtype=torch.int32, device="cuda")
        call = bind(q, q, q, mask=Packed(given) if mask == "packed" else Lengths(given))
        assert any("waits for the GPU" in reason for reason in reasons(call))
        assert not any("waits for the GPU" in reason for reason in reasons(bind(q, q, q)))


ASKED: dict[str, Callable[[], dict[str, Any]]] = {
    "causal": lambda: rows() | {"mask": Causal()},
    "not in eights": lambda: rows(K=20),
    "one head of one query": lambda: rows(T=1, H=1, G=1) | {"bias": torch.zeros(1, dtype=torch.float64)},
    "wider values": lambda: rows() | {"v": torch.randn(2, 9, 2, 24, dtype=torch.float64)},
    "bias": lambda: rows(G=4) | {"bias": torch.randn(9, 9, dtype=torch.float64)},
    "a row sees nothing": lambda: rows() | {"mask": Dense(torch.arange(9)[:, None] != 4)},
    "sink": lambda: rows() | {"sink": torch.randn(4, dtype=torch.float64)},
    "a scale": lambda: rows() | {"scale": 0.7},
    "heads first": lambda: {n: x.transpose(1, 2).contiguous().transpose(1, 2) for n, x in rows().items()},
    "another memory order": lambda: {
        n: x.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0) for n, x in rows().items()
    },
}


def turned(dlse: Tensor, lse: Tensor, dout: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """dout, never 0, and out less so much of it that sum(dout * out) is less by dlse, where a row sees anything."""
    dout = dout.where(dout.any(-1, keepdim=True), 1e-12)
    dlse = dlse.masked_fill(lse == -torch.inf, 0.0)[..., None]
    return dout, out - dlse / dout.square().sum(-1, keepdim=True) * dout


@pytest.mark.parametrize("through", ["out", "lse", "both"])
@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("folds", [False, True], ids=["column", "folded"])
def test_a_call_like_one_before_asks_no_kernel_and_gives_the_same(
    name: str, through: str, folds: bool, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if folds:
        monkeypatch.setattr(aten, "fold", turned)
        for module in (aten, aten_cuda):
            monkeypatch.setattr(module, "folds_dlse", lambda call: True)
    for turn in range(4):
        inputs = ASKED[name]()
        size = (*inputs["q"].shape[:3], inputs["v"].shape[-1])
        pulls = torch.randn(size, dtype=torch.float64), torch.randn(size[:3], dtype=torch.float64)
        pulls = tuple(x if through in (n, "both") else None for n, x in zip(("out", "lse"), pulls, strict=True))
        truth = evaluate(inputs, through=pulls, leave=("bias",))
        counted.clear()
        found = evaluate(inputs, "aten", through=pulls, leave=("bias",))
        assert_close({n: torch.zeros_like(found[n]) if x is None else x for n, x in truth.items()}, found)
        assert bool({*counted} - {"an lse"}) is (turn == 0)
        with torch.no_grad():
            out, lse = foci.attention_with_lse(**inputs, backend="aten")
        assert_close({"out": out, "lse": lse}, {n: truth[n] for n in ("out", "lse")})
        assert out.is_contiguous() and lse.is_contiguous()
        for x in foci.attention_with_lse(**inputs | {"q": inputs["q"].clone().requires_grad_()}, backend="aten"):
            assert x.is_contiguous() and x.add_(1.0).requires_grad


def alone(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
    out = foci.attention(q, k, v, backend="aten", **more)
    return out, out.new_zeros(())


@pytest.mark.parametrize("name", ASKED)
def test_one_that_wants_out_alone_too(name: str, counted: list[str]) -> None:
    for turn in range(4):
        inputs = ASKED[name]()
        pulls = torch.randn_like(inputs["q"][..., :1].expand(-1, -1, -1, inputs["v"].shape[-1])), None
        truth = evaluate(inputs, through=pulls, leave=("bias",))
        counted.clear()
        found = evaluate(inputs, through=pulls, leave=("bias",), call=alone)
        assert_close({n: x for n, x in found.items() if n != "lse"}, {n: truth[n] for n in found if n != "lse"})
        with torch.no_grad():
            out = foci.attention(**inputs, backend="aten")
        assert_close({"out": out}, {"out": truth["out"]})
        assert bool({*counted} - {"an lse"}) is (turn == 0) and out.is_contiguous()
        out = foci.attention(**inputs | {"q": inputs["q"].clone().requires_grad_()}, backend="aten")
        assert out.is_contiguous() and out.add_(1.0).requires_grad


@KERNELS
def test_what_comes_behind_a_call_like_one_before_is_heard(
    kernel: Any, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved tensors brought back otherwise, a gradient of any strides, a second derivative, a watcher.

    Of out alone torch itself says that its op has no second derivative.
    """
    monkeypatch.setattr(aten, "_kernels", lambda call: (kernel,))
    inputs, pull = rows(G=4) | {"mask": Causal()}, torch.randn((), dtype=torch.float64).expand(2, 9, 4, 16)
    truth = evaluate(inputs, through=(pull, None))
    leaves = {n: inputs[n].requires_grad_() for n in "qkv"}

    def step(
        before: Any = nullcontext, behind: Any = nullcontext, attend: Any = foci.attention, **more: Any
    ) -> tuple[Tensor, ...]:
        with before():
            out, *_ = outputs if isinstance(outputs := attend(**inputs, backend="aten"), tuple) else (outputs,)
        with behind():
            return torch.autograd.grad(out, list(leaves.values()), pull, **more)

    def turned() -> Any:
        return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x.mT.contiguous().mT)

    ways = ({}, {}, {}, {"before": turned}, {"behind": torch.profiler.profile}, {"create_graph": True})
    for attend in (foci.attention, foci.attention_with_lse):
        for way in ways:
            for found, name in zip(step(attend=attend, **way), leaves, strict=True):
                torch.testing.assert_close(found, truth[f"d{name}"])
    with pytest.raises(Unsupported, match="double backward"):
        torch.autograd.grad(step(attend=attend, create_graph=True)[0].sum(), leaves["k"])
    batch = torch.func.vmap(lambda x: torch.autograd.grad(out, leaves["q"], x, retain_graph=True)[0])
    out = foci.attention(**inputs, backend="aten")
    torch.testing.assert_close(batch(torch.stack([pull, 2 * pull]))[1], 2 * truth["dq"])


@pytest.mark.parametrize("name", ASKED)
def test_a_checkpoint_computes_the_first_call_again_as_the_second(name: str, counted: list[str]) -> None:
    """It asks that what is saved has the same shapes, though the second is decided by the first."""
    inputs = ASKED[name]()
    pull = torch.randn(*inputs["q"].shape[:3], inputs["v"].shape[-1], dtype=torch.float64)

    def again(*rows: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
        return checkpoint(lambda *x: alone(*x, **more), *rows, use_reentrant=False)

    found = evaluate(inputs, through=(pull, None), leave=("bias",), call=again)
    truth = evaluate(inputs, through=(pull, None), leave=("bias",))
    assert_close({n: x for n, x in found.items() if n != "lse"}, {n: truth[n] for n in found if n != "lse"})
    assert len(plans._OPERATOR_PLANS) == 1 + 1  # the reference's, too


@pytest.mark.parametrize("alike", ["q and k", "views of one", "broadcast keys"])
@pytest.mark.parametrize("shape", [{}, {"T": 1}, {"T": 33, "H": 1, "G": 1}], ids=str)
def test_tensors_that_share_memory_have_each_their_gradients_and_nothing_is_kept(
    alike: str, shape: dict[str, int], counted: list[str]
) -> None:
    living: list[weakref.ref[Tensor]] = []
    for _ in range(4):
        q, k, v = (x.requires_grad_() for x in rows(**shape | {"G": shape.get("H", 4)}).values())
        leaves = {"q and k": [q, v], "views of one": [q], "broadcast keys": [q, k]}[alike]
        if alike == "views of one":
            k, v = q.flip(1), q * 2
            q, k, v = torch.stack([q, k, v], 3).unbind(3)
        elif alike == "broadcast keys":
            k = v = k[:1, :, :1].expand_as(q)
        else:
            k = q
        out, truth = (foci.attention(q, k, v, mask=Causal(), backend=name) for name in ("aten", "reference"))
        pull = torch.randn_like(truth)
        for x, y in zip(*(torch.autograd.grad(x, leaves, pull, retain_graph=True) for x in (out, truth)), strict=True):
            torch.testing.assert_close(x, y)
        living += [weakref.ref(x) for x in (q, k, v, out)]
        del q, k, v, x, y, out, truth, leaves, pull
    gc.collect()
    assert all(there() is None for there in living)
