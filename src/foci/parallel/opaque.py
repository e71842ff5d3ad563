"""Wrap any callable of q, k and v as an Operator, and refuse what would fail silently: hidden learned tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor

from foci.core.errors import ShapeError, Unsupported, a_type
from foci.core.spec import Output, Outputs, Spec
from foci.ops import arguments
from foci.parallel.nested_graph import GraphInputs
from foci.parallel.operators import Bound, Letters, Operator, refuse_transforms

_WORDS = (bool, int, float, str, type(None))


class Call(NamedTuple):
    """q, k and v of a callable that is not foci's own, and its other arguments."""

    q: Float[Tensor, "B T H K"]
    k: Float[Tensor, "B S G K"]
    v: Float[Tensor, "B S G V"]
    options: Mapping[str, Any] = {}


class Opaque(Operator):
    """A callable `op(q [B,T,H,K], k [B,S,G,K], v [B,S,G,V], **options) -> out [B,T,H,V]` of v's dtype."""

    def bind(self, args: tuple[Any, ...], options: Mapping[str, Any]) -> Bound:
        """q, k and v, and options that are no tensors: it is unknown which dimensions of a tensor are heads."""
        refuse_transforms(self.name)
        rest = dict(options)
        given = [*args, *(rest.pop(name) for name in ("q", "k", "v")[len(args) :] if name in rest)]
        if len(given) != 3:
            raise TypeError(f"{self.name}: {len(given)} of q, k, v were given; expected these three")
        sizes = self.signature.bind(dict(zip("qkv", given, strict=True)))
        q, k, v = arguments.common_dtype(self.name, dict(zip("qkv", given, strict=True)))
        if sizes["G"] == 0 or sizes["H"] % sizes["G"]:
            raise ShapeError(
                f"{self.name}: k has {sizes['G']} heads but q has {sizes['H']}; q heads must be a multiple of k heads"
            )
        for name, value in rest.items():
            if isinstance(value, Tensor):
                raise Unsupported(
                    f"{self.name}: {name} is a tensor {list(value.shape)}",
                    ["nobody knows which of its dimensions are tokens and heads: the callable is not foci's own"],
                    "give tensors to one of foci's operators, or close over one that is the same for all heads",
                )
        return Bound(Call(q, k, v, rest))

    def run(self, call: Any, backend: str | None) -> Outputs:
        out = self.function(call.q, call.k, call.v, **call.options)
        (expected,) = self.declared(call)
        if not isinstance(out, Tensor) or tuple(out.shape) != expected.shape or out.dtype != expected.dtype:
            got = f"{out.dtype} {list(out.shape)}" if isinstance(out, Tensor) else a_type(out)
            raise TypeError(f"{self.name}: it returned {got}; expected {expected.dtype} {list(expected.shape)}")
        _refuse_hidden(self.name, out)
        return (out,)

    def facts(self, call: Any) -> dict[str, object]:
        found = super().facts(call)
        options = found.pop("options")
        assert isinstance(options, dict)
        words = {name: value if isinstance(value, _WORDS) else type(value).__name__ for name, value in options.items()}
        return found | words


def opaque(function: Callable[..., Any]) -> Opaque:
    """An Operator made from a callable that is not foci's own."""
    if not callable(function):
        raise TypeError(f"expected an operator of foci, a wrapper or a callable of q, k and v, got {function!r}")
    name = getattr(function, "__name__", type(function).__name__)
    spec = Spec(
        name=name, equation="", paper="", reference=function, plain=function, output_names=("out",),
        differentiable=("q", "k", "v"), cases=(), call=Call, outputs=_outputs,
    )  # fmt: skip
    return Opaque(name, function, spec, lambda backend, call: (), (Letters(("B", "T", "H", "V")),), 1)


def _outputs(call: Call) -> tuple[Output, ...]:
    return (Output("out", (*call.q.shape[:3], call.v.shape[3]), call.v.dtype),)


def _refuse_hidden(name: str, out: Tensor) -> None:
    """Raise if the result depends on a tensor with grad that is no argument: its gradient would silently be lost."""
    pending, seen = [out.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen or getattr(node, "_forward_cls", None) is GraphInputs:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            raise Unsupported(
                f"{name}: its result depends on a tensor {list(node.variable.shape)} that wants a gradient and is no "
                "argument",
                ["a wrapper gives gradients to what it is called with alone"],
                "keep projections and learned tables outside of what is wrapped",
            )
        pending.extend(following for following, _ in node.next_functions)
