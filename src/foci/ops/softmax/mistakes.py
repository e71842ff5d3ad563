"""Wrong equations people implement, so that the checker can name a fault."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from foci.core.spec import Inputs, Mistake
from foci.ops.masks import NOTHING_HIDDEN, materialize
from foci.ops.softmax.call import Call, bind
from foci.ops.softmax.dropout import keep, positions
from foci.ops.softmax.reference import forward

Pair = tuple[Tensor, Tensor]


def _wrong(name: str, sentence: str) -> Callable[[Callable[[Call], Call | None]], Mistake]:
    """A mistake equal to the right equation of a changed call; the change returns None if it does not apply."""

    def make(change: Callable[[Call], Call | None]) -> Mistake:
        def compute(inputs: Inputs) -> Pair | None:
            changed = change(bind(**inputs))
            return None if changed is None else forward(changed)

        return Mistake(name, sentence, compute)

    return make


def _after(name: str, sentence: str) -> Callable[[Callable[[Call, Tensor, Tensor], Pair | None]], Mistake]:
    """A mistake that changes the right (out, lse)."""

    def make(change: Callable[[Call, Tensor, Tensor], Pair | None]) -> Mistake:
        def compute(inputs: Inputs) -> Pair | None:
            call = bind(**inputs)
            return change(call, *forward(call))

        return Mistake(name, sentence, compute)

    return make


def _scaled(inputs: Inputs, amount: float) -> Pair:
    call = bind(**inputs)
    return forward(call._replace(scale=call.scale * (1 + amount)))


def _heads_modulo(call: Call) -> Call | None:
    _, _, _, H, G, _, _ = call.sizes
    if H == G or G == 1:
        return None
    return call._replace(k=call.k.repeat(1, 1, H // G, 1), v=call.v.repeat(1, 1, H // G, 1))


def _reach(left: int, right: int) -> Callable[[Call], Call | None]:
    def change(call: Call) -> Call | None:
        if (call.left is None or not left) and (call.right is None or not right):
            return None
        return call._replace(
            left=None if call.left is None else call.left + left,
            right=None if call.right is None else call.right + right,
        )

    return change


def _window_top_left(call: Call) -> Call | None:
    """The window centred at key i for query i, instead of at key i + S - T as causal is."""
    _, T, S, *_ = call.sizes
    anchored = call.causal_end and call.q_offsets is None and call.kv_lengths is None and S > T
    if not anchored or (call.left is None and call.right is None):
        return None
    left, right = (None if side is None else side + step for side, step in ((call.left, S - T), (call.right, T - S)))
    return call._replace(left=left, right=right)


def _diagonal(step: int) -> Callable[[Call], Call | None]:
    """Causal with its diagonal moved: by one into the future, or without the token itself."""

    def change(call: Call) -> Call | None:
        if not call.causal_end:
            return None
        return call._replace(causal_end=False, right=step if call.right is None else min(call.right, step))

    return change


def _unmasked(call: Call) -> Call | None:
    """Only causal, without all that a boolean mask may contain."""
    visible = NOTHING_HIDDEN._replace(causal_end=call.causal_end, causal_start=call.causal_start)
    return None if call.visible == visible else call._replace(**visible._asdict())


def _mask_added(beside: bool) -> Callable[[Call], Call | None]:
    """A mask as 1 where it shows a key and 0 where it hides one: with causal in it, or that `beside` it and right."""

    def change(call: Call) -> Call | None:
        mask = (_without_causal(call) if beside else call).visible
        if mask == NOTHING_HIDDEN:
            return None
        end, start = call.causal_end and beside, call.causal_start and beside
        kept = NOTHING_HIDDEN._replace(causal_end=end, causal_start=start)
        shown = materialize(mask, *call.sizes[1:3]).to(call.q.dtype)
        return call._replace(**kept._asdict(), bias=shown if call.bias is None else call.bias + shown)

    return change


def _capped_last(call: Call) -> Call | None:
    """Logits are capped after -inf was written where a key is hidden: -softcap comes of it."""
    _, T, S, H, G, _, _ = call.sizes
    seen = materialize(call.visible, T, S)
    if call.softcap is None or bool(seen.all()):
        return None
    logits = torch.einsum("bthk,bshk->bhts", call.q, call.k.repeat_interleave(H // G, 2)) * call.scale
    capped = call.softcap * torch.tanh(logits / call.softcap)
    more = torch.where(seen, 0.0, -call.softcap - capped)
    return call._replace(**NOTHING_HIDDEN._asdict(), bias=more if call.bias is None else call.bias + more)


def _causal(call: Call) -> bool:
    return call.causal_end or call.causal_start


def _without_causal(call: Call) -> Call:
    return call._replace(causal_end=False, causal_start=False)


def _averaged(call: Call, out: Tensor, lse: Tensor) -> Pair | None:
    """-1e9 in place of -inf: a row that sees nothing becomes the plain mean of all values."""
    B, T, S, H, G, _, _ = call.sizes
    if not (lse == -torch.inf).any() or not S:
        return None
    mean = call.v.mean(1, keepdim=True).repeat_interleave(H // G, 2).expand(B, T, H, -1)
    return torch.where((lse == -torch.inf)[..., None], mean, out), lse


def _dropped_early(call: Call) -> Call | None:
    if call.seed is None:
        return None
    B, T, S, H, *_ = call.sizes
    kept = keep(call.seed, call.dropout, *positions(B, H, T, S, call.q.device))
    return call._replace(dense=kept & materialize(call.visible, T, S), seed=None, dropout=0.0)


def _scale_of(value: Callable[[int], float]) -> Callable[[Call], Call | None]:
    def change(call: Call) -> Call | None:
        K = call.sizes[5]
        return None if math.isclose(call.scale, value(K)) else call._replace(scale=value(K))

    return change


ADDED = "a boolean mask is added to the logits as 0 and 1: it would hide next to nothing"
FUTURE = "it attends to the future: training would look perfect and generation would fail"

MISTAKES: tuple[Mistake, ...] = (
    _wrong("causal ignored", f"causal is ignored, {FUTURE}")(lambda c: _without_causal(c) if _causal(c) else None),
    _wrong("window ignored", "the window is ignored: long contexts would differ from training")(
        lambda c: None if c.left is None and c.right is None else c._replace(left=None, right=None)
    ),
    _wrong("mask ignored when causal", "the mask is ignored when causal is also given: padding would be attended to")(
        lambda c: _unmasked(c) if _causal(c) else None
    ),
    _wrong("causal ignored when masked", f"causal is ignored when a mask is also given: on padded batches {FUTURE}")(
        lambda c: _without_causal(c) if _causal(c) and _unmasked(c) else None
    ),
    _wrong("padding ignored", "padding is ignored: a row's result would depend on how long its neighbours are")(
        lambda c: None if c.kv_lengths is None else c._replace(kv_lengths=None, q_lengths=None)
    ),
    _wrong("mask ignored", "the mask is ignored: hidden and padded keys would be attended to")(_unmasked),
    _wrong("mask added", ADDED)(_mask_added(beside=True)),
    _wrong("mask with causal added", ADDED)(_mask_added(beside=False)),
    _wrong("packing ignored", "document borders are ignored: packed documents would read each other")(
        lambda c: None if c.q_offsets is None else c._replace(q_offsets=None, kv_offsets=None)
    ),
    _wrong(
        "causal top-left",
        "causal is aligned top-left where the last query must see the last key: a decoding step with a cache would see "
        "only its first keys",
    )(lambda c: c._replace(causal_end=False, causal_start=True) if c.causal_end else None),
    _wrong("causal bottom-right", "causal is aligned bottom-right where top-left is asked for")(
        lambda c: c._replace(causal_end=True, causal_start=False) if c.causal_start else None
    ),
    _wrong("causal one too far", "causal is off by one and shows each query the next token: training on the answer")(
        _diagonal(1)
    ),
    _wrong("causal one short", "causal is off by one and hides each query's own token")(_diagonal(-1)),
    _wrong("window top-left", "the window is aligned top-left: with a cache a step would see keys of long ago too")(
        _window_top_left
    ),
    _wrong("window wider", "the window is off by one, a key too wide: further than the layer was trained to see")(
        _reach(1, 0)
    ),
    _wrong("window narrower", "the window is off by one, a key too narrow: the furthest is lost")(_reach(-1, 0)),
    _wrong("window wider ahead", "the window is off by one, a key too wide ahead")(_reach(0, 1)),
    _wrong(
        "heads interleaved",
        "query head h reads key head h % G where h // (H/G) is right: loaded grouped-query weights would give noise",
    )(_heads_modulo),
    _wrong("softcap ignored", "softcap is ignored: a model trained with it (Gemma 2) would drift")(
        lambda c: None if c.softcap is None else c._replace(softcap=None)
    ),
    _wrong("softcap after the mask", "softcap acts after the mask: hidden keys get -softcap, not -inf, and are seen")(
        _capped_last
    ),
    _wrong("bias ignored", "bias is ignored: positions or masks given as a bias would be lost")(
        lambda c: None if c.bias is None else c._replace(bias=None)
    ),
    _wrong("bias scaled", "bias is multiplied by the softmax scale: it must be added after it")(
        lambda c: None if c.bias is None else c._replace(bias=c.bias * c.scale)
    ),
    _wrong("sink ignored", "sink is ignored: rows would sum to 1 where the model lets them sum to less")(
        lambda c: None if c.sink is None else c._replace(sink=None)
    ),
    _wrong("dropout before lse", "dropout acts before the lse: merged parts would be wrong")(
        _dropped_early
    ),
    _wrong("scale ignored", "scale is ignored, K**-0.5 is used instead")(_scale_of(lambda K: K**-0.5)),
    _wrong("unscaled", "the logits are not scaled: attention would be far too sharp")(_scale_of(lambda K: 1.0)),
    _wrong("scaled twice", "the logits are scaled by 1/K where K**-0.5 is right: attention would be nearly uniform")(
        _scale_of(lambda K: 1.0 / K)
    ),
    _after("lse in log2", "lse is in log2: merging two parts would be wrong by a factor")(
        lambda c, out, lse: (out, lse / math.log(2))
    ),
    _after("lse zeros", "lse is all zeros: merging two parts would average them")(
        lambda c, out, lse: (out, torch.zeros_like(lse))
    ),
    _after("empty lse 0", "lse of a row that sees nothing is 0 where -inf is right: it would count when merged")(
        lambda c, out, lse: (out, lse.masked_fill(lse == -torch.inf, 0.0)) if (lse == -torch.inf).any() else None
    ),
    _after("lse exponentiated", "lse is the sum itself, not its logarithm: it would overflow and merge wrongly")(
        lambda c, out, lse: (out, lse.exp())
    ),
    _after("lse without sink", "lse leaves out the sink: merged parts would weigh too little")(
        lambda c, out, lse: None if c.sink is None else (out, forward(c._replace(sink=None))[1])
    ),
    _after("empty row averaged", "a row that sees nothing averages all values where 0 is right: padding leaks")(
        _averaged
    ),
    Mistake(
        "scale off",
        "the softmax scale is off by {:+.2%}: outputs look right, merged parts and long contexts drift",
        _scaled,
        fits=True,
    ),
)  # fmt: skip
