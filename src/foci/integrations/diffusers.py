"""Route the attention of one Diffusers model or pipeline through foci, exactly undoable.

Only the attention call inside the model's processors is replaced; projections, norms, rotary embeddings, masks and the
concatenation of text and image stay the model's own code.
"""

from __future__ import annotations

import copyreg
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from foci.core.errors import a_type, require
from foci.integrations.processors import ProcessorError, call_sites, check, only_forward
from foci.integrations.reroute import CannotReroute, Rerouter, derive
from foci.integrations.sdpa import sdpa, sdpa_bthd
from foci.integrations.site_plan import check_plan
from foci.integrations.undoable import Undoable
from foci.ops.softmax.api import attention
from foci.ops.softmax.spec import SPEC

__all__ = ["Handle", "ProcessorError", "Site", "Target", "install", "route"]


class Target(NamedTuple):
    """What replaces a site's attention calls: a function with the signature of `foci.attention`, and its `backend`."""

    backend: str | None = None
    attend: Callable[..., Tensor] = attention


class Site(NamedTuple):
    """A routed attention module: its qualified name, the requested backend, and the attention calls in its code."""

    name: str
    backend: str | None
    calls: int


@dataclass
class Handle(Undoable):
    """What `install` did: `sites` were routed, `skipped` were left as they were, each with the reason."""

    sites: tuple[Site, ...]
    skipped: tuple[tuple[str, str], ...]
    _undo: list[tuple[nn.Module, Any, Any]] = field(repr=False)

    def restore(self) -> None:
        """Restore every site's original processor object; one whose processor was changed since keeps the new one."""
        for module, routed, original in self._undo:
            if module.processor is routed:
                module.processor = original
        self._undo.clear()


def install(model: Any, plan: Mapping[str, str | None] | None = None) -> Handle:
    """Route the attention sites of `model`, an `nn.Module` or a pipeline of them, through `foci.attention`.

    `plan` maps a site's qualified name to a backend's name, or to None to leave it; sites it does not name are left
    too. Without a plan every site is routed and foci chooses the backend of each call. Other models, the library's
    classes and its modules are untouched; a copy or a pickle of the model is of the original. Nothing changes unless
    all checks pass.

    Raises ProcessorError for a custom processor that the model could not call, ValueError for a plan that names an
    unknown site or backend, or a model without attention sites, TypeError for what is no model or no plan, and
    MissingExtra without Diffusers.
    """
    require("diffusers", extra="diffusers")
    found = list(attention_sites(model))
    if not found:
        raise ValueError(
            f"install: {type(model).__name__} has no attention site: no module in it has an attention processor"
        )
    check_plan(plan, {name: SPEC for name, _, _ in found})
    if plan is None:
        return route(model, {name: Target() for name, _, _ in found})
    return route(model, {name: None if backend is None else Target(backend) for name, backend in plan.items()})


def route(model: Any, targets: Mapping[str, Target | None]) -> Handle:
    """Route each attention site of `model` to its own target, by qualified name; sites without one are left.

    Everything else is as `install` says.
    """
    found = list(attention_sites(model))
    router = _Router()
    sites: list[Site] = []
    skipped: list[tuple[str, str]] = []
    undo: list[tuple[nn.Module, Any, Any]] = []
    for name, module, parent in found:
        target = targets.get(name)
        if target is None:
            skipped.append((name, "the plan leaves it"))
            continue
        if hasattr(module.processor, "_foci_routes"):
            raise ValueError(
                f"install: {name} is already routed by foci; call restore() of the handle that did it first"
            )
        if not type(module.processor).__module__.startswith("diffusers."):
            check(module.processor, name, module, call_sites(parent, name.rpartition(".")[2]))
        routed, calls, reason = router.route(module.processor, target)
        if routed is not None:
            undo.append((module, routed, module.processor))
        if reason:
            skipped.append((name, reason))
        else:
            sites.append(Site(name, target.backend, calls))
    skipped.extend(_without_processor(model, router))
    for module, routed, _ in undo:
        module.processor = routed
    return Handle(tuple(sites), tuple(skipped), undo)


