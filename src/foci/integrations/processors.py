"""Static checks of a Diffusers attention processor: methods, keywords, order of arguments, returned values."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import nn

_LOSS = {
    "image_rotary_emb": "the model would lose its positions",
    "rotary_emb": "the model would lose its positions",
    "attention_mask": "padding would be attended to",
    "encoder_hidden_states": "the text would be ignored",
    "temb": "the time step would be ignored",
}
# Arguments that have had the same position in different versions of processors: a mix-up would be silent.
_KNOWN = {"encoder_hidden_states", "attention_mask", "temb", "scale", *_LOSS}


class ProcessorError(TypeError):
    """An attention processor that the model cannot call as it does; the message says what to add."""


class CallSite(NamedTuple):
    """How a block calls its attention: the keywords it passes, and the number of values it unpacks."""

    keywords: tuple[str, ...]
    unpacks: int


class _Given(str):
    """A placeholder for an argument, with its name."""


def entry(processor: Any) -> Callable[..., Any] | None:
    """The method that runs when the processor is called: its `__call__`, or `forward` if it has only that."""
    if inspect.isfunction(processor):
        return processor
    if callable(processor) and type(processor).__call__ is not nn.Module.__call__:
        method: Callable[..., Any] = processor.__call__
        return method
    forward: Callable[..., Any] | None = getattr(processor, "forward", None)
    return None if getattr(forward, "__func__", None) is nn.Module.forward else forward


def only_forward(processor: Any) -> bool:
    """Whether the processor has no `__call__` of its own, which Diffusers inspects."""
    own = callable(processor) and type(processor).__call__ is not nn.Module.__call__
    return not own and entry(processor) is not None


def check(processor: Any, name: str, site: nn.Module, calls: list[CallSite]) -> None:
    """Raise ProcessorError where the attention module `site`, called `name`, cannot use `processor` in these calls.

    The arguments go through the site's own `forward`, so the library's filter of keywords applies.
    """
    kind = getattr(processor, "__name__", type(processor).__name__)
    method = entry(processor)
    if method is None:
        raise ProcessorError(
            f"{kind}: {name} calls it, but it has neither __call__ nor forward. "
            "Add __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None)."
        )
    for call in calls or [CallSite((), 1)]:
        _check_delivery(kind, processor, method, name, site, call)
        arities = return_arities(method)
        if call.unpacks > 1 and arities and max(arities) < call.unpacks:
            raise ProcessorError(
                f"{kind}: {name} is called for {call.unpacks} tensors, but it returns one: Python would unpack "
                f"the batch, silently when it holds {call.unpacks}. Return hidden_states, encoder_hidden_states, in "
                "this order."
            )


def call_sites(parent: nn.Module | None, attribute: str) -> list[CallSite]:
    """The calls of `self.<attribute>` written in the parent's forward; none where the source cannot be read."""
    tree = _tree(type(parent).forward) if parent is not None else None
    if tree is None:
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"self.{attribute}":
            keywords = tuple(k.arg for k in node.keywords if k.arg is not None)
            found.append(CallSite(keywords, _unpacked(tree, node)))
    return found


def return_arities(method: Callable[..., Any]) -> set[int]:
    """How many values each `return` gives; empty when any of them cannot be told from the source."""
    tree = _tree(method)
    if tree is None:
        return set()
    arities = set()
    for node in _outer_nodes(tree):
        if isinstance(node, ast.Return):
            if isinstance(node.value, ast.Tuple):
                arities.add(len(node.value.elts))
            elif node.value is not None and _is_one_tensor(node.value, tree, node.lineno):
                arities.add(1)
            else:
                return set()
    return arities


