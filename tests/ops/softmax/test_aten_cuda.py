"""torch's CUDA kernels behind the contract: shapes on the meta device, and refusals. The numbers need a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from foci.core import device
from foci.ops.masks import Causal, Dense, Lengths, Packed
from foci.ops.softmax import aten_cuda
from foci.ops.softmax.aten import reasons
from foci.ops.softmax.aten_cuda import CUDA_KERNELS, cuda_kernels, fold, slow
from foci.ops.softmax.call import bind

KERNELS = pytest.mark.parametrize("kernel", CUDA_KERNELS, ids=[kernel.name for kernel in CUDA_KERNELS])


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reasons ask the ledger about the tensors' platform: say it is a Hopper card with today's libraries."""
    place = device.Platform("cuda", (2, 13, 0), (13, 0), (9, 20, 0), (9, 0))
    monkeypatch.setattr(aten_cuda, "platform", lambda _: place)


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


@KERNELS
def test_refusals_name_the_feature(kernel) -> None:
    q, k, v = tensors(dtype=torch.float64)
    assert any("float64 is not supported" in reason for reason in kernel.reasons(bind(q, k, v)))
    q, k, v = tensors()
    assert kernel.reasons(bind(q, k, v, mask=Causal())) == []
    masked = kernel.reasons(bind(q, k, v, mask=Dense(torch.empty(1, 1, 50, 50, dtype=torch.bool, device="meta"))))
    assert bool(masked) is not kernel.takes_mask
    q, k, v = tensors(K=300)
    assert any("wider than" in reason for reason in kernel.reasons(bind(q, k, v)))


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
        bind(*one, mask=Causal() & Lengths(lengths)),
        bind(*packed, mask=Causal() & Packed(offsets[0])),
        bind(*cached),
    ]
    assert all(bool(kernel.reasons(call)) is not kernel.takes_mask for call in unequal)
    assert all(kernel.reasons(call) == [] for call in equal)


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
    seen, aten = [], torch.ops.aten
    for way in ("forward", "backward"):
        name = f"_scaled_dot_product_{kernel.name}_attention{'_backward' * (way == 'backward')}"

        def spy(*args, there=getattr(aten, name), **kwargs):
            seen.append([x.shape[1] for x in args[:4] if isinstance(x, torch.Tensor) and x.dim() == 4])
            return there(*args, **kwargs)

        monkeypatch.setattr(aten_cuda, "_aten", SimpleNamespace(**{name: spy}))
        q, k, v = (x.transpose(1, 2) for x in tensors(K=64))
        if way == "forward":
            out, lse = kernel.forward(q, k, v, None, True, 0.1)
        else:
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


def test_a_single_query_and_key_ends_the_process_in_cudnn() -> None:
    assert any("single query and key" in reason for reason in CUDA_KERNELS[0].reasons(bind(*tensors(T=1, S=1))))


def test_triton_is_preferred_for_few_queries_and_for_masks_without_gradients() -> None:
    bias = torch.empty(1, 1, 50, 50, dtype=torch.bfloat16, device="meta")
    assert slow(bind(*tensors(T=1, S=80))) and slow(bind(*tensors(), bias=bias))
    assert not slow(bind(*tensors())) and not slow(bind(*tensors(T=1, S=80, dtype=torch.float32)))
    q, k, v = tensors(T=1, S=80)
    assert not slow(bind(q.requires_grad_(), k, v))


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
def test_a_gradient_of_lse_is_folded_into_out(size: float) -> None:
    """sum(dout * out) comes out less by it, also where dout is 0; dout stays what it was but for 2^-64."""
    torch.manual_seed(0)
    dout, out = (torch.randn(2, 9, 3, 32).bfloat16() for _ in range(2))
    dout *= size
    dout[0, 2], dout[1, 4] = 0.0, dout[1, 4] * 1e-3
    dlse = size * torch.randn(2, 9, 3)
    given, moved = fold(dlse, dout, out)
    assert moved.dtype == given.dtype == torch.bfloat16
    assert (given - dout).abs().max() <= 2.0**-64
    delta = (dout.double() * out.double()).sum(-1)
    folded = (given.double() * moved.double()).sum(-1)
    rounding = (given.double() * moved.double()).abs().sum(-1) * 2.0**-8  # bfloat16 has eight digits
    assert ((folded - (delta - dlse)).abs() <= 1.001 * rounding).all()


def test_the_ledger_is_asked() -> None:
    """cuDNN 9.26 on Hopper gives NaN gradients for a single query: refused with its issue, for gradients only."""
    kernel = next(kernel for kernel in CUDA_KERNELS if kernel.name == "cudnn")
    q, k, v = tensors(T=1)
    place = device.Platform("cuda", (2, 13, 0), (13, 0), (9, 26, 0), (9, 0))
    aten_cuda.platform = lambda _: place  # the fixture puts it back
    assert kernel.reasons(bind(q, k, v)) == []
    assert any("cudnn-frontend#1072" in reason for reason in kernel.reasons(bind(q.requires_grad_(), k, v)))


@pytest.mark.parametrize("mask", ["packed", "lengths"])
def test_what_lies_on_the_gpu_is_not_waited_for(mask: str) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(1, 8, 2, 64, dtype=torch.bfloat16, device="cuda")
        given = torch.empty(3 if mask == "packed" else 1, dtype=torch.int32, device="cuda")
        call = bind(q, q, q, mask=Packed(given) if mask == "packed" else Lengths(given))
        assert any("waits for the GPU" in reason for reason in reasons(call))
        assert not any("waits for the GPU" in reason for reason in reasons(bind(q, q, q)))
