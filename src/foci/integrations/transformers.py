"""foci inside a transformers model: `install(model, plan)` puts it there, `handle.restore()` takes it out again."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from foci.core.errors import ShapeError, Unsupported, require
from foci.integrations.transformers_masks import ModelMask, make_mask
from foci.ops.masks import Causal, Dense, Mask, Packed, Window
from foci.ops.softmax.api import attention
from foci.ops.softmax.spec import SPEC

NAME = "foci"
_MARK = "_foci_site"

# Keywords that models hand through to their attention and that no attention function computes with: what they say, the
# masks and the tensors say already.
_WITHOUT_EFFECT = frozenset(
    {
        *("position_ids", "position_embeddings", "cache_position", "token_type_ids", "seq_idx", "layer_idx"),
        *("past_key_values", "past_key_value", "use_cache", "max_length_q", "max_length_k", "num_items_in_batch"),
        *("output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep", "deterministic"),
    }
)


@dataclass(frozen=True)
class _Site:
    """What an attention module with foci in it knows of itself. Without a backend foci chooses one for each call."""

    name: str
    backend: str | None


@dataclass
class Handle:
    """foci in one model: where it is (`sites`), what was left and why (`skipped`), and the way back (`restore()`)."""

    sites: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]
    _configs: list[tuple[nn.Module, Any]] = field(repr=False)
    _marked: list[nn.Module] = field(repr=False)

    def restore(self) -> None:
        """Give every module its own configuration object back; the originals were never changed. Twice is once."""
        for module, config in self._configs:
            module.config = config
        for module in self._marked:
            delattr(module, _MARK)
        self._configs, self._marked = [], []

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()


def install(model: nn.Module, plan: Mapping[str, str | None] | None = None) -> Handle:
    """Run the attention of `model`, and of no other model, through `foci.attention`.

    `plan` maps names of attention modules to a backend, or to None to leave them; modules that it does not name are
    left too. Without a plan every module is routed and foci chooses the backend of each call. `find_sites(model)` lists
    the names.

    transformers finds attention by a name in the model's configuration, and configurations are shared between models.
    So the routed modules get copies that say `foci`; while installed, `model.config` is such a copy. Models whose
    attention is routed altogether also make foci's masks; where only a part is, masks stay what they were.

    Raises Unsupported for a model without a place to put foci and for one that is asked for attention weights,
    ValueError for a plan that names unknown modules or backends and for a model that has foci already.
    """
    library = require("transformers", extra="transformers")
    sites, skipped = find_sites(model)
    _check(model, plan, sites, skipped)
    routed = dict.fromkeys(sites) if plan is None else {name: backend for name, backend in plan.items() if backend}
    skipped += [(name, "left by the plan") for name in sites if name not in routed]
    library.AttentionInterface.register(NAME, attend)
    library.AttentionMaskInterface.register(NAME, make_mask)

    modules = [*_whole_models(model, list(routed), [name for name, _ in skipped]), *(sites[name] for name in routed)]
    configs: list[tuple[nn.Module, Any]] = [(module, module.config) for module in modules]
    copies: dict[int, Any] = {}  # copy.deepcopy's memo: modules that shared a configuration share its copy
    for module, config in configs:
        ours = copy.deepcopy(config, copies)
        ours._attn_implementation = NAME
        module.config = ours
    for name, backend in routed.items():
        setattr(sites[name], _MARK, _Site(name, backend))
    return Handle(tuple(routed), tuple(skipped), configs, [sites[name] for name in routed])


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
            skipped.append((name, f"{type(module).__name__} does not ask transformers' interface for its attention"))
            known.append(name)
    return sites, skipped


def _check(
    model: nn.Module,
    plan: Mapping[str, str | None] | None,
    sites: Mapping[str, nn.Module],
    skipped: list[tuple[str, str]],
) -> None:
    refusal = f"foci cannot be installed in {type(model).__name__}"
    if not sites:
        raise Unsupported(refusal, [f"{name}: {why}" for name, why in skipped] or ["it has no attention module"])
    for name, backend in (plan or {}).items():
        if name not in sites:
            raise ValueError(f"plan names {name!r}, which foci cannot route; expected some of {list(sites)}")
        if backend is not None:
            SPEC.backend(backend)
    if any(hasattr(module, _MARK) for module in sites.values()):
        raise ValueError("foci is installed in this model already; call restore() on its handle first")
    if any(getattr(module.config, "output_attentions", False) for module in sites.values()):
        raise Unsupported(refusal, ["config.output_attentions is True, and foci never forms the attention weights"])


def _whole_models(model: nn.Module, routed: Sequence[str], left: Sequence[str]) -> Iterator[nn.Module]:
    """The transformers models in `model` all of whose attention is routed: those may make foci's masks."""
    model_class = require("transformers", extra="transformers").PreTrainedModel
    for name, module in model.named_modules():
        some, others = (any(_inside(site, name) for site in sites) for sites in (routed, left))
        if isinstance(module, model_class) and some and not others:
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

    Without a mask a causal module stays causal. A boolean mask says what may be seen; a float mask is added to the
    logits. `options` are the keywords models add: is_causal, softcap, sliding_window, s_aux (sinks), position_bias,
    cu_seq_lens_q and cu_seq_lens_k are honoured, those without effect pass, any other that is set raises Unsupported.
    q, k and v of several dtypes take v's; under autocast all three take autocast's, as torch's own attention does.
    """
    site = getattr(module, _MARK, _Site(type(module).__name__, None))
    asked = {name: given for name, given in options.items() if given is not None and given is not False}
    causal = options.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    asked.pop("is_causal", None)
    mask, bias = _mask_and_bias(attention_mask, causal, query, key, asked.pop("sliding_window", None), site)
    mask = _documents(mask, asked.pop("cu_seq_lens_q", None), asked.pop("cu_seq_lens_k", None))
    position_bias = asked.pop("position_bias", None)
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    softcap, sink = asked.pop("softcap", None), asked.pop("s_aux", None)
    _refuse(asked, site)
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
    given: Tensor | ModelMask | None, causal: bool, query: Tensor, key: Tensor, window: int | None, site: _Site
) -> tuple[Mask | None, Tensor | None]:
    """What the given mask means. It is complete: causality and windows only stand in for a mask that is not there."""
    T, S = query.shape[2], key.shape[2]
    if isinstance(given, ModelMask):
        return given.mask, None
    if given is None:
        if not causal or (T == 1 and window is None):
            return None, None
        if T not in (1, S):
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
    raise ValueError(f"attention_mask has dtype {given.dtype} in {site.name}; expected bool (may see) or float (added)")


def _documents(mask: Mask | None, q_offsets: Tensor | None, kv_offsets: Tensor | None) -> Mask | None:
    if q_offsets is None and kv_offsets is None:
        return mask
    if q_offsets is None or kv_offsets is None:
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k only come together; one of them is None")
    packed = Packed(q_offsets, kv_offsets)
    return packed if mask is None else mask & packed


def _refuse(asked: Mapping[str, Any], site: _Site) -> None:
    unknown = sorted(asked.keys() - _WITHOUT_EFFECT)
    reasons = [f"{name}=... may change the result, and foci does not know it" for name in unknown]
    if "output_attentions" in asked:
        reasons = ["output_attentions=True asks for the attention weights, which foci never forms"]
    if reasons:
        raise Unsupported(f"attention of {site.name} cannot run this call", reasons)
