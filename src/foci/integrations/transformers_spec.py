"""The Spec of a transformers attention function, which `foci check mypkg:my_fn --like transformers` runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from foci.core.spec import (
    Candidate,
    Case,
    Future,
    Inputs,
    Mistake,
    Outputs,
    Part,
    Probes,
    Spec,
    WrongReturn,
    as_outputs,
)

# Keywords beyond the protocol's own: tested where the function names them or takes any keyword.
OPTIONS = ("is_causal", "softcap", "sliding_window", "s_aux", "position_bias")


def _reference(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    **options: Any,
) -> Outputs:
    """q [B,H,T,K], k [B,G,S,K], v [B,G,S,V] -> out [B,T,H,V]; query head h reads key head h // (H/G).

    z = cap(scaling * q k) + position_bias.  A boolean mask hides its False, a float mask is added.  Without a mask it
    is causal where `is_causal`, or else the module's, says so; a lone query is the last one.  s_aux is one more logit
    per head.  `sliding_window` only tells what the mask already holds.
    """
    T, S, groups = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    logits = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if (softcap := options.get("softcap")) is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if (position_bias := options.get("position_bias")) is not None:
        logits = logits + position_bias
    causal = options.get("is_causal")
    if attention_mask is None and (module.is_causal if causal is None else causal):
        attention_mask = torch.ones(T, S, dtype=torch.bool, device=query.device).tril(S - T)
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        logits = logits.masked_fill(~attention_mask, float("-inf"))
    elif attention_mask is not None:
        logits = logits + attention_mask
    if (sinks := options.get("s_aux")) is not None:
        logits = torch.cat([logits, sinks.view(1, -1, 1, 1).expand(*logits.shape[:3], 1).to(logits.dtype)], -1)
    return ((logits.softmax(-1)[..., :S] @ value).transpose(1, 2).contiguous(),)


def adapt(function: Callable[..., Any], *, name: str = "") -> Candidate:
    """A function of transformers' attention protocol as a Candidate, tested on the keywords of its signature."""
    parameters = inspect.signature(function).parameters
    any_keyword = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    absent = [] if any_keyword else [option for option in OPTIONS if option not in parameters]

    def call(inputs: Inputs) -> Outputs:
        given = dict(inputs)
        tensors = [given.pop(argument) for argument in ("module", "query", "key", "value", "attention_mask")]
        returned = function(*tensors, dropout=0.0, **given)
        if not isinstance(returned, tuple) or len(returned) != 2:
            what = f"a tuple of {len(returned)}" if isinstance(returned, tuple) else f"one {type(returned).__name__}"
            raise WrongReturn(
                f"it returns {what}; models unpack (output, weights or None), which takes a batch of two for the pair"
            )
        return as_outputs(returned[0], ("output",))

    return Candidate(
        name or getattr(function, "__name__", repr(function)),
        call,
        refuses=lambda case: [f"its signature does not name {option}" for option in absent if option in case.features],
        not_tested=(*absent, "dropout > 0"),
    )


class _Module(nn.Module):
    """A module with the attributes that attention functions read of their caller."""

    def __init__(self, is_causal: bool, groups: int, sinks: Tensor | None) -> None:
        super().__init__()
        self.is_causal, self.num_key_value_groups, self.layer_idx = is_causal, groups, 0
        self.sinks = sinks
        self.eval()


