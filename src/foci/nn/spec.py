"""The Spec of a causal layer, which `foci check mypkg:MyLayer --like layer` runs."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from foci.check.compare import difference, extent, rms
from foci.check.modules import UNMERGED, farther, is_unmerged
from foci.core.errors import a_type
from foci.core.spec import Bad, Candidate, Case, Future, Inputs, Mistake, Outputs, Part, Probes, Spec, WrongReturn
from foci.nn.cache import Cache

WIDTH, HEADS, TOKENS, PREFILL = 32, 8, 20, 14
NAMES = {
    "hidden_size": WIDTH, "hidden_dim": WIDTH, "d_model": WIDTH, "embed_dim": WIDTH, "dim": WIDTH,
    "num_heads": HEADS, "n_heads": HEADS, "heads": HEADS, "layer_index": 0, "layer_idx": 0,
}  # fmt: skip
KEYWORDS = ("mask", "offsets", "cache")


def spec_for(layer: Any) -> Spec:
    """The Spec of a causal layer, given its class, a function that makes it, or an instance.

    Its forward takes hidden [B,T,D] and any of mask=, offsets= and cache= (foci.nn.Cache) by name, and returns
    [B,T,D]. The reference is the layer itself in float64 on every row alone, in one call, without padding or cache.
    Outputs at padding are not compared.
    """
    make = partial(_make, _maker(layer))
    return Spec(
        name="layer",
        equation="a layer on any batch, padded, packed or cached = the same layer on each sequence alone and whole",
        paper="arXiv:2412.06464",
        reference=_reference,
        plain=farther(_reference, "layer", 4),  # of the few numbers of a gate the layer's own errors may be lucky
        output_names=("hidden",),
        differentiable=("hidden",),
        cases=tuple(Case(name, frozenset(features.split()), partial(make, extra)) for name, features, extra in CASES),
        mistakes=_mistakes(),
        adapt=_adapt,
        deterministic=True,
        probes=Probes(
            sized=lambda n: Case(f"{n} tokens", frozenset(), partial(make, {"tokens": n})),
            rows=_rows,
            documents=_documents,
            future=_future,
            bad=BAD,
        ),
    )


def _adapt(layer: Any, name: str = "") -> Candidate:
    """A layer as a Candidate, tested on the keywords of its forward."""
    sample = _maker(layer)()
    if not isinstance(sample, nn.Module):
        raise ValueError(
            f"layer: {name or 'layer'}() is {a_type(sample)}; expected an nn.Module with forward(hidden, ...)"
        )
    named = inspect.signature(sample.forward).parameters
    absent = [keyword for keyword in KEYWORDS if keyword not in named]
    return Candidate(
        name or type(sample).__name__,
        _call,
        refuses=lambda case: [f"its forward does not name {keyword}" for keyword in absent if keyword in case.features],
        strict=type(sample).__module__.startswith("foci."),
    )


def _call(inputs: Inputs) -> Outputs:
    try:
        return (_run(**inputs),)
    except RuntimeError as error:
        raise (WrongReturn(UNMERGED) if is_unmerged(error) else error) from error


def _run(
    layer: nn.Module,
    hidden: Tensor,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
    cuts: tuple[int, ...] = (),
) -> Tensor:
    """Run the layer as a model does: in one call, or with a cache in pieces that start at `cuts`. [B,T,D].

    mask [B, first piece]. Pieces after the first run under no_grad unless gradients are needed, as in generation.
    Outputs at padding are set to 0.
    """
    frozen = not hidden.requires_grad and all(parameter.requires_grad for parameter in layer.parameters())
    always: dict[str, Any] = {"cache": Cache()} if cuts else {}
    if offsets is not None:
        always["offsets"] = offsets
    out = []
    for start, stop in pairwise((0, *cuts, hidden.shape[1])):
        given = always if mask is None or start else {**always, "mask": mask}
        with torch.no_grad() if start and frozen else nullcontext():
            piece = layer(hidden[:, start:stop], **given)
        if not isinstance(piece, Tensor) or piece.shape != hidden[:, start:stop].shape:
            got = list(piece.shape) if isinstance(piece, Tensor) else a_type(piece)
            raise WrongReturn(
                f"it returns {got} for hidden {list(hidden[:, start:stop].shape)}: expected the same shape"
            )
        piece = piece.clone() if cuts else piece  # which the next piece does not write to
        out.append(piece if mask is None or start else piece.masked_fill(~mask[..., None], 0))
    return torch.cat(out, 1) if cuts else out[0]


def _reference(
    layer: nn.Module,
    hidden: Tensor,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
    cuts: tuple[int, ...] = (),
) -> Outputs:
    """Each row or document alone, its real tokens in one call. Unused parameters get zero gradients."""
    B, T, _ = hidden.shape
    real = torch.ones(B, T, dtype=torch.bool, device=hidden.device)
    if mask is not None:
        real[:, : mask.shape[1]] = mask
    try:
        rows = []
        for b in range(B):
            row = torch.zeros_like(hidden[b])
            ends = [0, T] if offsets is None else offsets.tolist()
            for start, stop in pairwise(ends):
                own = start + real[b, start:stop].nonzero()[:, 0]
                if stop > start or offsets is None:
                    row = row.index_copy(0, own, layer(hidden[b : b + 1, own])[0].to(row.dtype))
            rows.append(row)
        unused = sum((parameter.sum() * 0 for parameter in layer.parameters()), hidden.new_zeros(()))
        return (torch.stack(rows) + unused,)
    except Exception:  # the fault "alone" tells it
        return (torch.full_like(hidden, torch.nan),)


FAULTS = {
    "alone": "a sequence of the batch cannot be computed alone: it raises an error, or gives NaN",
    "rows": "a row depends on the other rows of its batch: a sequence's result would change with its neighbours",
    "ahead": "a token sees later ones (a convolution padded on both sides?): it would train on what it must predict",
    "offsets ignored": "offsets are ignored: packed documents read each other",
    "documents": "a packed document is not what it is alone: a neighbour reaches it, through state or convolution",
    "mask ignored": "mask is ignored: padding is taken for text",
    "padding seen": "what stands in padding reaches real tokens, through the state or a convolution",
    "padding counted": "padding is blanked but still counts: it decays the state, or moves positions or a convolution",
    "cache ignored": "cache is accepted and ignored: every generated token would forget its prompt",
    "tail dropped": "the cache lacks what the last tokens leave behind (the tail of a convolution, or in the state): "
    "generation would silently differ from training",
    "resumed": "prefill and then steps are not the whole sequence: generation would silently differ from training",
    "padding kept": "padding reaches what the cache keeps (state or convolution): a padded batch would silently go on "
    "from a wrong state",
}


def _mistakes() -> tuple[Mistake, ...]:
    """One Mistake for each of FAULTS: it returns the layer's own output if that fault is the one found for the call.

    The fault of a call is found once and cached, as every mistake is tried on every case.
    """
    found: dict[tuple[Any, ...], tuple[str, Tensor]] = {}

    def shown(name: str, inputs: Inputs) -> Outputs | None:
        tensors = [inputs[given] for given in ("hidden", "mask", "offsets") if given in inputs]
        key = (inputs.get("cuts"), *(tuple(tensor.flatten().tolist()) for tensor in tensors))
        if key not in found:
            with torch.no_grad():
                found[key] = _fault(**inputs), _run(**inputs)
        fault, out = found[key]
        return (out,) if fault == name else None

    return tuple(Mistake(name, sentence, partial(shown, name)) for name, sentence in FAULTS.items())


def _fault(
    layer: nn.Module,
    hidden: Tensor,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
    cuts: tuple[int, ...] = (),
) -> str:
    """The one of FAULTS that explains best why this call differs from the sequences alone; "" if it does not."""
    whole, half = _run(layer, hidden), (hidden.shape[1] + 1) // 2
    right = _reference(layer, hidden, mask, offsets)[0]
    if right.isnan().any():
        return "alone"
    if _close(_run(layer, hidden, mask, offsets, cuts), right):
        return ""
    if not _close(_run(layer, hidden[:, :half]), whole[:, :half]):
        return "ahead"
    if not _close(torch.cat([_run(layer, row).clone() for row in hidden.split(1)]), whole):
        return "rows"
    if offsets is not None:
        return "offsets ignored" if _close(_run(layer, hidden, None, offsets), whole) else "documents"
    if mask is not None and (found := _mask_fault(layer, hidden[:, : mask.shape[1]], mask)):
        return found
    return _cache_fault(layer, hidden, whole, cuts) or ("" if mask is None else "padding kept")


def _mask_fault(layer: nn.Module, hidden: Tensor, mask: Tensor) -> str:
    got = _run(layer, hidden, mask)
    if _close(got, _reference(layer, hidden, mask)[0]):
        return ""
    hide = ~mask[..., None]
    if _close(got, _run(layer, hidden).masked_fill(hide, 0)):
        return "mask ignored"
    blank = _run(layer, hidden.masked_fill(hide, 0), mask)
    return "padding counted" if _close(got, blank) else "padding seen"


def _cache_fault(layer: nn.Module, hidden: Tensor, whole: Tensor, cuts: tuple[int, ...]) -> str:
    got = _run(layer, hidden, cuts=cuts)
    if _close(got, whole):
        return ""
    pieces = [_run(layer, hidden[:, start:stop]) for start, stop in pairwise((0, *cuts, hidden.shape[1]))]
    if _close(got, torch.cat(pieces, 1)):
        return "cache ignored"

    quiet = hidden.clone()  # where the last tokens before each piece are 0, nothing is lost with them
    for cut in cuts:
        quiet[:, max(0, cut - 8) : cut] = 0
    return "tail dropped" if _close(_run(layer, quiet, cuts=cuts), _run(layer, quiet)) else "resumed"


def _close(got: Tensor, right: Tensor) -> bool:
    return rms(difference(got, right)) <= 1e-4 * extent(right)


def _maker(layer: Any) -> Callable[[], nn.Module]:
    """A function that constructs the layer, with small sizes where its parameters for sizes are known."""
    if isinstance(layer, nn.Module):
        return partial(copy.deepcopy, layer)
    if not callable(layer):
        raise ValueError(f"layer is {a_type(layer)}; expected an nn.Module, or what makes one")
    parameters = inspect.signature(layer).parameters.values()
    given = {p.name: NAMES[p.name] for p in parameters if p.name in NAMES}
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    missing = [p.name for p in parameters if p.default is p.empty and p.kind not in kinds and p.name not in given]
    if missing:
        raise ValueError(
            f"layer: no value is known for its argument {missing[0]!r}; name an object, or a function of none"
        )
    return partial(layer, **given)


def _make(
    build: Callable[[], nn.Module], extra: dict[str, Any], dtype: torch.dtype, device: torch.device, seed: int
) -> dict[str, Any]:
    """The inputs of a case.

    Parameters are perturbed, as zero-initialised ones would hide what follows. Norms get a larger eps: of the first
    token's output, one k v^T, a norm leaves only the sign, with gradients of rounding noise.
    """
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(seed)
        layer = build().eval()
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, device="cpu").to(parameter))
            norms: list[Any] = [module for module in layer.modules() if hasattr(module, "eps")]
            for norm in norms:
                norm.eps = 0.1
        others = {name: value for name, value in extra.items() if name not in ("rows", "tokens")}
        width = WIDTH if WIDTH in getattr(build, "keywords", {}).values() else _width(layer)
        hidden = torch.randn(
            extra.get("rows", 2), extra.get("tokens", TOKENS), width, dtype=torch.float64, device="cpu"
        )
    moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in others.items()}
    return {"layer": layer.to(device, dtype), "hidden": hidden.to(device, dtype), **moved}


def _width(layer: nn.Module) -> int:
    for name in NAMES:
        if NAMES[name] == WIDTH and isinstance(size := getattr(layer, name, None), int):
            return size
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            return module.in_features
    raise ValueError(f"layer: {type(layer).__name__} does not say how wide it is; give it an attribute hidden_size")


def _real(tokens: int, *shown: tuple[int, int]) -> Tensor:
    """[B, tokens]: row b is real from shown[b][0] up to shown[b][1]."""
    place = torch.arange(tokens, device="cpu")
    return torch.stack([(place >= start) & (place < stop) for start, stop in shown])


_STEPS = (PREFILL, PREFILL + 1, PREFILL + 2)
CASES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("whole", "", {}),
    ("one token", "", {"tokens": 1}),
    ("padded left", "mask", {"mask": _real(TOKENS, (0, TOKENS), (7, TOKENS))}),
    ("padded right", "mask", {"mask": _real(TOKENS, (0, TOKENS), (0, 11))}),
    ("prefill, then steps", "cache", {"cuts": _STEPS, "tokens": PREFILL + 3}),
    ("in two pieces", "cache", {"cuts": (PREFILL,)}),
    ("padded left, then steps", "mask cache", {
        "mask": _real(PREFILL, (0, PREFILL), (5, PREFILL)), "cuts": _STEPS, "tokens": PREFILL + 3}),
    ("padded right, then steps", "mask cache", {
        "mask": _real(PREFILL, (0, PREFILL), (0, 9)), "cuts": _STEPS, "tokens": PREFILL + 3}),
    ("packed", "offsets", {"offsets": torch.tensor([0, 9, 9, 10, TOKENS], device="cpu"), "rows": 1}),
)  # fmt: skip

BAD = (
    Bad("hidden of another width", "hidden", lambda i: i | {"hidden": i["hidden"][..., :-1]}),
    Bad("a mask of another length", "mask", lambda i: i | {"mask": _real(TOKENS + 1, (0, 9), (0, 9))}, strict=True),
    Bad(
        "a mask of numbers", "mask", lambda i: i | {"mask": _real(TOKENS, (0, 9), (0, 9)).to(i["hidden"])}, strict=True
    ),
    Bad(
        "offsets of a batch of two",
        "offsets",
        lambda i: i | {"offsets": torch.tensor([0, TOKENS], device="cpu")},
        strict=True,
    ),
)


def _given(inputs: dict[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> dict[str, Any]:
    return dict(inputs)


def _rows(case: Case, inputs: Inputs) -> tuple[Part, ...]:
    """Each row of the batch as a call of its own."""
    parts = []
    for b in range(inputs["hidden"].shape[0]):
        row = slice(b, b + 1)
        alone = {**inputs, **{name: inputs[name][row] for name in ("hidden", "mask") if name in inputs}}
        parts.append(Part(Case(f"{case.name}, row {b}", case.features, partial(_given, alone)), (row,)))
    return tuple(parts)


def _documents(case: Case, inputs: Inputs) -> tuple[Part, ...]:
    """Each packed document as a call of its own."""
    if "offsets" not in case.features:
        return ()
    parts = []
    for start, stop in pairwise(inputs["offsets"].tolist()):
        alone = {"layer": inputs["layer"], "hidden": inputs["hidden"][:, start:stop]}
        part = Case(f"{case.name}, from {start}", frozenset(), partial(_given, alone))
        parts += [Part(part, (slice(None), slice(start, stop)))] if stop > start else []
    return tuple(parts)


def _future(case: Case, inputs: Inputs) -> Future | None:
    """The later half of the tokens replaced, if there is no padding."""
    first = inputs["hidden"].shape[1] // 2
    if case.features & {"mask", "offsets"} or not first:
        return None
    hidden = inputs["hidden"].detach().clone()
    hidden[:, first:] = 3 - hidden[:, first:]
    return Future({**inputs, "hidden": hidden}, (slice(None), slice(0, first)))
