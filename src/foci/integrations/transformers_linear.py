"""Find recurrences that transformers models write in plain torch code, and route one instance's to foci."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from torch import nn

from foci.core.errors import Unsupported, require
from foci.core.spec import Spec
from foci.integrations.reroute import CannotReroute, Rerouter
from foci.integrations.transformers_keywords import DOCUMENTS, asked
from foci.integrations.transformers_methods import lightning, mlstm, rg_lru, wkv
from foci.integrations.transformers_parts import GATED_NORM, gated_norm, short_convolution, step_convolution
from foci.integrations.transformers_recurrences import (
    How,
    Run,
    chunk_delta,
    chunk_mamba,
    chunk_ssd,
    not_fused,
    step_delta,
    step_mamba,
    step_ssd,
)
from foci.ops.decay.spec import SPEC as LINEAR
from foci.ops.delta.spec import SPEC as DELTA
from foci.ops.scan.spec import SPEC as SCAN
from foci.ops.selective_scan.spec import SPEC as SELECTIVE_SCAN

Make = Callable[[How, Run], Run]
MARK = "_foci_routes"


class Family(NamedTuple):
    """A recurrence as transformers writes it, the same in every model that has it.

    `functions`: those that a forward calls, by name, with the makers of our replacements. `method`: for a recurrence
    written in a method, (class, method, maker). `packs`: whether it gets the offsets of packed documents. `keeps`:
    whether training may keep bfloat16 (`How`); of the others one keeps it always, the rest never.
    """

    kind: str
    spec: Spec
    functions: Mapping[str, Make] = {}
    method: tuple[str, str, Make] | None = None
    packs: bool = True
    keeps: bool = False


_DELTA_NET = {"torch_chunk_gated_delta_rule": chunk_delta, "torch_recurrent_gated_delta_rule": step_delta}
_KIMI = {"chunk_kimi_delta_attention": chunk_delta, "recurrent_kimi_delta_attention": step_delta}
_MAMBA_2 = {
    "mamba2_chunk_scan": chunk_ssd,
    "mamba2_selective_state_update": step_ssd,
    "mamba2_split_conv1d_scan_combined": not_fused,
}
_MAMBA = {
    "mamba_selective_scan": chunk_mamba,
    "mamba_selective_state_update": step_mamba,
    "mamba_inner_fn": not_fused,
}
FAMILIES = (
    Family("gated delta rule", DELTA, _DELTA_NET, keeps=True),
    Family("Kimi delta attention", DELTA, _KIMI, keeps=True),
    Family("Mamba-2", LINEAR, _MAMBA_2, keeps=True),
    Family("Mamba", SELECTIVE_SCAN, _MAMBA, packs=False, keeps=True),
    Family("RWKV-4", SCAN, {"rwkv_linear_attention": wkv}, packs=False),
    Family("lightning attention", LINEAR, method=("MiniMaxLightningAttention", "forward", lightning)),
    Family("real-gated LRU", SCAN, method=("RecurrentGemmaRglru", "_rnn_scan", rg_lru), packs=False),
    Family("xLSTM's matrix memory", LINEAR, method=("xLSTMBackend", "forward", mlstm), packs=False),
)
# Recurrences whose models do not pass keywords down to them.
_DEAF = {"Mamba2Mixer"}
_CONVOLUTION = {"causal_conv1d_fn": short_convolution, "causal_conv1d_update": step_convolution}
# Class names of modules with a recurrence; those without a family are reported with a reason.
_RECURRENT = re.compile(
    r"Mamba\w*(Mixer|Layer)$|Lightning|Delta(Net|Attention)|Rglru|LSTMBackend|LinearAttention|Rwkv\w*Attention"
)


class Recurrence(NamedTuple):
    """One module's recurrence: its family, the method that runs it, and the family's functions which that calls."""

    family: Family
    method: str
    functions: Mapping[FunctionType, Make]


def find(model: nn.Module) -> tuple[dict[str, Recurrence], dict[str, str]]:
    """The recurrences of `model` that foci can run, by name of their module, and the others with the reason."""
    sites: dict[str, Recurrence] = {}
    skipped: dict[str, str] = {}
    known: dict[type, Recurrence | None] = {}
    for name, module in model.named_modules():
        cls = type(module)
        if cls not in known:
            known[cls] = recurrence_of(cls)
        found = known[cls]
        if found is None:
            if cls.__module__.startswith("transformers.") and _RECURRENT.search(cls.__name__):
                skipped[name] = f"{cls.__name__} runs no recurrence that foci knows"
        elif found.method in vars(module) and not hasattr(vars(module)[found.method], MARK):
            skipped[name] = f"its {found.method} was replaced (by a hook?), which foci leaves alone"
        else:
            sites[name] = found
    holders = {parent for name in (*sites, *skipped) for parent in _parents(name)}
    return sites, {name: why for name, why in skipped.items() if name not in holders}


def _parents(name: str) -> Iterator[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name


def recurrence_of(cls: type) -> Recurrence | None:
    """The recurrence of a module class, found in the code of its forward; None if it has none of FAMILIES."""
    forward = inspect.getattr_static(cls, "forward", None)
    if not isinstance(forward, FunctionType) or not cls.__module__.startswith("transformers."):
        return None
    called: dict[str, FunctionType] | None = None
    for family in FAMILIES:
        if family.method is not None:
            if cls.__name__ == family.method[0]:
                return Recurrence(family, family.method[1], {})
            continue
        called = called or _called(forward)
        if called.keys() & family.functions.keys():
            makers = {**family.functions, **_CONVOLUTION}
            return Recurrence(family, "forward", {called[name]: makers[name] for name in makers if name in called})
    return None


def _called(function: FunctionType) -> dict[str, FunctionType]:
    """All functions that a forward may call, by name; of two with one name the outer, which it calls directly."""
    look, queue = Rerouter({}), [function]
    found: dict[str, FunctionType] = {}
    for one in queue:  # grows while it is read
        for callee in look.callees(one):
            if callee not in queue:
                queue.append(callee)
                found.setdefault(callee.__name__, callee)
    return found


class Routes:
    """Routes module instances by an instance attribute that shadows the class's method; undoable."""

    def __init__(self) -> None:
        self._made: dict[tuple[type, How], Run] = {}
        self._ready: list[tuple[nn.Module, str, Run]] = []
        self._mixing: set[str] = set()
        self._put: list[tuple[nn.Module, str, MethodType]] = []
        self._hooks: list[Any] = []

    def prepare(self, module: nn.Module, recurrence: Recurrence, how: How) -> str:
        """Make the replacement method without installing it; returns the reason if it would not be faithful."""
        key = (type(module), how)
        if key not in self._made:
            theirs = inspect.getattr_static(type(module), recurrence.method)
            try:
                self._made[key] = _instead(theirs, recurrence, how)
            except CannotReroute as error:
                return str(error)
        self._ready.append((module, recurrence.method, self._made[key]))
        if recurrence.functions:
            self._ready.extend((norm, "forward", forward) for norm, forward in _norms(module))
        if not recurrence.family.packs or type(module).__name__ in _DEAF:
            self._mixing.add(recurrence.family.kind)
        return ""

    def put(self, model: nn.Module) -> None:
        """Set the methods as instance attributes."""
        for module, name, method in self._ready:
            bound = MethodType(method, module)
            setattr(module, name, bound)
            self._put.append((module, name, bound))
        if mixing := sorted(self._mixing):
            base = require("transformers", extra="transformers").PreTrainedModel
            for module in model.modules():
                if isinstance(module, base):
                    hook = module.register_forward_pre_hook(
                        _RefuseDocuments(tuple(mixing)), with_kwargs=True, prepend=True
                    )
                    self._hooks.append(hook)

    def restore(self) -> None:
        """Remove the instance attributes, unless they were replaced since."""
        for module, name, bound in self._put:
            if vars(module).get(name) is bound:
                delattr(module, name)
        for hook in self._hooks:
            hook.remove()
        self._ready, self._mixing, self._put, self._hooks = [], set(), [], []


