"""Adapt other libraries' calling conventions of softmax attention to the operator's argument names."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from operator import and_
from typing import Any

import torch
from torch import Tensor

from foci.core.spec import Aside, Ask, Candidate, Case, Inputs, Outputs, as_outputs, run_in_process
from foci.ops.conventions import UNNAMED, Place, places
from foci.ops.masks import All, Causal, Dense, Lengths, Mask, Packed, Window

LAYOUTS = ("bthd", "bhtd")
WORDS = {
    "mask": ("mask", "attn_mask", "attention_mask"),
    "causal": ("causal", "is_causal"),
    "align": ("align", "causal_align"),
    "bias": ("bias", "attn_bias"),
    "softcap": ("softcap", "logits_soft_cap"),
    "sink": ("sink", "sinks"),
    "scale": ("scale", "softmax_scale", "sm_scale"),
    "dropout": ("dropout", "dropout_p"),
    "window": ("window", "window_size"),
    "gqa": ("enable_gqa",),
    "lse": ("return_lse", "return_softmax_lse"),
}


@dataclass(frozen=True)
class Convention:
    """How one callable takes its arguments: its keyword for each of ours, and their meaning.

    `objects`: its mask is a foci Mask. `both`: mask and causal may be combined. `bias_in_mask`: a float mask is a bias.
    `flex`: masks, bias and softcap are passed as functions (flex_attention).
    """

    words: dict[str, str]
    layout: str = "bthd"
    objects: bool = False
    both: bool = True
    bias_in_mask: bool = False
    flex: bool = False


class _Cannot(NotImplementedError):
    """A case that the signature has no keywords for."""


def adapt(
    function: Callable[..., Any], *, layout: str = "bthd", name: str = "", ranks: int = 1, aside: Aside = run_in_process
) -> Candidate:
    """A callable `f(q, k, v, ...)` as a Candidate: the keywords of WORDS that it names are used, the others are listed.

    layout: "bthd" [B, T, H, D] or "bhtd" [B, H, T, D] of q, k, v and the output; lse [B, T, H] or [B, H, T] in either.
    Masks go to `mask`, `attn_mask` or `attention_mask` as booleans [B|1, H|1, T, S], True where a key is seen, or as
    foci's own masks if the annotation says so. Causal: `causal` is bottom-right, as flash-attn documents it; what
    `is_causal` means for T != S is undefined (torch: top-left), so it is tested with T == S; with `align` both are. A
    second output, or `return_lse`, is the natural-log lse. Grouped heads, V != K and T != S are tested unless a tiny
    call of that kind raises, on the CPU or, if it does not run there, on the GPU; with `ranks`, the number of ranks of
    a parallel callable, also lengths and heads that they cannot share equally. `aside` runs the tiny calls, maybe in a
    child process; one that kills its process is left for the laws to report.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"adapt: layout must be 'bthd' or 'bhtd', got {layout!r}")
    convention = _convention(function, layout)
    gives, cannot = aside(partial(_tried, function, convention, ranks))

    def call(inputs: Inputs) -> Outputs:
        args, kwargs = _deliver(convention, inputs)
        return _receive(convention, function(*args, **kwargs), gives, args[0].shape)

    def refuses(case: Case) -> list[str]:
        inputs = case.make(torch.float32, torch.device("cpu"), 0)
        found = [reason for kind, reason in cannot.items() if _has_kind(kind, inputs, ranks)]
        if inputs.get("dropout") and not convention.objects:
            found.append("dropout: its random stream is its own")
        try:
            _deliver(convention, inputs)
        except _Cannot as reason:
            found.append(str(reason))
        return found

    missing = [kind for kind in WORDS if kind not in ("align", "gqa", "lse", *convention.words) and not convention.flex]
    if convention.objects:
        missing = [kind for kind in missing if kind not in ("causal", "window")]
    if convention.bias_in_mask:
        missing.remove("bias")
    named = f"{', '.join(missing)}: its signature names none of them" if missing else ""
    silent = "" if len(gives) == 2 else "lse: it gives none"
    return Candidate(
        name or getattr(function, "__name__", type(function).__name__), call, refuses,
        tuple(filter(None, (named, silent))), gives, convention.objects,
    )  # fmt: skip


def _convention(function: Callable[..., Any], layout: str) -> Convention:
    if function is torch.nn.functional.scaled_dot_product_attention:
        words = {
            "mask": "attn_mask",
            "causal": "is_causal",
            "scale": "scale",
            "dropout": "dropout_p",
            "gqa": "enable_gqa",
        }
        return Convention(words, "bhtd", both=False, bias_in_mask=True)
    if isinstance(function, torch.nn.Module):
        # A module's __call__ has no named parameters, nor has a compiled module's forward.
        function = getattr(function, "_orig_mod", function).forward
    signature = inspect.signature(function)
    words = {}
    for kind, spellings in WORDS.items():
        for word in spellings:
            if word in signature.parameters:
                words.setdefault(kind, word)
    if "block_mask" in signature.parameters and "score_mod" in signature.parameters:
        return Convention(words, "bhtd", flex=True)
    return Convention(words, layout, objects=_takes_masks(function, words.get("mask")))


