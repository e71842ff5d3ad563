"""Route the attention of a transformers model through foci: `install(model, plan)`, undone by `handle.restore()`."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from foci.core.errors import ShapeError, Unsupported, require
from foci.integrations import transformers_linear
from foci.integrations.site_plan import check_plan, require_module
from foci.integrations.transformers_keywords import DOCUMENTS, documents, refuse
from foci.integrations.transformers_keywords import asked as keywords_asked
from foci.integrations.transformers_linear import MARK, Recurrence, Routes
from foci.integrations.transformers_masks import ModelMask, make_boolean_mask, make_mask
from foci.integrations.transformers_recurrences import How
from foci.integrations.undoable import Undoable
from foci.ops.masks import Causal, Dense, Mask, Packed, Window
from foci.ops.softmax.api import attention
from foci.ops.softmax.spec import SPEC

NAME = "foci"
BOOLEAN = "foci_boolean"  # the same for a model that had not eager but sdpa, and so boolean masks
_MARK = "_foci_site"
_EAGERS = (None, "eager")
_LENGTHENS = {"isinstance", "Tensor", "cat"}  # what a method calls that joins something to its mask if it is a tensor


@dataclass(frozen=True)
class _Site:
    """Data on a routed attention module. Without a backend foci chooses one per call.

    `causal`: whether a call without a mask is causal if neither call nor module says so; None: unknown.
    """

    name: str
    backend: str | None
    causal: bool | None


@dataclass
class Handle(Undoable):
    """The handle of `install`: routed `sites`, those `skipped` with the reason, and `restore()` to undo it."""

    sites: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]
    _configs: list[tuple[nn.Module, str, Any]] = field(repr=False)
    _marked: list[nn.Module] = field(repr=False)
    _routes: Routes = field(repr=False)

    def restore(self) -> None:
        """Restore every module's original configuration object and forward. A second call has no effect."""
        for module, attribute, config in self._configs:
            setattr(module, attribute, config)
        for module in self._marked:
            delattr(module, _MARK)
        self._configs, self._marked = [], []
        self._routes.restore()


def install(model: nn.Module, plan: Mapping[str, str | None] | None = None, *, keep_bfloat16: bool = False) -> Handle:
    """Run the attention of `model`, and of no other model, through foci's operators.

    `plan` maps names of attention modules to a backend, or to None to leave them; modules that it does not name are
    left too. Without a plan every module is routed and foci chooses the backend of each call. `find_sites(model)` lists
    the names.

    Softmax attention: transformers finds it by a name in the model's configuration, and configurations are shared
    between models. So the routed modules get copies that say `foci` (`foci_boolean` where they did not say `eager`);
    while installed, `model.config` is such a copy. Parts whose attention is routed altogether get them too and so make
    foci's masks; where only a part is, masks stay what they were.

    Linear attention and other recurrences: transformers calls functions of the model's file. So each routed module gets
    a forward of its own, a copy of its class's with foci's operators for those functions.

    keep_bfloat16: on a GPU the recurrences of a bfloat16 model are trained in it, faster, as by the kernels of
    flash-linear-attention; by default in float32, which is transformers' own code's and rounds less.
    Gated delta rules, Kimi delta attention, Mamba and Mamba-2 have that choice.

    Raises Unsupported for a model without a place to put foci and for one that is asked for attention weights,
    ValueError for a plan that names unknown modules or backends, for a model that has foci already, and for
    keep_bfloat16 without a recurrence that has the choice; TypeError for what is no model or no plan.
    """
    library = require("transformers", extra="transformers")
    require_module(model)
    sites, skipped = find_sites(model)
    _check(model, plan, sites, skipped)
    routed = dict.fromkeys(sites) if plan is None else {name: backend for name, backend in plan.items() if backend}
    skipped += [(name, "left by the plan") for name in sites if name not in routed]
    routes = Routes()
    for name, recurrence in sites.items():
        if recurrence is None or name not in routed:
            continue
        if reason := routes.prepare(model.get_submodule(name), recurrence, How(routed[name], keep_bfloat16)):
            skipped.append((name, reason))
            del routed[name]
    _check_keep(keep_bfloat16, [sites[name] for name in routed])
    softmax = {name: backend for name, backend in routed.items() if sites[name] is None}
    configs = _route_softmax(library, model, softmax, [name for name, _ in skipped if sites.get(name) is None])
    routes.put(model)
    return Handle(tuple(routed), tuple(skipped), configs, [model.get_submodule(name) for name in softmax], routes)


