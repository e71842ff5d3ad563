"""Argument checks shared by the operators: dtypes, numbers, heads, decays by rank, states, packed documents."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any, NamedTuple, TypeGuard, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from foci.core import plans
from foci.core.errors import ShapeError
from foci.core.shapes import dense
from foci.core.spec import accumulator
from foci.ops.deferred_checks import is_batched

DTYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
SAME_DTYPE = ("q", "k", "v", "erase")  # arguments that must share one dtype, if given
AUTOCAST = DTYPES - {torch.float64}  # what torch's autocast converts
LARGEST = torch.finfo(torch.float32).max
INTEGERS = frozenset({torch.int32, torch.int64})
T_ = TypeVar("T_", bound=Tensor)


def common_dtype(operator: str, tensors: dict[str, T_]) -> tuple[T_, ...]:
    """The tensors in one dtype: autocast's if it is on, as for torch's own matmuls; else they must share one.

    They must share one device, too.
    """
    first = next(iter(tensors.values()))
    if any(x.device != first.device for x in tensors.values()):
        places = ", ".join(str(x.device) for x in tensors.values())
        raise ValueError(f"{operator}: {', '.join(tensors)} are on {places}; expected one device for all of them")
    tensors = by_autocast(tensors)
    dtypes = {x.dtype for x in tensors.values()}
    if len(dtypes) > 1 or not dtypes <= DTYPES:
        raise ValueError(
            f"{operator}: {', '.join(tensors)} have dtypes {', '.join(short(x.dtype) for x in tensors.values())}; "
            "expected one of float64, float32, bfloat16, float16 for all of them"
        )
    return tuple(tensors.values())


def in_one_dtype(operator: str, tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Those of the tensors that are in SAME_DTYPE, by name, in one dtype."""
    given = {name: x for name in SAME_DTYPE if (x := tensors.get(name)) is not None}
    return dict(zip(given, common_dtype(operator, given), strict=True))


def by_autocast(tensors: dict[str, T_]) -> dict[str, T_]:
    """The tensors, cast to autocast's dtype if it is on."""
    first = next(iter(tensors.values()))
    if first.is_meta or not torch.is_autocast_enabled(first.device.type):
        return tensors
    wanted = torch.get_autocast_dtype(first.device.type)
    return {name: x.to(wanted) if x.dtype in AUTOCAST else x for name, x in tensors.items()}  # type: ignore[misc]


def ends(call: Any, state: Tensor) -> Tensor:
    """The final states if the call asks for them; else an empty tensor, so that their memory is freed."""
    return state if call.ends else state.new_empty((0, *state.shape[1:]))


def check_heads(operator: str, sizes: dict[str, int]) -> None:
    """v's heads H must be a multiple of k's G: head h reads q and k of head h // (H/G)."""
    if sizes["G"] == 0 or sizes["H"] % sizes["G"]:
        raise ShapeError(
            f"{operator}: k has {sizes['G']} heads but v has {sizes['H']}; "
            f"v heads must be a multiple of k heads (G={sizes['G']}, H={sizes['H']})"
        )