def _instead(theirs: FunctionType, recurrence: Recurrence, how: How) -> Run:
    """A method that runs foci: a copy of theirs with replaced callees, or the family's own replacement."""
    if recurrence.family.method is not None:
        method = recurrence.family.method[2](how, theirs)
        method.__name__ = recurrence.method  # by which a pickle finds it in the class again
    else:
        swaps: dict[Run, Run] = {function: make(how, function) for function, make in recurrence.functions.items()}
        method = Rerouter(swaps).function(theirs)
    setattr(method, MARK, recurrence.family.kind)
    return method


def _norms(module: nn.Module) -> Iterator[tuple[nn.Module, Run]]:
    """The gated norms of a module that foci can compute, each with its forward, unless another replaced that."""
    for norm in module.children():
        if type(norm).__name__.endswith(GATED_NORM) and "forward" not in vars(norm):
            forward = gated_norm(norm)
            if forward is not None:
                yield norm, forward


@dataclass(frozen=True)
class _RefuseDocuments:
    """A hook for models that do not pass documents' offsets to such layers: raise, as documents would mix."""

    kinds: tuple[str, ...]

    def __call__(self, module: nn.Module, args: Any, keywords: dict[str, Any]) -> None:
        if given := sorted(name for name in asked(keywords) if name in DOCUMENTS):
            raise Unsupported(
                f"{type(module).__name__} cannot keep packed documents apart",
                [f"its {' and '.join(self.kinds)} layers are not told of {', '.join(given)}"],
                "give each document a row of its own",
            )