def _route_softmax(
    library: Any, model: nn.Module, routed: Mapping[str, str | None], left: Sequence[str]
) -> list[tuple[nn.Module, str, Any]]:
    """Set foci as implementation in copies of configurations; returns the replaced (module, attribute, original)."""
    for name, masks in ((NAME, make_mask), (BOOLEAN, make_boolean_mask)):
        library.AttentionInterface.register(name, attend)
        library.AttentionMaskInterface.register(name, masks)
    held = list(_to_replace(model, list(routed), left))
    copies: dict[int, Any] = {}  # copy.deepcopy's memo: modules that shared a configuration share its copy
    named: set[int] = set()
    for module, attribute, config in held:
        ours = copy.deepcopy(config, copies)
        if id(config) not in named:  # naming names the parts too, which come later with a name of their own
            ours._attn_implementation = NAME if config._attn_implementation in _EAGERS else BOOLEAN
            named.add(id(config))
        setattr(module, attribute, ours)
    # A layer with anything to mask gets a mask from foci, as from eager; other mask functions may return None for it.
    makers = {config._attn_implementation for module in model.modules() for _, config in _held(module)}
    for name, backend in routed.items():
        causal = False if makers <= {NAME, BOOLEAN, *_EAGERS} else None
        setattr(model.get_submodule(name), _MARK, _Site(name, backend, causal))
    return held


def find_sites(model: nn.Module) -> tuple[dict[str, Recurrence | None], list[tuple[str, str]]]:
    """The modules of `model` whose attention can be routed, by name, and the others with the reason.

    Linear attention maps to its Recurrence, softmax attention to None.
    """
    config_class = require("transformers", extra="transformers").PreTrainedConfig
    recurrences, unknown = transformers_linear.find(model)
    sites: dict[str, Recurrence | None] = {}
    skipped: list[tuple[str, str]] = []
    for name, module in model.named_modules():
        if name in recurrences:
            sites[name] = recurrences[name]
        elif not _asking(type(module)):
            skipped += [(name, unknown[name])] if name in unknown else []
        elif isinstance(getattr(module, "config", None), config_class):
            sites[name] = None
        else:
            skipped.append((name, "it has no configuration of its own in which to name foci"))
    known = {*sites, *(name for name, _ in skipped)}
    for name, module in model.named_modules():
        related = any(_inside(name, other) or _inside(other, name) for other in known)
        if "Attention" in type(module).__name__ and not related:
            skipped.append((name, f"{type(module).__name__} does not ask transformers' interface for its attention"))
            known.add(name)
    return sites, skipped


def _check(
    model: nn.Module,
    plan: Mapping[str, str | None] | None,
    sites: Mapping[str, Recurrence | None],
    skipped: list[tuple[str, str]],
) -> None:
    refusal = f"foci cannot be installed in {type(model).__name__}"
    if not sites:
        raise Unsupported(refusal, [f"{name}: {why}" for name, why in skipped] or ["it has no attention module"])
    check_plan(plan, {name: SPEC if site is None else site.family.spec for name, site in sites.items()})
    modules = [model.get_submodule(name) for name in sites]
    methods = [vars(module).get(site.method) for module, site in zip(modules, sites.values(), strict=True) if site]
    if any(hasattr(module, _MARK) for module in modules) or any(hasattr(method, MARK) for method in methods):
        raise ValueError("foci is installed in this model already; call restore() on its handle first")
    if any(getattr(getattr(module, "config", None), "output_attentions", False) for module in modules):
        raise Unsupported(refusal, ["config.output_attentions is True, and foci never forms the attention weights"])


def _check_keep(keep_bfloat16: bool, routed: Sequence[Recurrence | None]) -> None:
    if not isinstance(keep_bfloat16, bool):
        raise TypeError(f"install: keep_bfloat16 must be True or False, got {keep_bfloat16!r}")
    if keep_bfloat16 and not any(recurrence and recurrence.family.keeps for recurrence in routed):
        kinds = sorted({recurrence.family.kind for recurrence in routed if recurrence})
        why = f"{' and '.join(kinds)} has no such choice" if kinds else "no recurrence is routed"
        raise ValueError(f"install: keep_bfloat16 is True, but {why}; expected False")


def _to_replace(model: nn.Module, routed: Sequence[str], left: Sequence[str]) -> Iterator[tuple[nn.Module, str, Any]]:
    """Modules to get another configuration, outer ones first, each with the attribute and its current value.

    These are the routed ones, and all with a configuration in a part of the model whose attention is routed completely,
    as they may create masks. Not in a part that extends its mask only if it is a tensor (DeepSeek-V4, for compressed
    keys).
    """
    whole: list[str] = []
    for name, module in model.named_modules():
        some, others = (any(_inside(site, name) for site in sites) for sites in (routed, left))
        if some and not others and _held(module):
            classes = {type(part) for part in module.modules()}
            if not any(names >= _LENGTHENS for cls in classes for names in _asking(cls)):
                whole.append(name)
        if name in routed or any(_inside(name, parent) for parent in whole):
            yield from ((module, attribute, config) for attribute, config in _held(module))


