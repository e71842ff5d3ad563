"""Paged decoding equals attention to the gathered cache, whatever lies in pages that nobody needs."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import foci
from foci.core import tune
from foci.core.tune import interpreting
from foci.ops.softmax import gpu, paged

BACKENDS = [None, "chunked", "reference"]
LENGTHS = (13, 0, 24, 5)


def cache(
    T: int = 3, page: int = 5, H: int = 4, G: int = 2, K: int = 16, V: int = 24, M: int = 5,
    lengths: tuple[int, ...] = LENGTHS, dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:  # fmt: skip
    """Rows of these lengths in pages drawn at random; NaN in what no row holds, nonsense in the table's tail."""
    draw = torch.Generator().manual_seed(0)
    needed = [-(-n // page) for n in lengths]
    P = sum(needed) + 2
    order = torch.randperm(P, generator=draw).tolist()
    table = torch.tensor([[-7, 10**6][n % 2] for n in range(len(lengths) * M)]).view(len(lengths), M).int()
    k, v = (torch.full((P, page, G, D), torch.nan, dtype=dtype) for D in (K, V))
    for row, length in enumerate(lengths):
        for place in range(needed[row]):
            number, rest = order.pop(), min(page, length - place * page)
            table[row, place] = number
            for pages in (k, v):
                pages[number, :rest] = torch.randn(pages[number, :rest].shape, generator=draw).to(dtype)
    q = torch.randn(len(lengths), T, H, K, generator=draw).to(dtype)
    return {"q": q, "k_pages": k, "v_pages": v, "table": table, "lengths": torch.tensor(lengths)}


def truth(inputs: dict[str, Any], window: int | None = None, **extra: Any) -> Tensor:
    """Row by row, in float64, each with exactly its own keys."""
    rows = []
    for row, length in enumerate(inputs["lengths"].tolist()):
        page = inputs["k_pages"].shape[1]
        used = inputs["table"][row, : -(-length // page)].long()
        k, v = (inputs[name][used].flatten(0, 1)[None, :length].double() for name in ("k_pages", "v_pages"))
        q = inputs["q"][row : row + 1].double()
        # Of fewer keys than tokens the first tokens are counted, as Lengths counts them.
        place, key = torch.arange(q.shape[1])[:, None] + max(length - q.shape[1], 0), torch.arange(length)
        seen = (key <= place) & (key >= place - (10**6 if window is None else window))
        rows.append(foci.attention(q, k, v, mask=foci.Dense(seen[None, None]), backend="reference", **extra))
    return torch.cat(rows)


def forgotten(inputs: dict[str, Any], window: int) -> None:
    """Of pages that lie before the window of every token: NaN in them, nonsense for their numbers."""
    T, page = inputs["q"].shape[1], inputs["k_pages"].shape[1]
    for row, length in enumerate(inputs["lengths"].tolist()):
        for place in range(max(length - T - window, 0) // page):
            number = int(inputs["table"][row, place])
            inputs["k_pages"][number] = inputs["v_pages"][number] = torch.nan
            inputs["table"][row, place] = (number, -1, 10**6)[place % 3]


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_attention_to_the_gathered_cache(backend: str | None) -> None:
    for extra in ({}, {"softcap": 2.0, "scale": 0.3}, {"sink": torch.randn(4)}, {"window": 6}):
        inputs = cache()
        found = foci.attention_paged(**inputs, **extra, backend=backend)
        assert found.shape == (4, 3, 4, 24) and bool((found[1] == 0).all() or "sink" in extra)
        torch.testing.assert_close(found.double(), truth(inputs, **extra), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_token_of_one_key_head_and_long_rows(backend: str | None) -> None:
    inputs = cache(T=1, page=16, H=4, G=1, M=40, lengths=(600, 1, 0))
    found = foci.attention_paged(**inputs, backend=backend)
    torch.testing.assert_close(found.double(), truth(inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_that_the_table_has_no_room_for_are_padding_too(backend: str | None, window: int | None) -> None:
    """A batch may be as long as a bucket says; query i sees j <= i of a row of fewer keys, whatever its table holds."""
    inputs = cache(T=12, M=2, page=3, lengths=(4, 2, 0, 6))
    found = foci.attention_paged(**inputs, window=window, backend=backend)
    torch.testing.assert_close(found.double(), truth(inputs, window=window), rtol=1e-5, atol=1e-5)
    with pytest.raises(foci.Unsupported, match="room for 6 keys, fewer than the 12 tokens"):
        foci.attention_paged(**inputs, backend="triton")
    with pytest.raises(foci.Unsupported) as refusal:
        foci.attention_paged(**cache(T=6, M=2, page=3, lengths=(4, 2, 0, 6)), backend="triton")
    assert "room" not in str(refusal.value)


EDGES: dict[str, dict[str, Any]] = {
    "pages of one key": {"page": 1, "M": 7, "lengths": (7, 0, 3)},
    "pages of one key, too few": {"page": 1, "M": 1, "T": 2, "H": 2, "lengths": (1, 0)},
    "one key too few": {"T": 6, "M": 1, "lengths": (5, 2)},
    "one key in the last page": {"lengths": (11, 4)},
    "fewer heads than tokens": {"T": 5, "H": 2, "G": 1, "lengths": (13, 24)},
}


@pytest.mark.parametrize("window", [None, 0, 1, 6])
@pytest.mark.parametrize("edge", EDGES)
def test_pages_that_a_row_just_fills_or_just_begins(edge: str, window: int | None) -> None:
    inputs = cache(**EDGES[edge])
    found = foci.attention_paged(**inputs, window=window)
    torch.testing.assert_close(found.double(), truth(inputs, window=window), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [0, 2])
def test_a_row_of_just_its_new_tokens_keeps_its_first_key(window: int) -> None:
    inputs = cache(lengths=(3, 2))
    found = foci.attention_paged(**inputs, window=window)
    torch.testing.assert_close(found.double(), truth(inputs, window=window), rtol=1e-5, atol=1e-5)


def test_a_cache_of_one_page() -> None:
    inputs = cache(lengths=(4,))
    page = int(inputs["table"][0, 0])
    expected = truth(inputs)
    inputs |= {name: inputs[name][page : page + 1] for name in ("k_pages", "v_pages")}
    inputs["table"][0, 0] = 0
    torch.testing.assert_close(foci.attention_paged(**inputs).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [2**31 + 7, 2**32, sys.maxsize, 2**70])
def test_a_window_as_wide_as_a_number_hides_nothing(window: int) -> None:
    inputs = cache()
    inputs["lengths"] = inputs["lengths"].int()
    assert torch.equal(foci.attention_paged(**inputs, window=window), foci.attention_paged(**inputs, window=100))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("T", [1, 3])
def test_pages_before_the_window_may_be_anything(T: int, backend: str | None) -> None:
    inputs = cache(T=T, M=5, lengths=(13, 25, 2))
    expected = truth(inputs, window=6)
    forgotten(inputs, 6)
    found = foci.attention_paged(**inputs, window=6, backend=backend)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    inputs["table"][1, 3] = -1
    with pytest.raises(ValueError, match=r"table\[1, 3\] is -1"):
        foci.attention_paged(**inputs, window=6, backend=backend)


def test_a_page_that_ends_just_before_the_window_is_not_needed() -> None:
    inputs = cache(lengths=(19,))
    expected = truth(inputs, window=6)  # the first token stands at 16 and reaches 10, where the third page begins
    forgotten(inputs, 6)
    assert inputs["table"][0, 1] == -1
    torch.testing.assert_close(foci.attention_paged(**inputs, window=6).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("page", [1, 5])
def test_the_page_of_a_single_key_has_to_be_there_too(page: int) -> None:
    inputs = cache(page=page, M=3, lengths=(2 * page + 1,), T=1)
    inputs["table"][0, 2] = P = inputs["k_pages"].shape[0]
    with pytest.raises(ValueError, match=rf"table\[0, 2\] is {P}; expected 0 to {P - 1}"):
        foci.attention_paged(**inputs)
    inputs = cache(page=page, M=3, lengths=(2 * page,), T=1)
    inputs["table"][0, 1] = -1
    with pytest.raises(ValueError, match=r"table\[0, 1\] is -1"):
        foci.attention_paged(**inputs)


def test_pages_that_no_token_needs_are_not_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    gathered = paged.gathered
    monkeypatch.setattr(paged, "gathered", lambda pages, table: seen.append(table) or gathered(pages, table))
    inputs = cache(T=1, M=5, lengths=(13, 24, 2))
    for window, columns in ((None, 5), (6, 2)):
        expected = truth(inputs, window=window)
        found = foci.attention_paged(**inputs, window=window)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
        assert {table.shape[1] for table in seen} == {columns}
        seen.clear()
    inputs = cache(T=1, M=400, lengths=(13, 24, 2))
    foci.attention_paged(**inputs)
    assert seen[0].shape[1] == 5


def test_autocast_takes_its_dtype() -> None:
    inputs = cache()
    expected = foci.attention_paged(**{n: x.bfloat16() if x.is_floating_point() else x for n, x in inputs.items()})
    inputs["k_pages"] = inputs["k_pages"].bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = foci.attention_paged(**inputs)
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected)


@pytest.mark.parametrize("window", [None, 6])
def test_a_programs_default_device_does_not_matter(window: int | None) -> None:
    inputs = cache() | {"window": window}
    found = foci.attention_paged(**inputs)
    with torch.device("meta"):
        assert torch.equal(foci.attention_paged(**inputs), found)


def test_no_pages_at_all() -> None:
    inputs = cache(lengths=(0, 0)) | {name: torch.zeros(0, 5, 2, 16) for name in ("k_pages", "v_pages")}
    assert not foci.attention_paged(**inputs).any()
    with pytest.raises(foci.Unsupported, match="there are no pages"):  # on a GPU its lengths are read unchecked
        foci.attention_paged(**inputs, backend="triton")


@pytest.mark.parametrize("name", ["table", "lengths", "q"])
def test_rows_of_vmap_are_calls(name: str) -> None:
    inputs = cache()
    rows = torch.stack([inputs[name], inputs[name].flip(0)])
    if name == "table":  # of other rows' pages, and of no others: vmap shows no values to look at
        rows = rows.clamp(0, 3)
        inputs["lengths"] = inputs["lengths"].clamp(max=5)
        inputs["k_pages"], inputs["v_pages"] = (inputs[x].nan_to_num(1.0) for x in ("k_pages", "v_pages"))
    if name == "lengths":
        inputs["table"] = torch.arange(20).view(4, 5)
        inputs["k_pages"], inputs["v_pages"] = torch.randn(20, 5, 2, 16), torch.randn(20, 5, 2, 24)
    found = torch.func.vmap(lambda row: foci.attention_paged(**inputs | {name: row}))(rows)
    for row, out in zip(rows, found, strict=True):
        torch.testing.assert_close(out, foci.attention_paged(**inputs | {name: row}))


@pytest.mark.parametrize("name", ["table", "lengths"])
def test_what_is_out_of_range_raises_compiled_and_mapped_too(name: str) -> None:
    inputs = cache()
    good = inputs.pop(name)
    bad = good.clone()
    if name == "table":
        bad[0, 1] = 99
    else:
        bad[0] = 26
    for error, way in (
        (RuntimeError, lambda call: torch.compile(call, fullgraph=True, backend="aot_eager")),
        (ValueError, lambda call: lambda x: torch.func.vmap(call)(x[None])),
    ):
        run = way(lambda x: foci.attention_paged(**inputs, **{name: x}))
        torch.testing.assert_close(run(good).view(4, 3, 4, 24), foci.attention_paged(**inputs, **{name: good}))
        with pytest.raises(error, match=f"attention_paged: {name} must"):
            run(bad)


def test_kernels_launch_once_or_twice() -> None:
    pytest.importorskip("triton")
    inputs = cache(T=1, page=16, M=8)
    names = ("q", "k_pages", "v_pages", "table", "lengths")
    meta = {name: torch.empty_like(inputs[name], device="meta") for name in names}
    call = paged._bound(paged._Tensors(**meta, sink=None), None, None, None)
    for M, kernels in ((8, 1), (2048, 2)):
        with tune.record_launches(tune.TARGETS["sm_90"]) as launches:
            gpu.forward_paged(call, torch.empty(4, M, dtype=torch.int32, device="meta"))
        assert len(launches) == kernels


WRONG = {
    "attention_paged: lengths[0] is 26; expected 0 to 25, what 5 pages of 5 hold": {"lengths": [26, 0, 24, 5]},
    "attention_paged: table[0, 1] is 99; expected 0 to": {"table": (0, 1, 99)},
    "attention_paged: lengths must be an int32 or int64 tensor, got torch.float32": {"lengths": [1.0, 0.0, 2.0, 3.0]},
    "attention_paged: lengths has shape [3] for [B], so B would be 3; q says B=4": {"lengths": [1, 2, 3]},
    "attention_paged: k_pages has 3 heads but q has 4": {"G": 3},
    "attention_paged: k_pages has 0 heads but q has 4": {"G": 0},
    "attention_paged: q, k_pages, v_pages have dtypes torch.float32, torch.float16, torch.float32": {"half": True},
    "attention_paged: table is on meta, q is on cpu; expected one device": {"table_on": "meta"},
    "attention_paged: q, k_pages, v_pages have dtypes torch.float8_e5m2, torch.float8_e5m2, torch.float8_e5m2": {
        "dtype": torch.float8_e5m2
    },
    "attention_paged: softcap must be a positive finite number, got -1": {"softcap": -1.0},
    "attention_paged: softcap must be a positive finite number, got -2": {"softcap": -2.0, "backend": "chunked"},
    "attention_paged: scale must be a finite number, got nan": {"scale": float("nan"), "backend": "reference"},
    "attention_paged: scale must be a finite number, got 1e+39; expected": {"scale": 1e39},
    "attention_paged: window must be a non-negative int or None, got -2": {"window": -2},
    "attention_paged: window must be a non-negative int or None, got True": {"window": True},
    "attention_paged: window must be a non-negative int or None, got 1.5": {"window": 1.5},
    "attention_paged: unknown backend 'paged'; expected one of 'aten'": {"backend": "paged"},
    "attention_paged: sink must be a floating tensor, got torch.float8_e4m3fn": {
        "sink": torch.zeros(4).to(torch.float8_e4m3fn)
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_is_named(message: str) -> None:
    change = dict(WRONG[message])
    inputs = cache(G=change.pop("G", 2))
    dtype, device = change.pop("dtype", torch.float32), change.pop("table_on", "cpu")
    inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}
    inputs["table"] = inputs["table"].to(device)
    if "lengths" in change:
        inputs["lengths"] = torch.tensor(change.pop("lengths"))
    if "table" in change:
        row, place, page = change.pop("table")
        inputs["table"][row, place] = page
    if change.pop("half", False):
        inputs["k_pages"] = inputs["k_pages"].half()
    with pytest.raises(ValueError, match=re.escape(message)):
        foci.attention_paged(**inputs, **change)


def test_it_says_that_it_has_no_gradient() -> None:
    inputs = cache()
    inputs["q"].requires_grad_()
    with pytest.raises(foci.Unsupported, match="no gradient"):
        foci.attention_paged(**inputs)
    with torch.no_grad():
        assert not foci.attention_paged(**inputs).requires_grad


def test_a_named_backend_never_falls_back() -> None:
    assert not interpreting()
    with pytest.raises(foci.Unsupported, match="needs a GPU"):
        foci.attention_paged(**cache(), backend="triton")
    with pytest.raises(foci.Unsupported, match="attention_paged: backend 'aten' cannot run this call"):
        foci.attention_paged(**cache(), softcap=1.0, backend="aten")


def test_who_counts_operations_is_told_that_a_kernel_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel, of which there is only a stand-in here, is no op."""
    q, pages = torch.ones(1, 1, 2, 8), torch.ones(2, 4, 2, 8)
    monkeypatch.setattr(paged.gpu, "reasons", lambda call: [])
    monkeypatch.setattr(paged.plans, "replay_or_run_one", lambda *_: q)
    table, lengths = torch.zeros(1, 2, dtype=torch.int32), torch.tensor([5])
    with FlopCounterMode(display=False), pytest.warns(match="^attention_paged: torch's flop counter sees a part"):
        assert paged.attention_paged(q, pages, pages, table, lengths) is q
