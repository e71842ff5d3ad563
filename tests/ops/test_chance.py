"""Chance: the same for the same name, within what it is told, and drawn cases that every law can be asked of."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from foci.check.run import examine
from foci.cli_check import candidate_of
from foci.core.spec import Case
from foci.ops import FUNCTIONS, SPECS
from foci.ops.chance import FEW, ROWS, WIDTHS, Chance, told
from foci.ops.masks import lower
from tests.ops.softmax.problems import evaluate

CPU = torch.device("cpu")
ROOM = 2**18
OPERATORS = tuple(FUNCTIONS)


def drawn(operator: str, name: str, room: int = ROOM) -> Case:
    draw = SPECS[operator].drawn
    assert draw is not None
    return draw(name, room)


def size(case: Case, letter: str) -> int:
    """As its name tells it."""
    found = re.search(rf" {letter}=(\d+)", case.name)
    return int(found[1]) if found else 0


def test_a_name_is_its_choices() -> None:
    first, again, other = (
        [chance.size(1000) for _ in range(30)] for chance in (Chance("1", 8), Chance("1", 8), Chance("2", 8))
    )
    assert first == again != other


def test_sizes_are_within_their_bound_and_meet_edges_of_blocks() -> None:
    chance = Chance("sizes", 8)
    found = {chance.size(300) for _ in range(4000)}
    assert min(found) == 1 and max(found) == 300
    assert {63, 64, 65, 127, 128, 129} <= found
    assert {chance.size(1) for _ in range(20)} == {1}


def test_sizes_begin_where_they_are_told_to() -> None:
    chance = Chance("least", 8)
    found = [chance.size(64, 4) for _ in range(2000)]
    assert min(found) == 4 and max(found) == 64
    assert all(0.1 < sum(least <= x < 2 * least for x in found) / 2000 < 0.4 for least in (4, 8, 16, 32))
    assert chance.size(2, 4) == 2 and chance.size(0) == 1


def test_few_problems_have_fewer_tokens_than_a_block() -> None:
    chance = Chance("tokens", 2**21)
    found = [chance.tokens(8192) for _ in range(2000)]
    assert 0.05 < sum(x < 16 for x in found) / 2000 < 0.15 and 0.02 < found.count(1) / 2000 < 0.1
    assert max(found) <= 2**9 and max(chance.tokens(100) for _ in range(500)) <= 100
    assert all(x <= 16 for x in (Chance("little", 2**14).tokens(8192), chance.tokens(1)))


def test_widths_are_models_where_there_is_room_for_many() -> None:
    small, large = Chance("room", 2**20), Chance("room", 2**30)
    found = [small.widths(2**9) for _ in range(2000)]
    assert min(K for K, _ in found) == 4 and 500 < max(K for K, _ in found) <= 512
    assert sum(K == 4 for K, _ in found) < 200 and 0.2 < sum(K != V for K, V in found) / 2000 < 0.35
    assert {large.widths(512)[0] for _ in range(200)} >= set(WIDTHS)
    assert max(max(large.widths(100)) for _ in range(200)) <= 100


def test_heads_share_keys_evenly() -> None:
    chance = Chance("heads", 8)
    found = [chance.heads(64) for _ in range(2000)]
    assert all(heads % groups == 0 and heads <= 64 for groups, heads in found)
    assert {heads // groups for groups, heads in found} >= {1, 2, 3, 4, 8, 16, 32, 64}
    assert (1, 32) in found and (64, 64) in found and (1, 1) in found
    assert chance.heads(0) == (1, 1)


def test_rows_are_bounded() -> None:
    chance = Chance("rows", 8)
    assert {chance.rows(8) for _ in range(200)} == set(ROWS) and {chance.rows(0) for _ in range(20)} == {1}


def test_documents_fill_their_tokens_and_some_are_empty() -> None:
    chance = Chance("cuts, of several", 8)
    found = [chance.cuts(50) for _ in range(300)]
    assert {len(cut) for cut in found} == {chance.documents + 1}
    assert all(cut[0] == 0 and cut[-1] == 50 and list(cut) == sorted(cut) for cut in found)
    assert any(a == b for cut in found for a, b in pairwise(cut))


def test_what_is_absent_is_not_told() -> None:
    chosen = {"T": 3, "state": False, "scale": None, "skip": True, "offsets": (0, 3)}
    assert told("7.1", chosen, ["packed"]) == "7.1: packed T=3 skip offsets=(0,3)"


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_drawn_case_is_the_same_again_and_others_are_others(operator: str) -> None:
    names = [drawn(operator, f"3.{i}").name for i in range(20)]
    assert names == [drawn(operator, f"3.{i}").name for i in range(20)] and len(set(names)) == 20
    first, again = (drawn(operator, "3.1").make(torch.float32, CPU, 0) for _ in range(2))
    assert first.keys() == again.keys()


@pytest.mark.parametrize("operator", OPERATORS)
def test_drawn_cases_show_what_the_operators_own_do(operator: str) -> None:
    spec = SPECS[operator]
    shown = set().union(*(drawn(operator, f"features {i}").features for i in range(300)))
    own = set().union(*(case.features for case in spec.cases))
    assert own - shown <= ({"dropout"} if operator == "softmax" else set())


# Of each operator what is drawn, as names tell it.
WORDS = {
    "softmax": (
        *("causal", "causal top-left", "empty rows", "padded queries", "int64", "turned", "wide=bias", "scale=0.0"),
        *("scale=-0.2", "window=(0,0)", "window=(0,None)", "window=(None,0)", "packed=((0,", "padding=((", "band=(("),
        *("softcap=50.0", "V="),
    ),
    "linear": ("int32", "turned", "fused", "narrow=log_decay,state", "wide=bonus", "scale=-0.7", "decay=head", "bonus"),
    "delta": ("int32", "turned", "fused", "narrow=state", "wide=beta", "scale=1.0", "erase", "full"),
    "scan": ("int32", "narrow=log_decay", "narrow=state", "narrow=log_decay,state", "fused", "gates=extremes"),
    "selective_scan": ("int32", "wide=A", "wide=dt", "wide=B,C", "wide=A,skip", "narrow=state", "fused", "extreme"),
}


@pytest.mark.parametrize("operator", OPERATORS)
def test_names_tell_what_is_drawn(operator: str) -> None:
    names = [drawn(operator, f"words {i}").name for i in range(1500)]
    assert [word for word in WORDS[operator] if not any(f" {word}" in name for name in names)] == []


def test_names_tell_the_shapes_of_what_is_added_and_hidden() -> None:
    names = [drawn("softmax", f"words {i}").name for i in range(1500)]
    for word, ranks in (("bias", {1, 2, 3, 4}), ("dense", {1, 2, 4})):
        shapes = [match[1] for name in names if (match := re.search(rf" {word}=\(([^)]*)\)", name))]
        assert {len(shape.strip(",").split(",")) for shape in shapes} == ranks, word


def test_softmax_names_and_features_are_what_the_arguments_say() -> None:
    for i in range(200):
        case = drawn("softmax", f"said {i}", 2**16)
        inputs = case.make(torch.float64, CPU, 0)
        mask = lower(inputs.get("mask"))
        masked = evaluate({name: x for name, x in inputs.items() if name != "sink"})["lse"] == -torch.inf
        said = {
            "causal": mask.causal_end, "causal top-left": mask.causal_start, "packed": mask.q_offsets is not None,
            "window": mask.left is not None or mask.right is not None, "padding": mask.kv_lengths is not None,
            "padded queries": mask.q_lengths is not None, "dense": mask.dense is not None,
            "band": mask.band_low is not None or mask.band_high is not None, "empty rows": bool(masked.any()),
            **{name: name in inputs for name in ("bias", "softcap", "sink", "scale")},
        }  # fmt: skip
        assert {feature for feature, present in said.items() if present} == case.features & said.keys(), case.name
        for name, tensor in (("bias", inputs.get("bias")), ("dense", mask.dense)):
            if tensor is not None:
                assert f" {name}={tuple(tensor.shape)}".replace(", ", ",") in case.name
        if mask.kv_lengths is not None:
            assert f" padding=({tuple(mask.kv_lengths.tolist())},".replace(", ", ",") in case.name
        if mask.q_offsets is not None:
            assert f" packed=({tuple(mask.q_offsets.tolist())},".replace(", ", ",") in case.name
            assert (mask.q_offsets.dtype == torch.int64) == (" int64" in case.name)


def test_one_query_of_many_keys_is_drawn_often_and_often_with_little_else() -> None:
    steps = [case for i in range(400) if size(case := drawn("softmax", f"steps {i}"), "T") == 1 < size(case, "S")]
    assert 0.12 < len(steps) / 400 < 0.25
    more = [case.features - {"cross", "gqa", "value width", "empty rows", "padded queries"} for case in steps]
    assert sum(len(features) <= 1 for features in more) > len(steps) / 2
    assert {"causal", "window", "padding"} <= set().union(*(features for features in more if len(features) == 1))


def test_what_lies_behind_the_last_document_is_drawn() -> None:
    masks = [drawn("softmax", f"tail {i}").make(torch.float32, CPU, 0) for i in range(200)]
    flat = [(lower(made.get("mask")).q_offsets, made["q"].shape[1]) for made in masks]
    assert any(offsets is not None and int(offsets[-1]) < T for offsets, T in flat)


@pytest.mark.parametrize("operator", ["linear", "delta"])
def test_gates_are_told_where_there_are_any(operator: str) -> None:
    for i in range(400):
        case = drawn(operator, f"gates {i}", 2**14)
        gates = case.make(torch.bfloat16, CPU, 0).get("log_decay")
        assert ("extreme" in case.features) == (gates is not None and bool((gates <= -20).any())), case.name
        narrow = gates is not None and gates.dtype == torch.bfloat16
        assert ("narrow=log_decay" in case.name) == narrow
        assert gates is None or gates.dim() > 1 or len(gates) >= FEW


def test_keys_are_as_long_as_the_name_tells() -> None:
    short = [case for case in (drawn("delta", f"keys {i}", 2**14) for i in range(200)) if "length=0.5" in case.name]
    assert {"correlated keys", "identical keys"} <= set().union(*(case.features for case in short))
    for case in short:
        norms = case.make(torch.float64, CPU, 0)["k"].norm(dim=-1)
        assert torch.allclose(norms, torch.full_like(norms, 0.5)), case.name


DTYPES = {"int32": ("offsets", torch.int32), "narrow=state": ("state", torch.bfloat16)}


@pytest.mark.parametrize(
    ("operator", "words"),
    [
        ("softmax", {"wide=bias": ("bias", torch.float32), "wide=sink": ("sink", torch.float32)}),
        (
            "linear",
            DTYPES | {"wide=bonus": ("bonus", torch.float32), "narrow=log_decay": ("log_decay", torch.bfloat16)},
        ),
        ("delta", DTYPES | {"wide=beta": ("beta", torch.float32)}),
        ("scan", DTYPES | {"narrow=log_decay": ("log_decay", torch.bfloat16)}),
        ("selective_scan", DTYPES | {"wide=A": ("A", torch.float32), "wide=dt": ("dt", torch.float32)}),
    ],
)
def test_dtypes_are_what_the_name_tells(operator: str, words: dict[str, tuple[str, torch.dtype]]) -> None:
    cases = [drawn(operator, f"dtypes {i}", 2**14) for i in range(600)]
    for word, (argument, dtype) in words.items():
        told = [case for case in cases if f" {word}" in case.name]
        assert told, word
        finer = dtype != torch.float32
        for case in told:
            got, exact = (case.make(kind, CPU, 0)[argument] for kind in (torch.bfloat16, torch.float64))
            assert got.dtype == dtype, case.name
            if got.is_floating_point():
                assert torch.allclose(got.double(), exact.double(), rtol=torch.finfo(dtype).eps, atol=0)
                finer |= not torch.equal(got, got.bfloat16().float())
        assert finer, f"{word}: the numbers of a narrower dtype"


@pytest.mark.parametrize("operator", ["softmax", "linear", "delta"])
def test_heads_that_lie_apart_are_told(operator: str) -> None:
    for i in range(100):
        case = drawn(operator, f"strides {i}", 2**14)
        q = case.make(torch.float32, CPU, 0)["q"]
        if min(q.shape[1:]) > 1:
            assert q.transpose(1, 2).is_contiguous() == (" turned" in case.name), case.name


def test_long_problems_of_many_wide_heads_occur() -> None:
    """In the room of a GPU, which runs other kernels there."""
    cases = [drawn("linear", f"sizes {i}", 2**29) for i in range(1000)]
    sizes = [[size(case, letter) for letter in "BTHK"] for case in cases]
    assert sum(T >= 1024 and K >= 128 and H >= 16 for _, T, H, K in sizes) >= 5
    assert sum(T >= 1024 for _, T, _, _ in sizes) > 250
    assert all(B * T * H * K * (size(case, "V") or K) <= 2**29 for (B, T, H, K), case in zip(sizes, cases, strict=True))


@pytest.mark.parametrize("operator", OPERATORS)
def test_laws_hold_of_drawn_cases(operator: str) -> None:
    spec = SPECS[operator]
    cases = tuple(drawn(operator, f"laws {i}") for i in range(25))
    candidate = candidate_of(spec, FUNCTIONS[operator], "chunked", "cpu")
    report = examine(replace(spec, cases=cases), candidate, only=("forward", "gradients"), isolated=False)
    assert report.ok and sum(row.cases for row in report.rows) >= 2 * 2 * 25, report.failures