def attention_sites(model: Any) -> Iterator[tuple[str, nn.Module, nn.Module | None]]:
    """Each module with an attention processor: its qualified name, itself, and the module that holds it."""
    for prefix, component in _components(model):
        modules = dict(component.named_modules())
        for name, module in modules.items():
            if _has_processor(module):
                yield _site_name(prefix, name), module, modules.get(name.rpartition(".")[0]) if name else None


class _Router:
    """Builds routed processors; sites that share a processor and a target share the routed one."""

    def __init__(self) -> None:
        self.rerouters: dict[Target, Rerouter] = {}
        self.classes: dict[tuple[type, Target], tuple[type | None, int, str]] = {}
        self.twins: dict[tuple[int, Target], Any] = {}

    def rerouter(self, target: Target) -> Rerouter:
        if target not in self.rerouters:
            self.rerouters[target] = Rerouter(_swaps(target))
        return self.rerouters[target]

    def route(self, processor: Any, target: Target) -> tuple[Any, int, str]:
        """The routed processor or None, how many calls it routes, and the reason when it routes none."""
        if reason := _users_choice(processor):
            return None, 0, reason
        if isinstance(processor, FunctionType):
            return self._function(processor, target)
        cls, calls, reason = self._class(type(processor), target, only_forward(processor))
        if cls is None:
            return None, 0, reason
        key = (id(processor), target)
        if key not in self.twins:
            self.twins[key] = _twin(processor, cls)
        return self.twins[key], calls, reason

    def _function(self, processor: FunctionType, target: Target) -> tuple[Any, int, str]:
        rerouter = self.rerouter(target)
        if not (reach := rerouter.reach(processor)):
            return None, 0, _no_call(processor.__name__)
        try:
            routed = rerouter.function(processor)
        except CannotReroute as error:
            return None, 0, str(error)
        routed.__dict__["_foci_routes"] = processor
        return routed, rerouter.calls(reach), ""

    def _class(self, cls: type, target: Target, lacks_call: bool) -> tuple[type | None, int, str]:
        if (cls, target) not in self.classes:
            reason, made = "", None
            extra = {"_foci_routes": cls, "__new__": _original_instead, "__reduce_ex__": _reduce_as_original}
            extra |= {"__call__": _call_forward(cls)} if lacks_call else {}
            try:
                if any(vars(one).get("__slots__") for one in cls.__mro__) or not cls.__dictoffset__:
                    raise CannotReroute(f"{cls.__name__} keeps its state in __slots__, which two objects cannot share")
                made = self.rerouter(target).subclass(cls, extra)
            except CannotReroute as error:
                reason = str(error)
            if made is not None:
                self.classes[cls, target] = (*made, "")
            else:
                reason = reason or _no_call(cls.__name__)
                # Diffusers needs the __call__ even where nothing can be routed.
                self.classes[cls, target] = derive(cls, (cls,), extra) if lacks_call else None, 0, reason
        return self.classes[cls, target]


