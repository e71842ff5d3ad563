"""The recurrences in C++, compiled on first use if there is a compiler; a head's chunk stays in the CPU cache.

The equations are those of decay/chunked.py and delta/chunked.py, in chunks of 32 tokens. Decays are running products
within a chunk, never quotients or differences of sums; per channel, pairs within 16 tokens are weighted one by one. The
delta rule's triangular system is solved row by row. Sums are accumulated in float32.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import os
import platform
import shutil
import tempfile
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from foci.core.device import constant, isa
from foci.core.spec import Output
from foci.ops import arguments
from foci.ops.slabs import initial

_SPAN = 64  # tokens between saved states: native_back.h
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_FLAGS = {"AVX512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"], "AVX2": ["-mavx2"]}
_HERE = Path(__file__).parent
_BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
_BUILDING: dict[int, threading.Lock] = {}  # by process: a fork may copy a lock that none of its threads will release


class View(ctypes.Structure):
    """A tensor [B,T,H,D] or [B,T,H]: its data pointer and strides of B, T and H."""

    _fields_ = [("p", ctypes.c_void_p), ("b", ctypes.c_long), ("t", ctypes.c_long), ("h", ctypes.c_long)]


_NUMBERS = ("B", "T", "G", "H", "K", "V", "N", "dtype", "per_channel", "own", "threads")
_INPUTS = ("q", "k", "v", "erase", "beta", "decay", "out")
_GRADIENTS = ("d_out", "d_q", "d_k", "d_v", "d_erase", "d_beta", "d_decay")


class Job(ctypes.Structure):
    """The arguments of one call; the layout is the struct in native_chunk.h."""

    _fields_ = [
        *((name, ctypes.c_long) for name in _NUMBERS),
        ("scale", ctypes.c_double),
        ("offsets", ctypes.c_void_p),
        *((name, View) for name in _INPUTS),
        *((name, ctypes.c_void_p) for name in ("bonus", "state", "kept")),
        *((name, View) for name in _GRADIENTS),
        *((name, ctypes.c_void_p) for name in ("d_bonus", "d_state")),
    ]


def reasons(call: Any) -> list[str]:
    """Why C++ cannot or should not run a call of linear attention or the delta rule."""
    found = unsuitable(call.v, call.sizes)
    if not getattr(call, "causal", True):
        found.append("causal=False is not supported")
    return found or [*_unavailable(), *_idle(call.sizes[-1] * call.sizes[3])]


def unsuitable(like: Tensor, sizes: Sequence[int]) -> list[str]:
    """Reasons against a call by its device, dtype and sizes."""
    found = []
    if like.device.type not in ("cpu", "meta"):
        found.append(f"it runs on the CPU, the tensors are on {like.device.type}")
    if like.dtype not in DTYPES:
        found.append(f"{arguments.short(like.dtype)} is not supported")
    if 0 in sizes:
        found.append("there is nothing to compute: a size is 0")
    return found


def unavailable() -> list[str]:
    """Why there is no library, [] if there is one; the first call builds it."""
    return list(_unavailable())


@constant
def _unavailable() -> tuple[str, ...]:
    built = _build()
    return (built,) if isinstance(built, str) else ()


@constant
def _threads() -> int:
    return torch.get_num_threads()


def _idle(heads: int) -> tuple[str, ...]:
    """A head is computed by one thread; with too few heads, torch's multithreaded matmuls are faster."""
    threads = _threads()  # `heads` may be a SymInt, so only this is marked constant
    if 2 * heads >= threads:
        return ()
    few = "" if torch.compiler.is_compiling() else f"{heads} "  # formatting a SymInt would specialize the graph on it
    return (f"{few}heads and rows would keep {few}of {threads} threads busy",)


def _extensions() -> ModuleType:
    """torch.utils.cpp_extension, which checks for a GPU when it is imported: here through NVML.

    Through CUDA's runtime, forks of this process could not use CUDA any more.
    """
    was_set = _BY_NVML in os.environ
    os.environ.setdefault(_BY_NVML, "1")
    try:
        return importlib.import_module("torch.utils.cpp_extension")
    finally:
        if not was_set:
            del os.environ[_BY_NVML]


@functools.cache
def _build() -> ctypes.CDLL | str:
    """The library, or why there is none. One thread builds it; those that ask meanwhile wait for it."""
    with _BUILDING.setdefault(os.getpid(), threading.Lock()):
        return _built()