def _case(
    name: str,
    *features: str,
    sizes: tuple[int, ...] = (2, 4, 4, 19, 19, 16, 16),
    causal: bool = True,
    extra: Callable[[Callable[..., Tensor]], dict[str, Any]] = lambda normal: {},
) -> Case:
    """sizes: B, H, G, T, S, K, V. `extra(normal)` gives the other arguments, drawing tensors by `normal(*shape)`."""

    def make(dtype: torch.dtype, device: torch.device, seed: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(dtype).to(device)

        B, H, G, T, S, K, V = sizes
        tensors = {"query": normal(B, H, T, K), "key": normal(B, G, S, K), "value": normal(B, G, S, V)}
        others: dict[str, Any] = {"attention_mask": None, "scaling": K**-0.5} | extra(normal)
        if isinstance(mask := others["attention_mask"], Tensor):
            others["attention_mask"] = mask.to(device, dtype if mask.is_floating_point() else mask.dtype)
        return {"module": _Module(causal, H // G, others.get("s_aux")), **tensors, **others}

    return Case(name, frozenset(features), make)


def _seen(T: int = 19, S: int = 19, left: int = 0, right: int = 0, window: int | None = None) -> Tensor:
    """[2, 1, T, S]: causal, the last query at the last key. Row 1 has padding left and right, which sees itself."""
    seen = torch.ones(T, S, dtype=torch.bool, device="cpu").tril(S - T)
    if window is not None:
        seen = seen.triu(S - T - window + 1)
    padded = seen.clone()
    padded[:, :left], padded[:, S - right :] = False, False
    return torch.stack([seen, padded | seen.triu(S - T)])[:, None]


def _real(*lengths: int) -> Tensor:
    """[B, 1, S, S]: an encoder's padding, every query sees the first `lengths[b]` keys."""
    S, counts = max(lengths), torch.tensor(lengths, device="cpu")
    return (torch.arange(S, device="cpu") < counts[:, None])[:, None, None].expand(-1, 1, S, S)


def _added(seen: Tensor) -> Tensor:
    """The additive form, with half of float16's lowest value: another dtype's lowest would become -inf in float16."""
    return torch.zeros(seen.shape, device="cpu").masked_fill(~seen, torch.finfo(torch.float16).min / 2)


_GROUPED = (2, 6, 2, 19, 19, 16, 16)
_MANY_HEADS = (2, 16, 4, 19, 19, 16, 16)
CASES = (
    _case("causal module, no mask", "causal"),
    _case("causal module, grouped heads", "causal", "gqa", sizes=_GROUPED),
    _case("bidirectional module, no mask", causal=False),
    _case("cross attention", causal=False, sizes=(2, 4, 4, 7, 23, 16, 16)),
    _case("scaling", "causal", "scaling", extra=lambda normal: {"scaling": 0.7}),
    _case("as many tokens as heads", "causal", sizes=(2, 8, 8, 8, 8, 16, 16)),
    _case("value width", "causal", sizes=(2, 4, 4, 19, 19, 16, 24)),
    _case("padded right", "causal", "mask", extra=lambda normal: {"attention_mask": _seen(right=7)}),
    _case("padded left", "causal", "mask", extra=lambda normal: {"attention_mask": _seen(left=7)}),
    _case("padded, additive", "causal", "mask", extra=lambda normal: {"attention_mask": _added(_seen(left=7))}),
    _case(
        "padded, grouped heads",
        *("causal", "mask", "gqa"),
        sizes=_GROUPED,
        extra=lambda normal: {"attention_mask": _seen(right=7)},
    ),
    _case(
        "padded encoder",
        "mask",
        causal=False,
        extra=lambda normal: {"attention_mask": _real(19, 12)},
    ),
    _case("one cached token", "causal", "cache", sizes=(4, 8, 2, 1, 23, 16, 16)),
    _case(
        "one cached token, padded",
        *("causal", "mask", "cache"),
        sizes=(2, 8, 2, 1, 23, 16, 16),
        extra=lambda normal: {"attention_mask": _seen(1, 23, left=7)},
    ),
    _case(
        "several cached tokens",
        *("causal", "mask", "cache"),
        sizes=(2, 8, 2, 5, 23, 16, 16),
        extra=lambda normal: {"attention_mask": _seen(5, 23, left=7)},
    ),
    _case("is_causal=False", "is_causal", extra=lambda normal: {"is_causal": False}),
    # Options alone first, on a module that needs no mask: two faults at once could not be diagnosed.
    _case("softcap", "softcap", causal=False, extra=lambda normal: {"softcap": 1.5}),
    _case(
        "softcap and padding",
        *("causal", "mask", "softcap"),
        extra=lambda normal: {"softcap": 1.5, "attention_mask": _added(_seen(right=7))},
    ),
    _case(
        "sliding window",
        *("causal", "mask", "sliding_window"),
        extra=lambda normal: {"sliding_window": 6, "attention_mask": _seen(window=6)},
    ),
    _case(
        "sliding window, cached",
        *("causal", "mask", "cache", "sliding_window"),
        sizes=(2, 8, 2, 5, 23, 16, 16),
        extra=lambda normal: {"sliding_window": 6, "attention_mask": _seen(5, 23, window=6)},
    ),
    _case("sinks", "s_aux", "gqa", sizes=_MANY_HEADS, causal=False, extra=lambda normal: {"s_aux": normal(16)}),
    _case(
        "sinks and padding",
        *("causal", "mask", "s_aux", "gqa"),
        sizes=_MANY_HEADS,
        extra=lambda normal: {"s_aux": normal(16), "attention_mask": _seen(left=7)},
    ),
    _case("position bias", "position_bias", causal=False, extra=lambda normal: {"position_bias": normal(1, 4, 19, 19)}),
)


def _sized(n: int) -> Case:
    return _case(f"{n} tokens", "causal", sizes=(2, 4, 2, n, n, 16, 16))


def _given(inputs: dict[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> dict[str, Any]:
    return dict(inputs)


def _rows(case: Case, inputs: Inputs) -> tuple[Part, ...]:
    """Each row of the batch as a call of its own."""
    B = inputs["query"].shape[0]
    tensors = [name for name in ("query", "key", "value", "attention_mask") if inputs[name] is not None]
    parts = []
    for row in (slice(b, b + 1) for b in range(B)):
        alone = {**inputs, **{name: inputs[name][row] for name in tensors}}
        made = Case(f"{case.name}, row {row.start}", case.features, partial(_given, alone))
        parts.append(Part(made, (row,)))
    return tuple(parts)


def _future(case: Case, inputs: Inputs) -> Future | None:
    """The later half of the new tokens replaced; outputs of earlier queries must not change."""
    T, S = inputs["query"].shape[2], inputs["key"].shape[2]
    if "causal" not in case.features or T == 1:
        return None
    first = T // 2
    changed = dict(inputs)
    for name, start in (("query", first), ("key", S - T + first), ("value", S - T + first)):
        later = inputs[name].detach().clone()
        later[:, :, start:] = 3 - later[:, :, start:]
        changed[name] = later
    return Future(changed, (slice(None), slice(0, first)))


def _without(option: str) -> Callable[[Inputs], Outputs | None]:
    def compute(inputs: Inputs) -> Outputs | None:
        if inputs.get(option) is None:
            return None
        return _reference(**{name: given for name, given in inputs.items() if name != option})

    return compute


def _own_scale(inputs: Inputs) -> Outputs | None:
    usual = inputs["scaling"] == inputs["query"].shape[-1] ** -0.5
    return None if usual else _reference(**{**inputs, "scaling": None})


def _bidirectional(inputs: Inputs) -> Outputs | None:
    causal = inputs["module"].is_causal and inputs.get("is_causal") is None and inputs["query"].shape[2] > 1
    return _reference(**{**inputs, "is_causal": False}) if causal and inputs["attention_mask"] is None else None


def _top_left(inputs: Inputs) -> Outputs | None:
    T, S = inputs["query"].shape[2], inputs["key"].shape[2]
    if T == S or not inputs["module"].is_causal:
        return None
    return _reference(**{**inputs, "attention_mask": torch.ones(T, S, dtype=torch.bool, device="cpu").tril()})


def _bhtd(inputs: Inputs) -> Outputs:
    return (_reference(**inputs)[0].transpose(1, 2),)


def _interleaved(inputs: Inputs) -> Outputs | None:
    key, value = inputs["key"], inputs["value"]
    groups = inputs["query"].shape[1] // key.shape[1]
    if groups == 1 or key.shape[1] == 1:
        return None
    return _reference(**{**inputs, "key": key.repeat(1, groups, 1, 1), "value": value.repeat(1, groups, 1, 1)})


def _mask_as_numbers(inputs: Inputs) -> Outputs | None:
    mask = inputs["attention_mask"]
    if mask is None or mask.dtype != torch.bool:
        return None
    return _reference(**{**inputs, "attention_mask": mask.to(inputs["query"].dtype)})


def _inverted(inputs: Inputs) -> Outputs | None:
    mask = inputs["attention_mask"]
    if mask is None or mask.dtype != torch.bool:
        return None
    return (_reference(**{**inputs, "attention_mask": ~mask})[0].nan_to_num(),)


MISTAKES = (
    Mistake(
        "no mask means bidirectional",
        "without a mask it attends to the future: plain causal batches come without one, and padded batches hide it",
        _bidirectional,
    ),
    Mistake(
        "output is [B, H, T, D]",
        "it returns heads before tokens: models merge the last two dimensions, which mixes tokens with heads silently",
        _bhtd,
    ),
    Mistake(
        "grouped heads interleaved",
        "query head h reads key head h % G instead of h // (H/G): grouped-query models read the wrong keys",
        _interleaved,
    ),
    Mistake("scaling ignored", "it divides by sqrt(K) whatever `scaling` says", _own_scale),
    Mistake(
        "mask ignored",
        "the mask is ignored: padding, windows and packed documents are seen by every query",
        _without("attention_mask"),
    ),
    Mistake(
        "boolean mask added",
        "a boolean mask is added to the logits as 0 and 1, so that it hides next to nothing",
        _mask_as_numbers,
    ),
    Mistake("boolean mask inverted", "True in a boolean mask hides a key; it must mean that it is seen", _inverted),
    Mistake(
        "causal at the top left",
        "with cached keys query 0 is taken for token 0, so that new tokens do not see the cache",
        _top_left,
    ),
    Mistake("softcap ignored", "`softcap` is accepted and ignored: Gemma 2 would run without it", _without("softcap")),
    Mistake("sinks ignored", "`s_aux` is accepted and ignored: GPT-OSS would run without its sinks", _without("s_aux")),
    Mistake(
        "position bias ignored",
        "`position_bias` is accepted and ignored: T5 would lose all order",
        _without("position_bias"),
    ),
    Mistake(
        "is_causal ignored",
        "`is_causal=False` is accepted and ignored: encoders would become causal",
        _without("is_causal"),
    ),
)

SPEC = Spec(
    name="transformers",
    equation="out[b,t,h] = softmax(scaling * q k + mask)[b,h,t] v, heads after tokens, and None for the weights",
    paper="arXiv:1706.03762",
    reference=_reference,
    plain=_reference,
    output_names=("output",),
    differentiable=("query", "key", "value", "s_aux", "position_bias"),
    cases=CASES,
    mistakes=MISTAKES,
    adapt=adapt,
    probes=Probes(sized=_sized, rows=_rows, future=_future),
)
