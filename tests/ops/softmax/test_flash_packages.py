"""Modules that take and give what the real packages do, and compute by the equation: each is called as it wants."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foci.core import device
from foci.ops.softmax import flash, flash_packages
from foci.ops.softmax.flash_packages import PACKAGES, Asked, arguments, there

PLACES = {
    "flash_attn_2": "flash_attn/flash_attn_interface.py",
    "flash_attn_3": "flash_attn_interface.py",
    "flash_attn_4": "flash_attn/cute/interface.py",
}
HERE = "from tests.ops.softmax import test_flash_packages as real\n"
TEXTS = {
    "flash_attn_2": "flash_attn_func, _flash_attn_backward = real.second, real.second_backward",
    "flash_attn_3": "flash_attn_func, _flash_attn_backward = real.third, real.third_backward",
    "flash_attn_4": "flash_attn_func, _flash_attn_bwd = real.fourth, real.fourth_backward",
}
HALVES = (torch.bfloat16, torch.float16)


def fits(*tensors: Tensor) -> None:
    """What the kernels check, and what they would read wrongly."""
    q, k, v = tensors[:3]
    assert k.shape == v.shape and q.shape[::3] == k.shape[::3] and q.shape[2] % k.shape[2] == 0
    for x in tensors:
        assert x.dtype in HALVES and x.shape[-1] % 8 == 0 and x.stride(-1) == 1 and x.data_ptr() % 16 == 0
        assert all(step > 0 and step % 8 == 0 for step in x.stride()[:-1])


def logits(q: Tensor, k: Tensor, scale: float, low: int | None, high: int | None) -> Tensor:
    """[B,H,T,S] in float64; the last query stands at the last key, a bound of None hides nothing."""
    T, S, groups = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    z = scale * torch.einsum("bthd,bshd->bhts", q.double(), k.double().repeat_interleave(groups, 2))
    place, key = torch.arange(T)[:, None] + S - T, torch.arange(S)
    hidden = torch.zeros(T, S, dtype=torch.bool)
    hidden = hidden if low is None else hidden | (key < place - low)
    hidden = hidden if high is None else hidden | (key > place + high)
    return z.masked_fill(hidden, -torch.inf)


def attend(q: Tensor, k: Tensor, v: Tensor, z: Tensor, empty: float) -> tuple[Tensor, Tensor]:
    """out, and lse [B,H,T] with `empty` where a row sees nothing or holds NaN, as the kernels write it."""
    lse = z.logsumexp(-1)
    p = torch.exp(z - lse[..., None].masked_fill(lse[..., None] == -torch.inf, 0.0))
    out = torch.einsum("bhts,bshd->bthd", p, v.double().repeat_interleave(q.shape[2] // k.shape[2], 2))
    return out.to(q.dtype), lse.masked_fill((lse == -torch.inf) | lse.isnan(), empty).float()


def gradients(
    q: Tensor, k: Tensor, v: Tensor, z: Tensor, scale: float, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv from out and lse as they are given; delta is sum(dout out) less dlse."""
    assert lse.shape == z.shape[:3] and lse.dtype == torch.float32 and lse.is_contiguous()
    fits(q, k, v, dout, out)
    groups = q.shape[2] // k.shape[2]
    many_k, many_v = (x.double().repeat_interleave(groups, 2) for x in (k, v))
    p = torch.where(z == -torch.inf, 0.0, torch.exp(z - lse.double()[..., None]))
    delta = (dout.double() * out.double()).sum(-1).transpose(1, 2) - dlse
    dz = p * (torch.einsum("bthd,bshd->bhts", dout.double(), many_v) - delta[..., None]) * scale
    dq = torch.einsum("bhts,bshd->bthd", dz, many_k)
    dk = torch.einsum("bhts,bthd->bshd", dz, q.double()).unflatten(2, (-1, groups)).sum(3)
    dv = torch.einsum("bhts,bthd->bshd", p, dout.double()).unflatten(2, (-1, groups)).sum(3)
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def second_bounds(q: Tensor, k: Tensor, causal: bool, left: int, right: int) -> tuple[int | None, int | None]:
    """A window as flash-attn 2 sets it up: a side that it takes for open reaches S keys, from wherever the query is."""
    T, S = q.shape[1], k.shape[1]
    left, right = -1 if left >= S else left, -1 if right >= S else right
    right = 0 if causal and T > 1 else right
    if left < 0 and right < 0:
        return None, None
    return S if left < 0 else left, S if right < 0 else right


