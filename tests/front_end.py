"""Triton's front end, which its interpreter runs for every number of every program, without what it repeats.

With reductions and scans out of the way (tests/interpreter.py) nearly all of the time of the kernels' tests was neither
numpy's nor a kernel's own: each value made its type anew, with its shape as constants and its name as a string; each
operation asked again what two types have in common, made each of its numbers a block again, and computed whether an
integer overflows to tell nobody. What depends on types alone is made once a launch here. Numbers are computed as before
by numpy, of arrays that lie in memory as before.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Number
from typing import Any

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

BLOCK, OF_ELEMENT = tl.block_type.__init__, tl.block_type.with_element_ty
HELD, PATCH = interpreter.TensorHandle.__init__, interpreter._patch_attr
EQUAL, UNWRAP, VALUE = tl.dtype.__eq__, tl.core._unwrap_if_constexpr, tl.tensor.__init__
FITS, CAST, UNKNOWN = interpreter._validate_np_data_size, TritonSemantic.cast, object()
CHECK, OVERFLOW = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.binary_op_sanitize_overflow_impl
PLAIN = {int, float, bool, str, type(None), slice, tl.tensor, tl.dtype, tl.pointer_type, tl.block_type}
CONVERSIONS = {  # by which the front end has those that kernels ask for most
    ("fp32", "fp16"): "create_fp_trunc", ("fp32", "bf16"): "create_fp_trunc", ("fp16", "fp32"): "create_fp_ext",
    ("bf16", "fp32"): "create_fp_ext", ("int32", "int64"): "create_int_cast",
}  # fmt: skip
BUILTIN = tl.core.add.__code__  # of what `builtin` makes of a function

blocks: dict[tuple[Any, ...], Any] = {}  # by element and shape
plans: dict[tuple[Any, ...], Any] = {}  # what two types, and how they are checked, make of each operand
numbers: dict[tuple[Any, ...], Any] = {}  # an operand's type and a number: that number as a block beside the other


def hasten() -> None:
    """From here on, in this process."""
    for owner, name, _, now in changes():
        setattr(owner, name, now)


def changes() -> list[tuple[Any, str, Any, Any]]:
    """Where something is, its name, what it was, and what it is then."""
    handle, semantic = interpreter.TensorHandle, TritonSemantic
    return [
        (tl.block_type, "__new__", lambda cls, *_, **__: object.__new__(cls), one_of_a_kind),
        (tl.block_type, "__init__", BLOCK, made_once),
        (tl.block_type, "with_element_ty", OF_ELEMENT, of_element),
        (tl.dtype, "__eq__", EQUAL, equal),
        (tl.tensor, "__init__", VALUE, of_type),
        (tl.core, "_unwrap_if_constexpr", UNWRAP, unwrapped),
        (handle, "__init__", HELD, held),
        (interpreter, "_validate_np_data_size", FITS, fits),
        (interpreter, "_patch_attr", PATCH, direct),
        (semantic, "binary_op_type_checking_impl", CHECK, checked),
        (semantic, "cast", CAST, converted),
        (semantic, "binary_op_sanitize_overflow_impl", OVERFLOW, overflow),
    ]


def forget() -> None:
    """At a launch's end: the types of pointers are the launch's own."""
    for each in (blocks, plans, numbers):
        each.clear()


def unwrapped(x: Any) -> Any:
    kind = type(x)
    if kind is tl.constexpr:
        return x.value
    return x if kind in PLAIN else UNWRAP(x)


def equal(self: Any, other: Any) -> bool:
    return self is other or (self.name == other.name if type(other) is tl.dtype else EQUAL(self, other))


def one_of_a_kind(cls: Any, element: Any = None, shape: Any = None) -> Any:
    """The type of blocks of a shape, of which there is one: then types are the same where they are equal."""
    if cls is not tl.block_type or element is None:
        return object.__new__(cls)
    key = (id(element), *[x.value if type(x) is tl.constexpr else x for x in shape])
    found = blocks.get(key)
    if found is None:
        found = object.__new__(cls)
        BLOCK(found, element, shape)
        blocks[key] = found
    return found


def of_element(self: Any, element: Any) -> Any:
    """A block type with other elements, which it remembers."""
    kept = self.__dict__.setdefault("of_elements", {})
    found = kept.get(id(element))
    if found is None:
        found = kept[id(element)] = tl.block_type(element, self.shape)
    return found


def made_once(self: Any, element: Any, shape: Any) -> None:
    if type(self) is not tl.block_type:
        BLOCK(self, element, shape)


def of_type(self: Any, handle: Any, type: Any) -> None:
    """A value: what it has from its type is that type's, as nothing changes it."""
    try:
        known = type.of_values
    except AttributeError:
        VALUE(self, handle, type)
        type.of_values = self.shape, self.numel, self.dtype
        return
    self.handle, self.type = handle, type
    self.shape, self.numel, self.dtype = known