def check_rest(operator: str, like: Tensor, tensors: Mapping[str, Tensor | None]) -> None:
    """The optional tensors are floating and on the device of `like`."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{operator}: {name} must be a floating tensor, got {short(tensor.dtype)}")
        if tensor.device != like.device:
            raise ValueError(f"{operator}: {name} is on {tensor.device}; expected {like.device}, where the others are")


def decay(
    operator: str, log_decay: Tensor | None, wanted: dict[int, tuple[str, ...]], full: tuple[int, ...]
) -> Tensor | None:
    """log_decay of any rank in the form that Calls hold: as many dimensions as q, broadcast ones of size 1.

    `wanted`: the letters of each allowed rank; `full`: the sizes [..., H, K] of a decay per head and channel.
    """
    if log_decay is None:
        return None
    dense(operator, "log_decay", log_decay)
    shapes = {1: full[-2:-1], len(full) - 1: full[:-1], len(full): full}
    rank = log_decay.dim()
    if rank not in shapes or tuple(log_decay.shape) != shapes[rank]:
        options = " or ".join(f"[{', '.join(wanted[r])}] = {list(shapes[r])}" for r in sorted(shapes))
        raise ShapeError(f"{operator}: log_decay has shape {list(log_decay.shape)}; expected {options}")
    if rank == 1:
        return log_decay.view(*[1] * (len(full) - 2), -1, 1)
    return log_decay[..., None] if rank < len(full) else log_decay


def number(
    operator: str, name: str, value: object, kind: str = "finite number", least: float = -LARGEST, most: float = LARGEST
) -> float:
    """The value as a float from `least` to `most`, else an error that says `kind` was expected.

    By default any finite float32: kernels take scalars in float32 whatever the dtype, where a larger one is infinite.
    """
    if isinstance(value, Real) and not isinstance(value, int):  # float, numpy's and fractions
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float | torch.SymFloat | torch.SymInt):
        raise TypeError(f"{operator}: {name} must be a number, got {value!r}")
    if not least <= value <= most:  # math.isfinite does not take a SymFloat
        raise ValueError(f"{operator}: {name} must be a {kind}, got {value}; expected {least} to {most}")
    return float(value)


def is_whole(value: object, least: int = 1) -> TypeGuard[int]:
    """Whether it is an integer of at least `least`; a bool is none."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def whole(operator: str, name: str, value: object, least: int = 1) -> int:
    """The value as an int, where it is one of at least `least`."""
    if not is_whole(value, least):
        raise ValueError(f"{operator}: {name} must be a whole number, at least {least}, got {value!r:.200}")
    return int(value)


def switch(operator: str, name: str, value: object) -> bool:
    """A flag as a bool, 0 and 1 among them, as peers' callers write it; a word is true, "False" too, so it raises."""
    if not isinstance(value, bool | torch.SymBool) and not (isinstance(value, int) and value in (0, 1)):
        raise TypeError(f"{operator}: {name} must be True or False, got {value!r:.200}")
    return bool(value)


def scaling(operator: str, scale: float | None, K: int) -> float:
    """scale, or K**-0.5 where none is given."""
    if scale is not None:
        return number(operator, "scale", scale)
    return (exact_size(K) or 1) ** -0.5


def exact_size(size: Any) -> Any:
    """A size to calculate with: in torch.jit.trace it is a tensor, whose quotients and powers would be float32."""
    return size.double() if isinstance(size, Tensor) else size


_transforming: Callable[[], bool] = torch._C._are_functorch_transforms_active


def check_documents(
    operator: str,
    offsets: Tensor | None,
    state: Tensor | None,
    B: int,
    names: tuple[str, str] = ("offsets", "state"),
) -> None:
    """Check offsets and state as far as possible without reading values; `names`: what the caller calls them."""
    if offsets is not None:
        check_offsets(operator, offsets, B, names[0])
    count, word = rows(offsets, B), "rows in the batch" if offsets is None else "packed documents"
    if state is not None and state.shape[0] != count:
        raise ShapeError(f"{operator}: {names[1]} has {state.shape[0]} rows; expected {count}, the {word}")


def check_offsets(operator: str, offsets: object, B: int = 1, name: str = "offsets") -> None:
    """Raise for what cannot be the offsets of documents that stand end to end in a batch of B; values are not read."""
    if not isinstance(offsets, Tensor) or offsets.dtype not in INTEGERS or offsets.dim() != 1:
        got = f"{short(offsets.dtype)} {list(offsets.shape)}" if isinstance(offsets, Tensor) else repr(offsets)
        raise ValueError(f"{operator}: {name} must be a 1-D int32 or int64 tensor [N + 1], got {got}")
    dense(operator, name, offsets)
    if B != 1:
        raise ShapeError(f"{operator}: {name} need a batch of 1 (documents stand end to end), got B={B}")
    if is_batched(offsets):
        raise ValueError(f"{operator}: {name} cannot be mapped by vmap: they say how long documents are")
    if offsets.shape[0] < 1:
        raise ShapeError(f"{operator}: {name} is empty; expected [0, ...], one more entry than documents")


def rows(offsets: Tensor | None, B: int) -> int:
    """The number of independent states: documents, or batch rows."""
    return B if offsets is None else offsets.shape[0] - 1


