"""foci inside a transformers model: `install(model, plan)` puts it there, `handle.restore()` takes it out again."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from foci.core.errors import ShapeError, Unsupported, require
from foci.integrations.transformers_masks import ModelMask, make_mask
from foci.ops.masks import Causal, Dense, Mask, Packed, Window
from foci.ops.softmax.api import attention

NAME = "foci"
_MARK = "_foci_site"

# What models hand through to their attention and what no attention function computes with: whatever these say, the masks
# and the tensors already say.
_WITHOUT_EFFECT = frozenset(
    "position_ids cache_position use_cache past_key_values past_key_value layer_idx position_embeddings max_length_q "
    "max_length_k output_hidden_states output_router_logits num_items_in_batch return_dict deterministic seq_idx "
    "kernel_options logits_to_keep token_type_ids".split()
)


@dataclass(frozen=True)
class _Site:
    """What an attention module with foci in it knows of itself."""

    name: str
    backend: str | None


@dataclass
class Handle:
    """foci in one model: where it is (`sites`), what was left as it was and why (`skipped`), and the way back (`restore()`)."""

    sites: list[str]
    skipped: list[tuple[str, str]]
    _configs: list[tuple[nn.Module, Any]] = field(repr=False)
    _marked: list[nn.Module] = field(repr=False)

    def restore(self) -> None:
        """Give every module its own configuration object back; the originals were never changed. Twice is once."""
        for module, config in self._configs:
            module.config = config
        for module in self._marked:
            delattr(module, _MARK)
        self._configs, self._marked = [], []


def install(model: nn.Module, plan: Mapping[str, str | None] | None = None) -> Handle:
    """Run the attention of `model`, and of no other model, through `foci.attention`.

    `plan` maps names of attention modules to a backend, or to None for foci's own choice; modules that it does not name stay
    as they were. Without a plan every module is routed. `find_sites(model)` lists the names.

    transformers finds attention by a name in the model's configuration, and configurations are shared between models.
    So the routed modules get copies that say `foci`; while installed, `model.config` is such a copy. The models whose
    attention is routed altogether also make foci's masks; with a partial plan masks stay those of the previous implementation.

    Raises Unsupported for a model without a place to put foci and for one that is asked for attention weights,
    ValueError for a plan that names unknown modules and for a model that has foci already.
    """
    library = require("transformers", extra="transformers")
    sites, skipped = find_sites(model)
    if not sites:
        reasons = [f"{name}: {why}" for name, why in skipped] or ["no attention module found"]
        raise Unsupported(f"foci cannot be installed in {type(model).__name__}", reasons)
    plan = dict.fromkeys(sites) if plan is None else dict(plan)
    if unknown := [name for name in plan if name not in sites]:
        raise ValueError(
            f"plan names {unknown[0]!r}, which is no attention of the model; expected some of {list(sites)}"
        )
    if any(hasattr(module, _MARK) for module in sites.values()):
        raise ValueError("foci is installed in this model already; call restore() on its handle first")
    if any(module.config.output_attentions for module in sites.values()):
        raise Unsupported(
            f"foci cannot be installed in {type(model).__name__}",
            ["config.output_attentions is True, and foci never forms the attention weights"],
        )
    skipped += [(name, "not named in the plan") for name in sites if name not in plan]
    library.AttentionInterface.register(NAME, attend)
    library.AttentionMaskInterface.register(NAME, make_mask)

    configs: list[tuple[nn.Module, Any]] = []
    copies: dict[int, Any] = {}  # copy.deepcopy's memo: modules that shared a configuration share its copy
    for module in _whole_models(model, plan, skipped):
        configs.append((module, module.config))
    configs += [(sites[name], sites[name].config) for name in plan]
    for module, config in configs:
        module.config = copy.deepcopy(config, copies)
        module.config._attn_implementation = NAME
    for name, backend in plan.items():
        setattr(sites[name], _MARK, _Site(name, backend))
    return Handle(list(plan), skipped, configs, [sites[name] for name in plan])


def find_sites(model: nn.Module) -> tuple[dict[str, nn.Module], list[tuple[str, str]]]:
    """The modules of `model` whose attention can be routed, by name, and the others with the reason."""
    config_class = require("transformers", extra="transformers").PreTrainedConfig
    sites: dict[str, nn.Module] = {}
    skipped: list[tuple[str, str]] = []
    for name, module in model.named_modules():
        if not _asks_for_attention(type(module)):
            continue
        if isinstance(getattr(module, "config", None), config_class):
            sites[name] = module
        else:
            skipped.append((name, "it has no configuration of its own in which to name foci"))
    known = [*sites, *(name for name, _ in skipped)]
    for name, module in model.named_modules():
        related = any(_inside(name, other) or _inside(other, name) for other in known)
        if "Attention" in type(module).__name__ and not related:
            skipped.append(
                (name, f"{type(module).__name__} computes attention itself, without transformers' interface")
            )
            known.append(name)
    return sites, skipped


def _whole_models(model: nn.Module, plan: Mapping[str, Any], skipped: list[tuple[str, str]]) -> Iterator[nn.Module]:
    """The transformers models in `model` all of whose attention is routed: those may make foci's masks."""
    model_class = require("transformers", extra="transformers").PreTrainedModel
    for name, module in model.named_modules():
        if isinstance(module, model_class) and not any(_inside(other, name) for other, _ in skipped):
            if any(_inside(site, name) for site in plan):
                yield module