@functools.cache
def _built() -> ctypes.CDLL | str:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"it is written for x86-64 Linux, this is {platform.machine()} {platform.system()}"
    capability = torch.backends.cpu.get_cpu_capability()
    flags = _FLAGS.get(capability)
    if flags is None:
        return "it needs AVX2 or AVX-512"
    if capability == "AVX512" and "bf16" in isa():
        flags = [*flags, "-mavx512bf16"]
    for tool in ("c++", "ninja"):
        if shutil.which(tool) is None:
            return f"there is no {tool} to build it with"
    sources = sorted([*_HERE.glob("native*.cpp"), *_HERE.glob("native*.h")])
    text = " ".join(flags) + "".join(source.read_text() for source in sources)
    name = f"foci_recurrences_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    ready = _folder() / f"{name}.so"
    try:
        if not ready.exists():
            _compile(name, flags, ready)
        return ctypes.CDLL(str(ready))
    except (RuntimeError, OSError) as error:
        return f"it could not be built: {str(error).splitlines()[0]}"


def _folder() -> Path:
    """Torch's extensions folder, which its own environment variable moves, as where home is read-only."""
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or _extensions().get_default_build_root()).absolute()


def _compile(name: str, flags: list[str], ready: Path) -> None:
    """Build in a temporary folder and move the library into place atomically: a killed build leaves no lock."""
    ready.parent.mkdir(parents=True, exist_ok=True)
    with _one_process(ready.with_suffix(".lock")), tempfile.TemporaryDirectory(dir=ready.parent) as place:
        if ready.exists():  # another process built it meanwhile
            return
        made = _extensions().load(
            name,
            [str(_HERE / "native.cpp")],
            extra_cflags=["-O3", "-std=c++17", "-fopenmp", "-mfma", "-mf16c", *flags],
            build_directory=place,
            is_python_module=False,
        )
        os.replace(str(made), ready)


@contextmanager
def _one_process(path: Path) -> Iterator[None]:
    """Within it no other process is. The lock is the system's, which releases it when a process is killed.

    In a folder of several users that of another cannot be written, and is shared: it waits for the other's build alone.
    """
    import fcntl

    of_another = path.exists() and not os.access(path, os.W_OK)
    with path.open("r" if of_another else "w") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_SH if of_another else fcntl.LOCK_EX)
        except OSError as error:  # a file system without locks: each builds its own, and the last one stays
            warnings.warn(f"{path} cannot be locked ({error}): processes build foci's C++ side by side", stacklevel=2)
        yield