def held(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    if not fits(data, dtype):
        self.__post_init__()


def fits(data: Any, dtype: Any) -> bool:
    return bool(data.itemsize <= (dtype.itemsize or 1)) if type(dtype) is tl.dtype else FITS(data, dtype)


def direct(obj: Any, name: str, member: Callable[..., Any], _builder: Any, scope: Any) -> None:
    """A builtin as the interpreter has it, without the function around it that says that it is none of Python's."""
    plain = member.__wrapped__ if getattr(member, "__code__", None) is BUILTIN else member  # type: ignore[attr-defined]

    def call(*given: Any, **options: Any) -> Any:
        options["_semantic"] = interpreter.interpreter_semantic
        return plain(*given, **options)

    scope.set_attr(obj, name, call)


def checked(self: Any, a: Any, b: Any, *how: Any, **more: Any) -> Any:
    """Two operands in their common type and shape."""
    if more:
        return CHECK(self, a, b, *how, **more)
    of_a, of_b = isinstance(a, tl.tensor), isinstance(b, tl.tensor)
    if of_a and of_b:
        key = id(a.type), id(b.type), how
        known = plans.get(key)
        if known is None:
            found = CHECK(self, a, b, *how)
            plans[key] = a.type, b.type, step(a, found[0]), step(b, found[1])
            return found
        _, _, for_a, for_b = known
        if for_a is UNKNOWN or for_b is UNKNOWN:
            return CHECK(self, a, b, *how)
        return a if for_a is None else taken(self, a, *for_a), b if for_b is None else taken(self, b, *for_b)
    if of_a and isinstance(b, Number):
        return beside(self, a, b, 1, how)
    if of_b and isinstance(a, Number):
        return beside(self, b, a, 0, how)
    return CHECK(self, a, b, *how)


def step(x: Any, made: Any) -> Any:
    """What was done to an operand, by the types alone: nothing, or a conversion, then its spread over a block."""
    if made is x:
        return None
    dtype = None if x.dtype == made.dtype else made.dtype
    if dtype is not None and (x.dtype.is_ptr() or dtype.is_ptr()):
        return UNKNOWN
    if not x.type.is_block():
        return dtype, None, made.type if made.type.is_block() else None
    if len(x.shape) != len(made.shape):
        return UNKNOWN
    shape = [int(n) for n in made.type.shape]
    return dtype, None if shape == [int(n) for n in x.type.shape] else shape, made.type


def taken(self: Any, x: Any, dtype: Any, shape: Any, kind: Any) -> Any:
    """A step again."""
    if dtype is not None:
        x = self.cast(x, dtype)
    if shape is not None:
        return tl.tensor(self.builder.create_broadcast(x.handle, shape), kind)
    if kind is not None and not x.type.is_block():
        return tl.tensor(self.builder.create_splat(kind, x.handle), kind)
    return x


def beside(self: Any, x: Any, number: Any, at: int, how: tuple[Any, ...]) -> Any:
    """A value and a number, which is first or second."""
    key = id(x.type), type(number), number, how
    known = numbers.get(key)
    if known is None:
        found = CHECK(self, *((x, number) if at else (number, x)), *how)
        if found[1 - at] is x:
            numbers[key] = x.type, found[at].handle.data, found[at].handle.dtype, found[at].type
        return found
    made = tl.tensor(interpreter.TensorHandle(known[1], known[2]), known[3])
    return (x, made) if at else (made, x)


def converted(self: Any, x: Any, dtype: Any, fp_downcast_rounding: Any = None) -> Any:
    scalar = dtype.scalar
    if x.dtype is scalar:
        return x
    name = None if fp_downcast_rounding else CONVERSIONS.get((x.dtype.name, scalar.name))
    if name is None:
        return CAST(self, x, dtype, fp_downcast_rounding)
    kind = x.type.with_element_ty(scalar) if x.type.is_block() else dtype
    more = (True,) if name == "create_int_cast" else ()
    return tl.tensor(getattr(self.builder, name)(x.handle, kind, *more), kind)


def overflow(self: Any, *given: Any) -> None:
    """Whether an integer overflows, where a device's assertions are asked for and somebody is told."""
    if self.builder.options.debug:
        OVERFLOW(self, *given)