def _check_delivery(
    kind: str, processor: Any, method: Callable[..., Any], name: str, site: nn.Module, call: CallSite
) -> None:
    delivered = _deliver(processor, method, site, call)
    if delivered is None:
        return
    args, kwargs = delivered
    said = "forward" if only_forward(processor) else "__call__"
    arrived = {str(value) for value in (*args[1:], *kwargs.values())}
    lost = [keyword for keyword in call.keywords if keyword not in arrived]
    if "temb" in lost and getattr(site, "spatial_norm", None) is None:
        lost.remove("temb")  # only a spatial norm reads it
    if lost:
        raise ProcessorError(
            f"{kind}: {name} calls it with {lost[0]}=..., which its {said} does not name: Diffusers would drop it and "
            f"{_LOSS.get(lost[0], 'it would have no effect')}. {_advice(method, said, lost)}"
        )
    signature = inspect.signature(method)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        names = [str(value) for value in (*args[2:], *kwargs.values()) if str(value) not in signature.parameters]
        raise ProcessorError(
            f"{kind}: {name} cannot call its {said}: {error}. {_advice(method, said, names)}"
        ) from error
    for place, (parameter, value) in enumerate(bound.arguments.items()):
        if place >= 2 and isinstance(value, _Given) and parameter != value and parameter in _KNOWN:
            raise ProcessorError(
                f"{kind}: {name} passes {value} in the place of {parameter}: it would land there silently. "
                f"Name the parameter {value}, in the order of {_order(args)}."
            )


def _deliver(
    processor: Any, method: Callable[..., Any], site: nn.Module, call: CallSite
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments that the site's forward passes to a processor with this signature, as placeholders."""
    received: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def record(self: Any, *args: Any, **kwargs: Any) -> tuple[None, None]:
        received.append((args, kwargs))
        return None, None

    probe = type(type(processor).__name__, (), {"__call__": record})()
    probe.__dict__["__call__"] = method  # the filter reads this attribute; the call itself goes to the class
    standin = object.__new__(type(site))
    standin.__dict__.update(site.__dict__)
    standin.__dict__["_modules"] = {name: module for name, module in site._modules.items() if name != "processor"}
    standin.__dict__["processor"] = probe
    named = [
        p.name for p in inspect.signature(type(site).forward).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    given = {name: _Given(name) for name in dict.fromkeys((*named[1:], *call.keywords))}
    try:
        type(site).forward(standin, **given)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        # A site that computes before calling its processor needs real tensors: it cannot be checked statically.
        return received[0] if received else None
    return received[0] if received else None


def _advice(method: Callable[..., Any], said: str, names: list[str]) -> str:
    parameters = inspect.signature(method).parameters.values()
    if {p.kind for p in parameters} == {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        return f"Diffusers delivers only what {said} names: write the parameters out, or use functools.wraps."
    return (
        f"Add {', '.join(f'{name}=None' for name in names)} to {said}."
        if names
        else f"Compare the signature of {said}."
    )


def _order(args: tuple[Any, ...]) -> str:
    return ", ".join(["attn", *(str(value) for value in args[1:])])


def _unpacked(tree: ast.AST, call: ast.Call) -> int:
    """The number of names a call's result is unpacked into, directly or through one variable; 1 if it is not."""
    counts, variables = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and node.value is call:
            target = node.targets[0]
            counts |= {len(target.elts)} if isinstance(target, ast.Tuple) else set()
            variables |= {target.id} if isinstance(target, ast.Name) else set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id in variables:
            target = node.targets[0]
            counts |= {len(target.elts)} if isinstance(target, ast.Tuple) else set()
    return min(counts, default=1)


def _is_one_tensor(value: ast.expr, tree: ast.AST, before: int) -> bool:
    """Whether an expression is surely a single tensor: arithmetic, a projection of attn, or a method of a tensor."""
    if isinstance(value, ast.BinOp):
        return True
    if isinstance(value, ast.Call):
        root: ast.expr = value.func
        while isinstance(root, ast.Attribute | ast.Subscript):
            root = root.value
        text = ast.unparse(value.func)
        return (isinstance(root, ast.Name) and root.id == "attn") or text.endswith((".reshape", ".to", ".flatten"))
    if isinstance(value, ast.Name):
        last = None
        for node in _outer_nodes(tree):
            if isinstance(node, ast.Assign) and node.lineno < before and ast.unparse(node.targets[0]) == value.id:
                last = node if last is None or node.lineno > last.lineno else last
        return last is not None and _is_one_tensor(last.value, tree, last.lineno)
    return False


def _outer_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node of a function that is not inside a function of its own."""
    queue: list[ast.AST] = list(ast.iter_child_nodes(next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))))
    for node in queue:  # grows while it is read
        yield node
        if not isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            queue.extend(ast.iter_child_nodes(node))


def _tree(function: Any) -> ast.AST | None:
    """The parsed source of a function, or None: code typed at a prompt or compiled without source has none."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
    return tree if any(isinstance(node, ast.FunctionDef) for node in ast.walk(tree)) else None