def _takes_masks(function: Callable[..., Any], word: str | None) -> bool:
    """Whether the annotation of the mask is foci's Mask."""
    if word is None:
        return False
    while hasattr(function, "func"):
        function = function.func
    try:
        hint = typing.get_type_hints(function).get(word)
    except (NameError, TypeError):  # annotations that only a type checker can resolve
        return False
    return any(isinstance(option, type) and issubclass(option, Mask) for option in (hint, *typing.get_args(hint)))


def _tiny(ranks: int, place: Place, **other: int) -> dict[str, Any]:
    """A small problem that the ranks share equally, except for the sizes in `other`."""
    T, H = (3, 2) if ranks == 1 else (2 * ranks, ranks)
    sizes = {"T": T, "S": other.get("T", T), "H": H, "G": other.get("H", H), "V": 4} | other
    T, S, H, G, V = (sizes[name] for name in "TSHGV")
    K, V = place.width, V * place.width // 4
    return {"q": place.ones(1, T, H, K), "k": place.ones(1, S, G, K), "v": place.ones(1, S, G, V)}


def _tried(
    function: Callable[..., Any], convention: Convention, ranks: int, ask: Ask
) -> tuple[tuple[str, ...], dict[str, str]]:
    """The outputs of a tiny call, and the kinds of problem that tiny calls refuse, with reasons."""
    declared = ("out", "lse") if "lse" in convention.words else None
    for place in places():
        tiny = partial(_call, function, convention, ranks, place)
        if gives := ask(partial(_outputs, tiny)):
            reasons = {kind: ask(partial(_refusal, tiny, sizes)) for kind, sizes in _kinds(ranks).items()}
            return declared or gives, {kind: f"{kind}: {reason}" for kind, reason in reasons.items() if reason}
    return declared or ("out",), {}  # no call works: the first law will meet the same error and report it


def _call(function: Callable[..., Any], convention: Convention, ranks: int, place: Place, **sizes: int) -> Any:
    args, kwargs = _deliver(convention, _tiny(ranks, place, **sizes))
    return function(*args, **kwargs)


def _outputs(tiny: Callable[[], Any]) -> tuple[str, ...]:
    """("out", "lse") if the call returns both, () if it raises, else ("out",); laws report wrong returns."""
    try:
        result = tiny()
    except Exception:
        return ()
    pair = isinstance(result, tuple | list) and len(result) == 2 and all(isinstance(item, Tensor) for item in result)
    return ("out", "lse") if pair and result[1].dim() == 3 else ("out",)


GROUPED, WIDTH, CROSS = "grouped heads (H != G)", "V != K", "T != S"
LENGTHS, HEADS = "lengths that the ranks do not share equally", "heads that the ranks do not share equally"
FEW = "fewer key heads than ranks"


def _kinds(ranks: int) -> dict[str, dict[str, int]]:
    """Kinds of problem that the signature does not show, with the sizes of a small one."""
    if ranks == 1:
        return {GROUPED: {"H": 4, "G": 2}, WIDTH: {"V": 6}, CROSS: {"S": 5}}
    own = {GROUPED: {"H": 2 * ranks, "G": ranks}, WIDTH: {"V": 6}, CROSS: {"S": 4 * ranks}}
    return own | {LENGTHS: {"T": 2 * ranks + 1}, HEADS: {"H": ranks + 1}, FEW: {"G": 1}}


def _refusal(tiny: Callable[..., Any], sizes: dict[str, int]) -> str:
    """How a tiny call of these sizes is refused, "" if it is not; losing ranks (Fatal) is no refusal."""
    try:
        tiny(**sizes)
    except Exception as error:
        return "" if getattr(error, "sentence", False) else f"it raises {type(error.__cause__ or error).__name__}"
    return ""


def _has_kind(kind: str, inputs: Inputs, ranks: int) -> bool:
    q, k, v = (inputs[name].shape for name in ("q", "k", "v"))
    if len(q) != 4:
        return False
    present = {
        GROUPED: q[2] != k[2], WIDTH: v[3] != q[3], CROSS: q[1] != k[1], FEW: k[2] % ranks != 0 and k[2] != q[2],
        LENGTHS: q[1] % (2 * ranks) != 0 or k[1] % (2 * ranks) != 0, HEADS: q[2] % ranks != 0,
    }  # fmt: skip
    return present[kind]