def second(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    fits(q, k, v)
    assert dropout_p == softcap == 0.0 and alibi_slopes is None and return_attn_probs
    z = logits(q, k, softmax_scale, *second_bounds(q, k, causal, *window_size))
    return *attend(q, k, v, z, torch.inf), None


@torch.library.custom_op("foci_tests::flash_attn_2_backward", mutates_args=("dq", "dk", "dv"), device_types="cpu")
def second_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None,
    dk: Tensor | None, dv: Tensor | None, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:  # fmt: skip
    assert dropout_p == softcap == 0.0 and alibi_slopes is rng_state is None
    assert dq is not None and dk is not None and dv is not None
    z = logits(q, k, softmax_scale, *second_bounds(q, k, causal, window_size_left, window_size_right))
    if q.shape[1] > 1:  # written so where a row sees nothing, and read so
        assert ((softmax_lse == torch.inf) == (z == -torch.inf).all(-1)).all()
    found = gradients(q, k, v, z, softmax_scale, dout, out, softmax_lse, torch.zeros(()))
    for room, x in zip((dq, dk, dv), found, strict=True):
        room.copy_(x)
    return softmax_lse.clone()


def third_bounds(q: Tensor, k: Tensor, causal: bool, left: int, right: int) -> tuple[int | None, int | None]:
    T, S = q.shape[1], k.shape[1]
    left, right = -1 if left >= S - 1 else left, -1 if right >= T - 1 else right
    right = 0 if causal else right
    return None if left < 0 else left, None if right < 0 else right


def third(
    q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
    return_attn_probs=False,
):  # fmt: skip
    fits(q, k, v)
    out, lse = attend(
        q, k, v, logits(q, k, softmax_scale, *third_bounds(q, k, causal, *window_size)), -torch.inf
    )  # fmt: skip
    return (out, lse) if return_attn_probs else out


def third_backward(
    dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
    max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
    window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
):  # fmt: skip
    z = logits(q, k, softmax_scale, *third_bounds(q, k, is_causal, window_size_left, window_size_right))
    found = gradients(q, k, v, z, softmax_scale, dout, out, softmax_lse, torch.zeros(()))
    for room, x in zip((dq, dk, dv), found, strict=True):
        room.copy_(x)
    return softmax_lse


def older_third_backward(
    dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q, max_seqlen_k, dq, dk,
    dv, softmax_scale, causal, window_size=(-1, -1), softcap=0.0, deterministic=False, sm_margin=0,
):  # fmt: skip
    third_backward(
        dout, q, k, v, out, softmax_lse, dq=dq, dk=dk, dv=dv, softmax_scale=softmax_scale, is_causal=causal,
        window_size_left=window_size[0], window_size_right=window_size[1],
    )  # fmt: skip
    return dq, dk, dv, softmax_lse


def fourth_bounds(causal: bool, left: int | None, right: int | None) -> tuple[int | None, int | None]:
    """None alone is open; a single -1 hides."""
    if left is not None and right is not None and left < 0 and right < 0:
        left = right = None
    return left, 0 if causal else right


def fourth(
    q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, window_size=(None, None),
    learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, return_lse=False,
):  # fmt: skip
    fits(q, k, v)
    assert return_lse
    return attend(q, k, v, logits(q, k, softmax_scale, *fourth_bounds(causal, *window_size)), -torch.inf)


def fourth_backward(
    q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
    window_size_right=None, m_block_size=64, n_block_size=128, deterministic=False, dq=None, dk=None, dv=None,
    dlse=None, learnable_sink=None,
):  # fmt: skip
    z = logits(q, k, softmax_scale, *fourth_bounds(causal, window_size_left, window_size_right))
    assert dlse is None or (dlse.shape == lse.shape and dlse.is_contiguous() and dlse.dtype == torch.float32)
    return gradients(q, k, v, z, softmax_scale, dout, out, lse, torch.zeros(()) if dlse is None else dlse.double())


def forget() -> None:
    """What was found of packages, and the packages."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("flash_attn", "flash_attn_interface")]:
        del sys.modules[name]
    device._found.cache_clear()
    flash_packages._found.cache_clear()
    flash._FAULTS.clear()


Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install packages by name, with another text by `name="text"`; CPU tensors are taken for a Hopper card's."""
    forget()
    place = device.Platform("cuda", (2, 13, 0), (13, 0), (9, 20, 0), (9, 0))
    monkeypatch.setattr(flash, "platform", lambda _: place)
    monkeypatch.syspath_prepend(tmp_path)

    def run(*names: str, **texts: str) -> None:
        for name, text in ({name: TEXTS[name] for name in names} | texts).items():
            file = tmp_path / PLACES[name]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(HERE + text)
            if name == "flash_attn_2":
                (tmp_path / "flash_attn" / "__init__.py").write_text("from . import flash_attn_interface\n")
            if name == "flash_attn_4":
                (tmp_path / "flash_attn" / "cute" / "__init__.py").write_text("from . import interface\n")
        forget()

    yield run
    forget()


def package(name: str) -> flash_packages.Package:
    return next(each for each in PACKAGES if each.name == name)


def loaded() -> list[str]:
    return [name for name in sys.modules if name.startswith("flash_attn")]


@pytest.mark.parametrize("names", [["flash_attn_2"], ["flash_attn_3"], ["flash_attn_4"], list(PLACES)])
def test_each_is_found_alone_and_beside_the_others_without_an_import(names: list[str], install: Install) -> None:
    assert not any(there(each.module) for each in PACKAGES)
    install(*names)
    assert {each.name for each in PACKAGES if there(each.module)} == set(names)
    assert loaded() == []


def test_a_folder_of_that_name_is_no_package(install: Install, tmp_path: Path) -> None:
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn_interface").mkdir()
    forget()
    assert not any(there(each.module) for each in PACKAGES)


def test_the_arguments_of_a_function_and_of_a_custom_op() -> None:
    assert {"softmax_lse", "dq", "window_size_left", "rng_state"} <= arguments(second_backward)
    assert {"softmax_scale", "return_lse"} <= arguments(fourth)


def test_an_open_side_is_said_in_each_one_s_way(install: Install) -> None:
    x = torch.zeros(1, 8, 1, 8)
    assert Asked(x, x, x, 1.0, None, 0).window == (-1, 0)
    assert Asked(x, x, x, 1.0, None, 0).causal and not Asked(x, x, x, 1.0, 3, None).causal
    assert Asked(x, x, x, 1.0, 3, None).window == (3, -1)


@pytest.mark.parametrize("name", PLACES)
def test_each_asks_for_arguments_that_it_uses(name: str, install: Install) -> None:
    install(name)
    for function, words in package(name).asks.items():
        assert set(words) <= arguments(package(name).function(function))