def _inside(name: str, parent: str) -> bool:
    return parent == "" or name == parent or name.startswith(parent + ".")


def _asks_for_attention(cls: type) -> bool:
    """Whether a method of the class looks an attention function up in transformers' registry."""
    # PreTrainedModel itself reads the registry, to validate names.
    bases = (base for base in cls.__mro__ if base.__module__ != "transformers.modeling_utils")
    methods = (inspect.unwrap(method) for base in bases for method in vars(base).values() if inspect.isfunction(method))
    return any("ALL_ATTENTION_FUNCTIONS" in method.__code__.co_names for method in methods)


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

    Without a mask a causal module stays causal. `options` are the keywords models add: is_causal, softcap, sliding_window,
    s_aux (sinks), position_bias, cu_seq_lens_q and cu_seq_lens_k are honoured, those without effect are let pass, and any other
    that is set raises Unsupported. A boolean mask says what may be seen; a float mask is added to the logits.
    Under autocast, q, k and v are cast to its dtype as torch's own attention does; elsewhere q and k follow v.
    """
    site = getattr(module, _MARK, _Site(type(module).__name__, None))
    asked = {name: given for name, given in options.items() if given is not None and given is not False}
    is_causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    mask, bias = _mask_and_bias(attention_mask, causal, query, key, asked.pop("sliding_window", None), site)
    mask = _documents(mask, asked.pop("cu_seq_lens_q", None), asked.pop("cu_seq_lens_k", None))
    position_bias = asked.pop("position_bias", None)
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    softcap, sink = asked.pop("softcap", None), asked.pop("s_aux", None)
    asked.pop("is_causal", None)
    _refuse(asked, site)
    query, key, value = _one_dtype(query, key, value)
    out = attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
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
    given: Tensor | ModelMask | None, causal: bool, query: Tensor, key: Tensor, window: int | None, site: _Site
) -> tuple[Mask | None, Tensor | None]:
    """What the given mask means. It is complete: causality and windows only add to a mask that is not there."""
    T, S = query.shape[2], key.shape[2]
    if isinstance(given, ModelMask):
        return given.mask, None
    if given is None:
        if not causal or T == 1 and window is None:
            return None, None
        if T != S:
            # Flash kernels mean bottom-right by this, torch's kernels top-left over an empty static cache.
            raise Unsupported(
                f"attention of {site.name} cannot run without a mask here",
                [f"{T} causal queries over {S} keys: only a mask can say which keys each query may see"],
                "models with foci installed make such a mask themselves",
            )
        return (Causal() if window is None else Causal() & Window(window - 1, 0)), None
    if given.dim() != 4:
        raise ShapeError(f"attention_mask has shape {list(given.shape)} in {site.name}; expected [B, 1 or H, T, S]")
    if given.dtype == torch.bool:
        return Dense(given), None
    if given.is_floating_point():
        return None, given
    raise ValueError(
        f"attention_mask has dtype {given.dtype} in {site.name}; expected bool (True: may see) or float (added)"
    )


def _documents(mask: Mask | None, q_offsets: Tensor | None, k_offsets: Tensor | None) -> Mask | None:
    if q_offsets is None and k_offsets is None:
        return mask
    if q_offsets is None or k_offsets is None:
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k only come together; one of them is None")
    packed = Packed(q_offsets, k_offsets)
    return packed if mask is None else mask & packed


def _refuse(asked: Mapping[str, Any], site: _Site) -> None:
    reasons = [
        f"{name}=... may change the result, and foci does not know it" for name in asked.keys() - _WITHOUT_EFFECT
    ]
    if "output_attentions" in asked:
        reasons = ["output_attentions=True asks for the attention weights, which foci never forms"]
    if reasons:
        raise Unsupported(f"attention of {site.name} cannot run this call", sorted(reasons))


def _one_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in one dtype: rotary embeddings leave q and k in float32 where autocast makes v bfloat16."""
    dtype = value.dtype
    if torch.is_autocast_enabled(query.device.type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(query.device.type)
    return query.to(dtype), key.to(dtype), value.to(dtype)