def _swaps(target: Target) -> dict[Callable[..., Any], Callable[..., Any]]:
    """The two functions by which Diffusers' code calls attention, and our replacements with the same signatures."""
    dispatch = require("diffusers.models.attention_dispatch", extra="diffusers").dispatch_attention_fn

    asked, attend = target

    def routed_sdpa(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        arguments = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return sdpa(*arguments, backend=asked, attend=attend)

    def routed_dispatch(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        attention_kwargs: dict[str, Any] | None = None,
        *,
        backend: Any = None,
        parallel_config: Any = None,
    ) -> Any:
        arguments = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if backend is not None or parallel_config is not None or attention_kwargs:
            # A backend set after installation, by set_attention_backend or the model's own code, is respected.
            return dispatch(*arguments, attention_kwargs, backend=backend, parallel_config=parallel_config)
        if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
            attn_mask = attn_mask[:, None, None]  # Diffusers reads a matrix of this shape as [B, S], SDPA as [T, S]
        arguments = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return sdpa_bthd(*arguments, backend=asked, attend=attend)

    return {torch.nn.functional.scaled_dot_product_attention: routed_sdpa, dispatch: routed_dispatch}


def _users_choice(processor: Any) -> str:
    if (chosen := getattr(processor, "_attention_backend", None)) is not None:
        return f"set_attention_backend chose {getattr(chosen, 'value', chosen)!r} for it"
    if getattr(processor, "_parallel_config", None) is not None:
        return "it runs under Diffusers' own context parallelism"
    return ""


def _no_call(kind: str) -> str:
    return (
        f"no call of scaled_dot_product_attention or dispatch_attention_fn in the code of {kind}: "
        "it computes attention by itself, or through another object"
    )


def _twin(processor: Any, cls: type) -> Any:
    """An object of class `cls` that shares the processor's __dict__, so that both always have the same state."""
    twin: Any = object.__new__(cls)
    object.__setattr__(twin, "__dict__", processor.__dict__)
    return twin


def _original_instead(cls: Any, *args: Any, **kwargs: Any) -> Any:
    # Loading an IP-Adapter makes new processors by calling the class of the present ones: no handle would restore them.
    return cls._foci_routes(*args, **kwargs)


def _reduce_as_original(self: Any, protocol: Any) -> Any:
    # A copy or a pickle of the model has no handle to restore it, so it gets the original processor.
    make, arguments, *rest = _twin(self, type(self)._foci_routes).__reduce_ex__(protocol)
    if make is copyreg.__newobj__:  # type: ignore[attr-defined]
        make = arguments[0].__new__  # pickle takes the other only for the class of the object itself
    return make, arguments, *rest


def _call_forward(cls: type) -> Callable[..., Any]:
    """The `__call__` that a processor with only `forward` lacks. Diffusers reads the parameters from its signature."""
    if issubclass(cls, nn.Module):

        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
            return nn.Module.__call__(self, *args, **kwargs)
    else:

        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
            return self.forward(*args, **kwargs)

    __call__.__signature__ = inspect.signature(cls.forward)  # type: ignore[attr-defined]
    return __call__


def _components(model: Any) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(model, nn.Module):
        yield "", model
        return
    components = getattr(model, "components", None)
    if not isinstance(components, Mapping):
        raise TypeError(f"install: model is {a_type(model)}; expected an nn.Module or a Diffusers pipeline")
    for name, component in components.items():
        if isinstance(component, nn.Module):
            yield name, component


def _has_processor(module: nn.Module) -> bool:
    return getattr(module, "processor", None) is not None


def _site_name(prefix: str, name: str) -> str:
    # A compiled model holds the model it was made from as `_orig_mod`; the plan of one is the plan of the other.
    parts = [part for part in (prefix, *name.split(".")) if part and part != "_orig_mod"]
    return ".".join(parts)


def _without_processor(model: Any, router: _Router) -> Iterator[tuple[str, str]]:
    """Attention modules without a processor, to complete the list of skipped ones."""
    for prefix, component in _components(model):
        modules = dict(component.named_modules())
        holders = [module for module in modules.values() if _has_processor(module)]
        sited = {id(part) for module in holders for part in (module, module.processor)}
        loose = False
        for name, module in modules.items():
            forward = getattr(type(module), "forward", None)
            if (
                id(module) not in sited
                and isinstance(forward, FunctionType)
                and router.rerouter(Target()).reach(forward)
            ):
                loose = True
                kind = type(module).__name__
                yield _site_name(prefix, name), f"{kind} calls attention in its own forward, without a processor"
        if prefix and not sited and not loose:
            yield (
                prefix,
                "no attention processor in it (a transformers model goes through foci.integrations.transformers)",
            )
