"""Give one object its own copies of the methods that call attention, with those calls replaced.

A Python function looks up its callees in its globals and closure. A copy of the function with other globals, which hold
only the names it uses, is the same code with other callees: its class, its module and other instances are not affected,
and torch.compile traces it like any function.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator, Mapping
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

_FOREIGN = {"torch", "foci", *sys.stdlib_module_names}
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_NOTHING = object()


class CannotReroute(Exception):
    """A copy of this code would not behave like the original; the text is the reason."""


class Load(NamedTuple):
    """A name that code looks up, the attributes it follows from there through modules, and the resulting object."""

    name: str
    path: tuple[str, ...]
    value: Any


class Rerouter:
    """Copies functions and classes so that each callable of `swaps` (by identity) is replaced by its partner."""

    def __init__(self, swaps: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
        self._swaps = {id(old): new for old, new in swaps.items()}
        self._loaded: dict[FunctionType, list[Load]] = {}
        self._reached: dict[FunctionType, frozenset[FunctionType]] = {}
        self._copies: dict[FunctionType, FunctionType] = {}

    def calls(self, functions: frozenset[FunctionType]) -> int:
        """The number of calls in these functions that would be replaced."""
        return sum(id(value) in self._swaps for one in functions for _, _, value in self._loads(one))

    def reach(self, function: FunctionType) -> frozenset[FunctionType]:
        """The functions on the call paths from this one to replaced calls, itself included; empty if there are none."""
        if function not in self._reached:
            callers: dict[FunctionType, list[FunctionType]] = {function: []}
            queue = [function]
            for one in queue:  # grows while it is read
                for callee in self.callees(one):
                    if callee not in callers:
                        queue.append(callee)
                    callers.setdefault(callee, []).append(one)
            leading = [one for one in queue if self.calls(frozenset([one]))]
            for one in leading:
                leading.extend(caller for caller in callers[one] if caller not in leading)
            self._reached[function] = frozenset(leading) if function in leading else frozenset()
        return self._reached[function]

    def function(self, function: FunctionType) -> FunctionType:
        """A copy with its calls replaced; raises CannotReroute if a copy would not behave the same."""
        if function in self._copies:
            return self._copies[function]
        for one in self.reach(function):  # all of them first: a copy must never be left half made
            _require_faithful(one)
        names = _names(function)
        # With __name__ dynamo guards on the module's globals; without, on this very dictionary.
        scope: dict[str, Any] = {
            name: function.__globals__[name] for name in ("__builtins__", "__package__") if name in function.__globals__
        }
        changing = {load.name for load in self._loads(function) if self._leads(load.value)}
        closure = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        cells = {name: CellType() if name in changing else cell for name, cell in closure.items()}
        copy = FunctionType(
            function.__code__, scope, function.__name__, function.__defaults__, tuple(cells.values()) or None
        )
        self._copies[function] = copy  # before its callees, which may call it back
        for name in ("__kwdefaults__", "__annotations__", "__doc__", "__module__", "__qualname__"):
            setattr(copy, name, getattr(function, name))
        copy.__dict__.update(function.__dict__)
        instead = self._instead(function, names)
        for name, value in names.items():
            if name not in cells:
                scope[name] = instead.get(name, value)
            elif name in instead:
                cells[name].cell_contents = instead[name]
        return copy

    def subclass(self, cls: type, extra: Mapping[str, Any]) -> tuple[type, int] | None:
        """A subclass of `cls` with replaced calls in its methods, and their number; None if there are none.

        A parent's method goes into a class of its own just before that parent in the MRO, where `super()` finds it.
        `extra` is added to the namespace of the subclass.
        """
        found: frozenset[FunctionType] = frozenset()
        layers: list[tuple[type, dict[str, Any]]] = []
        overridden: set[str] = set()
        for one in cls.__mro__:
            methods: dict[str, Any] = {}
            for name, attribute in vars(one).items():
                function = attribute.__func__ if isinstance(attribute, staticmethod | classmethod) else attribute
                if not isinstance(function, FunctionType) or name in overridden:
                    continue
                if "__class__" not in function.__code__.co_freevars:
                    overridden.add(name)  # without super() later classes in the MRO are not reached
                if _root(one) not in _FOREIGN and (reach := self.reach(function)):
                    found |= reach
                    copy = self.function(function)
                    methods[name] = copy if function is attribute else type(attribute)(copy)
            layers.append((one, methods))
        if not found:
            return None
        parents = tuple(derive(one, (one,), methods) for one, methods in layers[1:] if methods)
        return derive(cls, (cls, *parents), {**layers[0][1], **extra}), self.calls(found)

    def _instead(self, function: FunctionType, names: Mapping[str, Any]) -> dict[str, Any]:
        """The names of a function that are bound to another object in its copy."""
        instead: dict[str, Any] = {}
        for name, path, value in self._loads(function):
            if self._leads(value):
                new = self._swaps[id(value)] if id(value) in self._swaps else self.function(value)
                instead[name] = _seen(instead.get(name, names[name]), path, new)
        return instead

    def _leads(self, value: Any) -> bool:
        """Whether a value is replaced in copies: by its partner in `swaps`, or by a copy."""
        return id(value) in self._swaps or (self._follows(value) and bool(self.reach(value)))

    def _follows(self, value: Any) -> bool:
        return isinstance(value, FunctionType) and id(value) not in self._swaps and _root(value) not in _FOREIGN

    def callees(self, function: FunctionType) -> list[FunctionType]:
        """The Python functions it may call, by names, without those of torch, foci and the standard library."""
        return [value for _, _, value in self._loads(function) if self._follows(value)]

    def _loads(self, function: FunctionType) -> list[Load]:
        """Every name look-up in a function's code, including each step of a module attribute chain."""
        if function not in self._loaded:
            names = _names(function)
            found: list[Load] = []
            name, path, value = Load("", (), _NOTHING)
            for instruction in _instructions(function.__code__):
                if instruction.opname in _LOADS:
                    name, path, value = instruction.argval, (), names.get(instruction.argval, _NOTHING)
                elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(value, ModuleType):
                    path, value = (*path, instruction.argval), vars(value).get(instruction.argval, _NOTHING)
                else:
                    value = _NOTHING
                if value is not _NOTHING:
                    found.append(Load(name, path, value))
            self._loaded[function] = found
        return self._loaded[function]