def documents(operator: str, offsets: Tensor | None, T: int, name: str = "offsets") -> list[tuple[int, int]] | None:
    """Start and stop of every packed document; None without offsets. Reads and checks their values."""
    if offsets is None:
        return None
    values: list[int] = offsets.tolist()
    pairs = list(itertools.pairwise(values))
    if values[0] != 0 or values[-1] != T or any(start > stop for start, stop in pairs):
        raise ValueError(f"{operator}: {name} must rise from 0 to T={T}, got {values}")
    return pairs


def check_near(operator: str, offsets: Tensor, T: int, name: str = "offsets") -> None:
    """The checks of `documents` for offsets on the CPU; on a GPU reading them would synchronise, so none."""
    if offsets.device.type == "cpu" and plain(offsets):
        documents(operator, offsets, T, name)


class Stretch(NamedTuple):
    """Tokens start:stop of batch `rows` (or of one document), and the indices of their `states`."""

    rows: slice
    states: slice
    start: int
    stop: int


def of_no_token(out: Tensor, call: Any) -> Tensor:
    """An output of no tokens, as a result of all inputs: their gradients are 0 then, and not None."""
    for x in call:
        if isinstance(x, Tensor) and x.is_floating_point() and x.dim():  # not a trace's scale
            out = out + x[:0].sum().to(out.dtype)
    return out