def _held(module: nn.Module) -> list[tuple[str, Any]]:
    """The attributes of a module that are transformers configurations."""
    config_class = require("transformers", extra="transformers").PreTrainedConfig
    return [(name, given) for name, given in vars(module).items() if isinstance(given, config_class)]


def _inside(name: str, parent: str) -> bool:
    return parent == "" or name == parent or name.startswith(parent + ".")


def _asking(cls: type) -> list[set[str]]:
    """For each method that looks up an attention function in transformers' registry, the names it uses."""
    # PreTrainedModel itself reads the registry, to validate names.
    bases = (base for base in cls.__mro__ if base.__module__ != "transformers.modeling_utils")
    methods = (inspect.unwrap(method) for base in bases for method in vars(base).values() if inspect.isfunction(method))
    names = (set(method.__code__.co_names) for method in methods)
    return [used for used in names if "ALL_ATTENTION_FUNCTIONS" in used]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | ModelMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention protocol: q [B,H,T,K], k [B,G,S,K], v [B,G,S,V] -> (out [B,T,H,V], None).

    Without a mask a causal module stays causal. A boolean mask says what may be seen; a float mask is added to the
    logits. `options` are the keywords models add: is_causal, softcap, sliding_window, s_aux (sinks), position_bias,
    cu_seq_lens_q with cu_seq_lens_k, and seq_idx are honoured, those without effect pass, any other that is set raises
    Unsupported.
    q, k and v of several dtypes take v's; under autocast all three take autocast's, as torch's own attention does.
    """
    site = getattr(module, _MARK, _Site(type(module).__name__, None, True))  # True as in transformers' own functions
    asked = keywords_asked(options)
    causal = options.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", site.causal)
    asked.pop("is_causal", None)
    mask, bias = _mask_and_bias(attention_mask, causal, query, key, asked.pop("sliding_window", None), site)
    mask = _documents(mask, {name: asked.pop(name) for name in DOCUMENTS if name in asked})
    position_bias = asked.pop("position_bias", None)
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    softcap, sink = asked.pop("softcap", None), asked.pop("s_aux", None)
    refuse(asked, site.name)
    out = attention(
        query.to(value.dtype).transpose(1, 2),
        key.to(value.dtype).transpose(1, 2),
        value.transpose(1, 2),
        mask=mask,
        bias=bias,
        softcap=softcap,
        sink=sink,
        scale=scaling,
        dropout=dropout,
        backend=site.backend,
    )
    return out, None


def _mask_and_bias(
    given: Tensor | ModelMask | None, causal: bool | None, query: Tensor, key: Tensor, window: int | None, site: _Site
) -> tuple[Mask | None, Tensor | None]:
    """The mask and bias of a call. A given mask is complete: is_causal and windows apply only without one."""
    T, S = query.shape[2], key.shape[2]
    if isinstance(given, ModelMask):
        given.refuse_changes()
        if given.mask is not None and given.shape[2:] != (T, S):
            raise Unsupported(
                f"attention of {site.name} cannot run here",
                [f"the model's mask is for {given.shape[2]} queries and {given.shape[3]} keys, these are {T} and {S}"],
                "it was made for other layers' keys; leave this layer out by a plan, or use no padding or no cache",
            )
        return given.mask, None
    if given is None:
        if causal is False or (T == 1 and window is None):
            return None, None
        if causal is None or T not in (1, S):
            # Flash kernels mean bottom-right by T < S, torch's kernels top-left over an empty static cache.
            unsaid = (
                "neither the call nor the module says is_causal, and a part of the model that keeps transformers' "
                "masks may have left out a causal one"
            )
            unseen = f"{T} causal queries over {S} keys: only a mask can say which keys each query may see"
            raise Unsupported(
                f"attention of {site.name} cannot run without a mask here",
                [unsaid if causal is None else unseen],
                "give it an attention_mask; without a plan, models make the masks of their causal layers themselves",
            )
        return (Causal() if window is None else Causal() & Window(window - 1, 0)), None
    if given.dim() != 4:
        raise ShapeError(f"attention_mask has shape {list(given.shape)} in {site.name}; expected [B, 1 or H, T, S]")
    if given.dtype == torch.bool:
        return Dense(given), None
    if given.is_floating_point():
        return None, given
    raise ValueError(f"attention_mask has dtype {given.dtype} in {site.name}; expected bool (may see) or float (added)")


def _documents(mask: Mask | None, given: Mapping[str, Any]) -> Mask | None:
    q_offsets, kv_offsets = documents(given), given.get("cu_seq_lens_k")
    if ("cu_seq_lens_q" in given) != ("cu_seq_lens_k" in given):
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k only come together; one of them is None")
    if q_offsets is None:
        return mask
    packed = Packed(q_offsets, kv_offsets)
    return packed if mask is None else mask & packed