def _deliver(convention: Convention, inputs: Inputs) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Positional and keyword arguments for the callable; raises _Cannot."""
    words = convention.words
    kwargs: dict[str, Any] = {}
    q, k, v = (inputs[name] for name in ("q", "k", "v"))
    rest = {n: x for n, x in inputs.items() if n not in ("q", "k", "v", "mask") and x is not None}
    mask = inputs.get("mask")
    if "gqa" in words and k.shape[2] != q.shape[2]:
        kwargs[words["gqa"]] = True
    if "lse" in words:
        kwargs[words["lse"]] = True
    if convention.flex:
        kwargs |= _flex(mask, rest.pop("bias", None), rest.pop("softcap", None), q, k)
    elif convention.objects:
        kwargs |= {} if mask is None else {words["mask"]: mask}
    else:
        kwargs |= _masks(convention, mask, rest, q.shape[1], k.shape[1])
    for name, value in rest.items():
        if name not in words:
            raise _Cannot(UNNAMED)
        kwargs[words[name]] = value
    if convention.layout == "bhtd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return (q, k, v), kwargs


def _masks(convention: Convention, mask: Mask | None, rest: dict[str, Any], T: int, S: int) -> dict[str, Any]:
    """Keywords for a foci Mask: causal and window by their keywords if there are any, the rest as a boolean tensor."""
    words = convention.words
    kwargs: dict[str, Any] = {}
    parts = [] if mask is None else list(mask.parts) if isinstance(mask, All) else [mask]
    causal = next((part for part in parts if isinstance(part, Causal)), None)
    alone = convention.both or (len(parts) == 1 and not (convention.bias_in_mask and "bias" in rest))
    own_end = any(_own_end(part, T, S) for part in parts)
    if causal is not None and alone and not own_end and _causal_word(convention, causal, T, S):
        kwargs[words["causal"]] = True
        if "align" in words:
            kwargs[words["align"]] = causal.align
        parts.remove(causal)
    window = next((part for part in parts if isinstance(part, Window)), None)
    if window is not None and "window" in words and not own_end and (T == S or words.get("causal") == "causal"):
        kwargs[words["window"]] = tuple(-1 if side is None else side for side in (window.left, window.right))
        parts.remove(window)
    if not parts and not (convention.bias_in_mask and "bias" in rest):
        return kwargs
    if "mask" not in words:
        only_causal = parts == [causal] and "causal" in words
        raise _Cannot("causal where T != S: its keyword leaves that open" if only_causal else UNNAMED)
    dense = _full(reduce(and_, parts), T, S) if parts else None
    if convention.bias_in_mask and "bias" in rest:
        bias = rest.pop("bias")
        dense = bias if dense is None else torch.where(dense, bias, -torch.inf)
    kwargs[words["mask"]] = dense
    return kwargs


def _own_end(mask: Mask, T: int, S: int) -> bool:
    """Whether each row or document has its own end, to which causal is aligned: only a mask can express that."""
    return isinstance(mask, Packed) or (isinstance(mask, Lengths) and (T != S or mask.q_lengths is not None))


def _causal_word(convention: Convention, causal: Causal, T: int, S: int) -> bool:
    """Whether the causal keyword means this alignment."""
    word = convention.words.get("causal")
    if word is None:
        return False
    return "align" in convention.words or T == S or (word == "causal" and causal.align == "bottom-right")


def _full(mask: Mask, T: int, S: int) -> Tensor:
    """[B|1, H|1, T, S], expanded only from size 1, so that a wrong size reaches the callable."""
    allowed = mask.allowed if isinstance(mask, Dense) else mask.materialize(T, S)
    sizes = [wanted if size == 1 else size for size, wanted in zip(allowed.shape[-2:], (T, S), strict=True)]
    return allowed[(None,) * (4 - allowed.dim())].expand(-1, -1, *sizes)


def _flex(mask: Mask | None, bias: Tensor | None, softcap: float | None, q: Tensor, k: Tensor) -> dict[str, Any]:
    """A block mask and a score function for flex_attention."""
    from torch.nn.attention.flex_attention import create_block_mask

    B, T, H, S = *q.shape[:3], k.shape[1]
    kwargs: dict[str, Any] = {}
    if mask is not None:
        allowed = _full(mask, T, S).expand(B, H, -1, -1)
        if allowed.shape[-2:] != (T, S):
            raise _Cannot("masks of another size: its mask is a function")
        kwargs["block_mask"] = create_block_mask(lambda b, h, t, s: allowed[b, h, t, s], B, H, T, S, device=q.device)
    if bias is not None or softcap is not None:
        spread = None if bias is None else bias[(None,) * (4 - bias.dim())].expand(B, H, T, S)

        def score(z: Tensor, b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
            z = z if softcap is None else softcap * torch.tanh(z / softcap)
            return z if spread is None else z + spread[b, h, t, s]

        kwargs["score_mod"] = score
    return kwargs


def _receive(convention: Convention, result: Any, gives: tuple[str, ...], q: torch.Size) -> Outputs:
    out, *lse = as_outputs(result, gives)
    if convention.layout == "bhtd" and out.dim() == 4:
        out = out.transpose(1, 2)
    B, T, H = (q[0], q[2], q[1]) if convention.layout == "bhtd" else q[:3]
    turned = [x.transpose(1, 2) if x.shape == (B, H, T) and (T != H or convention.layout == "bhtd") else x for x in lse]
    return out, *turned
