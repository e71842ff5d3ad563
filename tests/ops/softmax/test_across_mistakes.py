"""Ways of going wrong over ranks: each is another answer somewhere, and what it says it is."""

from __future__ import annotations

from functools import partial

import torch

from foci.check.orders import ORDERS, places
from foci.ops.softmax import across, across_mistakes
from foci.ops.softmax.spec import SPEC

CPU, SIZE = torch.device("cpu"), 3
HELD = {name: partial(places, name, size=SIZE) for name in ORDERS}
CASES = {case.name: case for case in across.cases(SIZE)}


def made(name: str) -> dict:
    return CASES[name].make(torch.float64, CPU, 0)


def told(name: str, order: str = "plain") -> dict[str, tuple]:
    others = {n: h for n, h in HELD.items() if n != order}
    torch.manual_seed(0)
    return dict(across_mistakes.hypotheses(HELD[order], others)(made(name)))


def truth(name: str) -> tuple:
    torch.manual_seed(0)
    return SPEC.reference(**made(name))


def test_each_way_is_wrong_in_some_case_and_none_is_told_twice_for_the_same() -> None:
    wrong: set[str] = set()
    everything: set[str] = set()
    for name in CASES:
        for sentence, outputs in told(name).items():
            everything.add(sentence)
            if any(not torch.allclose(a, b, equal_nan=True) for a, b in zip(outputs, truth(name), strict=True)):
                wrong.add(sentence)
    assert everything == wrong and len(everything) >= 28


def test_own_keys_alone_is_attention_of_each_shard() -> None:
    inputs = made("plain")
    out, lse = told("plain")[across_mistakes.OWN]
    for part in HELD["plain"](inputs["q"].shape[1]):
        alone = SPEC.reference(**{name: tensor[:, part] for name, tensor in inputs.items()})
        torch.testing.assert_close((out[:, part], lse[:, part]), alone)


def test_a_local_causal_mask_is_causal_in_every_block() -> None:
    from foci.ops.masks import Dense

    inputs = made("causal")
    local = torch.ones(8, 8, dtype=torch.bool).tril().repeat(3, 3)
    torch.testing.assert_close(
        told("causal")[across_mistakes.CAUSAL_LOCAL], SPEC.reference(**inputs | {"mask": Dense(local)})
    )


def test_blocks_merged_without_their_lse_are_averaged() -> None:
    inputs = made("plain")
    held = HELD["plain"](inputs["q"].shape[1])
    outs = [SPEC.reference(inputs["q"], inputs["k"][:, p], inputs["v"][:, p])[0] for p in held]
    torch.testing.assert_close(told("plain")[across_mistakes.AVERAGED][0], sum(outs) / 3)


def test_shards_taken_for_another_order_are_right_without_a_mask() -> None:
    for order in ORDERS:
        for other in set(ORDERS) - {order}:
            sentence = f"as if the shards were in {other} order, which they are not (wrong positions)"
            torch.testing.assert_close(told("plain", order)[sentence], truth("plain"))
            assert not torch.allclose(told("causal", order)[sentence][0], truth("causal")[0])


def test_dropout_of_other_positions_is_weighed_alike() -> None:
    out, lse = told("dropout")[across_mistakes.DROPOUT_LOCAL]
    torch.testing.assert_close(lse, truth("dropout")[1])
    assert 0.7 < float(out.abs().mean() / truth("dropout")[0].abs().mean()) < 1.4


def test_text_counted_more_than_once_is_text_repeated() -> None:
    inputs = made("plain")
    hypotheses = across_mistakes.hypotheses(HELD["plain"], {}, lambda length: 6)
    more = {name: torch.cat([inputs[name][:, :6]] * 3 + [inputs[name][:, 6:]], 1) for name in ("k", "v")}
    torch.testing.assert_close(
        dict(hypotheses(inputs))["as if the text counted once for every rank"], SPEC.reference(inputs["q"], **more)
    )