def by_token(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Every x[:, t] of each tensor, by one unbind: the gradient of each of T slices would be as large as x."""
    return [x.unbind(1) for x in tensors]


def stretches(operator: str, offsets: Tensor | None, B: int, T: int, most: int | None = None) -> list[Stretch]:
    """One Stretch per document, or per group of up to `most` batch rows. Reads and checks the offsets."""
    packed = documents(operator, offsets, T)
    if packed is not None:
        return [Stretch(slice(0, 1), slice(n, n + 1), *place) for n, place in enumerate(packed)]
    step = max(1, most or B)
    groups = [slice(b, min(b + step, B)) for b in range(0, max(1, B), step)]
    return [Stretch(group, group, 0, T) for group in groups]


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def spread(x: Tensor, H: int, dim: int) -> Tensor:
    """Head h of H reads head h // (H / G) of x."""
    return x if x.shape[dim] == H else x.repeat_interleave(H // x.shape[dim], dim=dim)


_STEP = {
    "q": "BGK", "k": "BGK", "erase": "BGK", "v": "BHV", "beta": "BH", "bonus": "HK", "state": "BHKV", "slots": "B",
}  # fmt: skip


def bind_step(operator: str, tensors: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """q, k, v and erase of one step in one dtype; checks its arguments except log_decay's shape."""
    sizes: dict[str, int] = {}
    slotted = tensors.get("slots") is not None
    for name, tensor in tensors.items():
        if tensor is None and name in ("erase", "bonus", "log_decay", "slots"):
            continue
        tensor = dense(operator, name, tensor)
        if name == "log_decay":
            continue
        letters = "MHKV" if slotted and name == "state" else _STEP[name]
        if tensor.dim() != len(letters) or any(
            sizes.setdefault(letter, size) != size for letter, size in zip(letters, tensor.shape, strict=True)
        ):
            known = ", ".join(f"{letter}={sizes[letter]}" if letter in sizes else letter for letter in letters)
            raise ShapeError(f"{operator}: {name} has shape {list(tensor.shape)}; expected [{known}]")
    check_heads(operator, sizes)
    found = in_one_dtype(operator, tensors)
    check_step(operator, found["v"], {name: x for name, x in tensors.items() if name != "slots"})
    if slotted:
        check_slots(operator, tensors["slots"], found["v"], sizes["M"])
    return found


def check_step(operator: str, like: Tensor, tensors: Mapping[str, Tensor | None]) -> None:
    """Check a step: state in the accumulator dtype of `like`, all on one device and floating, none requires grad."""
    check_rest(operator, like, tensors)
    state = tensors["state"]
    assert state is not None
    which = _transforming() and next((name for name, x in tensors.items() if x is not None and is_batched(x)), None)
    if which and not is_batched(state):
        raise ValueError(
            f"{operator}: vmap maps {which} and not state, which the step changes in place; expected a state of each"
        )
    if state.dtype != accumulator(like.dtype):
        wanted = short(accumulator(like.dtype))
        raise ValueError(f"{operator}: state is {short(state.dtype)}; expected {wanted} for {short(like.dtype)} inputs")
    check_apart(operator, "state", state, "step")
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors.values()):
        raise ValueError(
            f"{operator}: it has no gradients, because it changes its state in place; use torch.no_grad(), or "
            f"{operator.removesuffix('_step')} with T=1"
        )


def check_apart(operator: str, name: str, x: Tensor, what: str) -> None:
    """Raise if a tensor that `what` changes in place may have overlapping elements in memory."""
    if not x.is_contiguous() and folded(x):
        raise ValueError(
            f"{operator}: {name} has strides {list(x.stride())} for sizes {list(x.shape)}, so that several of its "
            f"numbers are one in memory; expected each its own, because the {what} changes them: {name}.contiguous()"
        )


def folded(x: Tensor) -> bool:
    """Whether elements may overlap in memory: a stride does not exceed the extent of the smaller dimensions."""
    dims = [(s, n) for n, s in zip(x.shape, x.stride(), strict=True) if n > 1]
    if torch.compiler.is_compiling():  # symbolic sizes cannot be sorted
        return any(s == 0 for s, _ in dims)
    extent = 0
    for stride, size in sorted(dims):
        if stride <= extent:
            return True
        extent += stride * (size - 1)
    return False


def check_slots(operator: str, slots: Tensor | None, like: Tensor, M: int) -> None:
    """Check that slots are integers from -1 (padding) to M - 1; values on a GPU are not read, as that synchronises."""
    assert slots is not None
    if M == 0:
        raise ShapeError(f"{operator}: state has no slots: M=0; expected at least 1")
    if slots.dtype not in INTEGERS:
        raise ValueError(f"{operator}: slots must be int32 or int64, got {short(slots.dtype)}")
    if slots.device != like.device:
        raise ValueError(f"{operator}: slots is on {slots.device}; expected {like.device}, where the others are")
    if not plain(slots) or slots.device.type != "cpu":
        return
    if wrong := [slot for slot in slots.tolist() if not -1 <= slot < M]:
        raise ValueError(
            f"{operator}: slots holds {wrong[0]}; expected -1 (padding) to {M - 1}, the last of {M} states"
        )


def plain(x: Tensor) -> bool:
    """Whether a tensor's memory may be accessed directly: no subclass, compiler, trace, mode or transform."""
    if torch.compiler.is_compiling() or plans.jit_tracing() or type(x) is not Tensor:
        return False
    watched = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack() > 0
    return not watched and torch._C._functorch.maybe_current_level() is None


def alone(x: Tensor) -> bool:
    """Whether it is plain, and forward-mode AD is off: only torch's own operations propagate tangents."""
    return plain(x) and forward_ad._current_level < 0


class Slots:
    """Gather rows' states from `state` [M, ..], and scatter them back: row b has state[slots[b]]; others are padding.

    No size depends on values (so it compiles): a row of padding repeats the write of the first row that is none.
    """

    def __init__(self, state: Tensor, slots: Tensor) -> None:
        self.all, self.valid = state, (slots >= 0) & (slots < state.shape[0])
        first = torch.nn.functional.pad(self.valid.int(), (0, 1)).argmax().view(1)  # padded: argmax of nothing raises
        place = torch.where(self.valid, slots, 0).long()
        self.rows = torch.where(self.valid, torch.arange(len(slots), device=slots.device), first)
        self.place = place[self.rows]
        self.state = state[self.place]

    def put(self, out: Tensor) -> Tensor:
        """Write the rows' states back; `out` [B, ..] with zeros for padding."""
        anything = self.valid[self.rows].view(-1, *[1] * (self.all.dim() - 1))
        self.all[self.place] = torch.where(anything, self.state[self.rows], self.all[self.place])
        return torch.where(self.valid.view(-1, *[1] * (out.dim() - 1)), out, 0)


def write(state: Tensor, decay: Tensor | None, key: Tensor, value: Tensor) -> None:
    """S <- Diag(decay) S + key value^T, in place: state [B,H,K,V], decay [..,H,1 or K], key [B,H,K], value [B,H,V]."""
    if decay is not None:
        state.mul_(decay[..., None])
    state.addcmul_(key[..., None], value[..., None, :])