def kept(call: Any) -> Output:
    """The state at the start of every span of 64 tokens; for the delta rule, followed by the errors of its tokens.

    The count allows each sequence to end within a span, packed or not, plus two (ops/slabs.py: kept).
    """
    B, T, _, H, K, V, N = call.sizes
    spans = B * (1 + T // _SPAN) if call.offsets is None else T // _SPAN + N
    return Output("kept", (2 + spans, H, K + (_SPAN if _delta(call) else 0), V), torch.float32)


def forward(call: Any, keep: bool = False) -> tuple[Tensor, ...]:
    """out [B,T,H,V] in v's dtype and the final state [call.ends,H,K,V]; `keep`: and what `kept` declares."""
    out, final = torch.empty_like(call.v, memory_format=torch.contiguous_format), initial(call)
    job, alive = _job(call, final)
    job.out = _view(out)
    states = kept(call).empty(call.v) if keep else None
    job.kept = pointer(states)
    _run(call, "forward", job)
    del alive
    given = out, arguments.ends(call, final)
    return given if states is None else (*given, states)


def backward(
    call: Any, outputs: Sequence[Tensor], grads: Sequence[Tensor | None], needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients in the order of the operator's differentiable arguments, None where not needed."""
    B, T, _, H, K, V, N = call.sizes
    names = ("q", "k", "v", *(("beta", "log_decay", "erase") if _delta(call) else ("log_decay", "bonus")), "state")
    needed = {name for name, need in zip(names, needs, strict=True) if need}
    d_state = initial(call._replace(state=grads[1]))
    job, alive = _job(call, d_state)
    job.kept, job.d_state = pointer(outputs[2]), pointer(d_state)
    d_out = torch.zeros_like(call.v) if grads[0] is None else rows(grads[0])
    made = {"q": (K,), "k": (K,), "v": (V,), "beta": (), "erase": (K,), "log_decay": (K if job.per_channel else 1,)}
    found = {
        name: torch.empty(B, T, H, *width, dtype=torch.float32, device="cpu")
        for name, width in made.items()
        if getattr(call, name, None) is not None and (name in needed or name != "log_decay")
    }
    job.d_out = _view(d_out)
    for name, gradient in found.items():
        setattr(job, "d_decay" if name == "log_decay" else f"d_{name}", _view(gradient))
    if "bonus" in needed:
        found["bonus"] = torch.zeros(N * H, K, dtype=torch.float32, device="cpu")
        job.d_bonus = pointer(found["bonus"])
    _run(call, "backward", job)
    del alive
    if "bonus" in needed:
        found["bonus"] = found["bonus"].view(N, H, K).sum(0)
    found["state"] = d_state
    return tuple(_reduced_like(getattr(call, name), found[name]) if name in needed else None for name in names)


def can_step(state: Tensor) -> bool:
    """Whether `step` can update this state: contiguous float32 on the CPU, and no trace, mode or transform."""
    if not arguments.alone(state) or state.device.type != "cpu" or state.dtype != torch.float32:
        return False
    return state.is_contiguous() and state.numel() > 0 and max(state.shape[2:]) <= 4096 and not _unavailable()


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    scale: float,
    *,
    beta: Tensor | None = None,
    log_decay: Tensor | None = None,
    erase: Tensor | None = None,
    bonus: Tensor | None = None,
) -> Tensor:
    """One token for each row: out [B,H,V] float32; `state` [B,H,K,V] is changed in place.

    The new state is not read again: S_t^T q follows from S_{t-1}^T q, the value written, and q . k.
    """
    (B, G, K), (H, V) = q.shape, v.shape[1:]
    named = {"q": q, "k": k, "v": v, "beta": beta, "erase": erase}
    made = {name: None if x is None else rows(x.float()) for name, x in named.items()}
    decay = None if log_decay is None else rows(log_decay.float()).expand(B, H, -1)
    bonus = None if bonus is None else bonus.float().contiguous()
    out = torch.empty(B, H, V, dtype=torch.float32, device="cpu")
    job = Job(
        B=B, T=1, G=G, H=H, K=K, V=V, N=B, own=bonus is None, threads=torch.get_num_threads(), scale=scale,
        per_channel=decay is not None and decay.shape[2] > 1, decay=_token(decay), bonus=pointer(bonus),
        state=pointer(state), out=_token(out), **{name: _token(x) for name, x in made.items()},
    )  # fmt: skip
    getattr(library(), f"foci_{'linear' if beta is None else 'delta'}_step")(ctypes.byref(job))
    torch.autograd.graph.increment_version(state)
    return out


def _token(x: Tensor | None) -> View:
    return View() if x is None else View(x.data_ptr(), x.stride(0), 0, x.stride(1))


def _reduced_like(x: Tensor, gradient: Tensor) -> Tensor:
    """The gradient in the shape and dtype of an argument, summed over shared heads and broadcast dimensions."""
    if gradient.dim() == x.dim() == 4 and x.shape[2] not in (1, gradient.shape[2]):
        gradient = gradient.unflatten(2, (x.shape[2], -1)).sum(3)
    return gradient.sum_to_size(x.shape).to(x.dtype)


def _delta(call: Any) -> bool:
    return hasattr(call, "beta")


def _run(call: Any, way: str, job: Job) -> None:
    getattr(library(), f"foci_{'delta' if _delta(call) else 'linear'}_{way}")(ctypes.byref(job))


def library() -> ctypes.CDLL:
    library = _build()
    assert isinstance(library, ctypes.CDLL)
    return library


def _job(call: Any, state: Tensor) -> tuple[Job, list[Tensor | None]]:
    """The call as a Job, and the tensors that must stay alive while it runs."""
    B, T, G, H, K, V, N = call.sizes
    q, k, v = (rows(x) for x in call[:3])
    erase, beta, bonus, offsets = (getattr(call, name, None) for name in ("erase", "beta", "bonus", "offsets"))
    erase = None if erase is None else rows(erase)
    beta = None if beta is None else beta.float()
    bonus = None if bonus is None else bonus.float().contiguous()
    decay = None if call.log_decay is None else rows(call.log_decay.float()).expand(B, T, -1, -1)
    if offsets is not None:
        arguments.documents("delta_rule" if _delta(call) else "linear_attention", offsets, T)
        offsets = offsets.long().contiguous()
    job = Job(
        B=B, T=T, G=G, H=H, K=K, V=V, N=N, dtype=DTYPES[v.dtype], own=bonus is None, threads=torch.get_num_threads(),
        per_channel=decay is not None and decay.shape[3] > 1, scale=call.scale, offsets=pointer(offsets),
        q=_view(q), k=_view(k), v=_view(v), erase=_view(erase), beta=_view(beta), decay=_view(decay),
        bonus=pointer(bonus), state=pointer(state),
    )  # fmt: skip
    return job, [q, k, v, erase, beta, bonus, decay, offsets]


def rows(x: Tensor) -> Tensor:
    """The tensor with its last dimension contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _view(x: Tensor | None) -> View:
    return View() if x is None else View(x.data_ptr(), *x.stride()[:3])


def pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