def derive(cls: type, bases: tuple[type, ...], namespace: Mapping[str, Any]) -> type:
    """A class with the name and module of `cls`."""
    known = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    try:
        return type(cls)(cls.__name__, bases, {**known, **namespace})
    except TypeError as error:
        raise CannotReroute(f"{cls.__name__} cannot be subclassed ({error})") from error


def _names(function: FunctionType) -> dict[str, Any]:
    """The globals and closure variables that the code uses, with their current values."""
    read = {i.argval for i in _instructions(function.__code__) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    names = {name: function.__globals__[name] for name in sorted(read) if name in function.__globals__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            names[name] = cell.cell_contents
        except ValueError:  # a variable that has no value yet; the copy's cell stays empty too
            continue
    return names


def _require_faithful(function: FunctionType) -> None:
    where = f"{function.__module__}.{function.__qualname__}"
    for instruction in _instructions(function.__code__):
        if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            raise CannotReroute(f"{where} sets the global {instruction.argval}, which a copy would set for itself only")
    for name, value in _names(function).items():
        if name not in function.__code__.co_freevars and isinstance(value, _PLAIN):
            raise CannotReroute(f"{where} reads the global {name} = {value!r}; a copy would not notice it change")


def _seen(value: Any, path: tuple[str, ...], new: Any) -> Any:
    """`value` itself, or a view of the module `value` in which `path` leads to `new`."""
    if not path:
        return new
    view = ModuleType(value.__name__, value.__doc__)
    view.__dict__.update(vars(value))
    view.__dict__[path[0]] = _seen(vars(value)[path[0]], path[1:], new)
    return view


def _instructions(code: CodeType) -> Iterator[dis.Instruction]:
    """Of a function and of the functions, lambdas and comprehensions inside it."""
    yield from (instruction for instruction in dis.get_instructions(code) if instruction.opname != "EXTENDED_ARG")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _instructions(constant)


def _root(thing: Any) -> str:
    return str(getattr(thing, "__module__", None)).partition(".")[0]
