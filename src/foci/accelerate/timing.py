"""Time and memory of the original and the accelerated model, interleaved so that the machine's moods hit both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

Run = Callable[[], Any]
_SHORT = 1.0


def clock(run: Run) -> float:
    """Seconds of one run, the accelerator's queue included."""
    _finish()
    start = time.perf_counter()
    run()
    _finish()
    return time.perf_counter() - start


def interleave(
    run: Run, changed: Callable[[], AbstractContextManager[Any]], *, pairs: int = 11, seconds: float = 20.0
) -> dict[str, Any]:
    """Run something as it is and under `changed()` in turn, `pairs` times (3 at least, when they take long).

    Each pair gives one ratio, original / changed, so slow drift cancels; the order changes from pair to pair. The
    record has the seconds of every run, their medians, the median ratio and the middle half of the ratios.
    """
    times: tuple[list[float], list[float]] = ([], [])
    while len(times[0]) < pairs and (len(times[0]) < 3 or sum(map(sum, times)) < seconds):
        for place in (0, 1) if len(times[0]) % 2 == 0 else (1, 0):
            with changed() if place else nullcontext():
                if not times[place] or times[place][-1] < _SHORT:
                    run()  # after a change of hands: caches warm
                times[place].append(clock(run))
    ratios = sorted(a / b for a, b in zip(*times, strict=True))
    return {
        "original": times[0],
        "changed": times[1],
        "original_median": statistics.median(times[0]),
        "changed_median": statistics.median(times[1]),
        "ratio": statistics.median(ratios),
        "ratio_low": ratios[round((len(ratios) - 1) * 0.25)],
        "ratio_high": ratios[round((len(ratios) - 1) * 0.75)],
        "pairs": len(ratios),
        "threads": torch.get_num_threads(),
    }


def peak_memory(run: Run, device: torch.device) -> int:
    """Most bytes of tensors that one run holds at once beyond what was there before.

    On the CPU without the scratch memory inside kernels.
    """
    if device.type == "cuda":
        _finish()
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        _finish()
        return torch.cuda.max_memory_allocated(device) - before
    with _Alive() as alive:
        run()
    return alive.peak


class _Alive(TorchDispatchMode):
    """Counts the bytes of the storages that operators make, for as long as each lives.

    torch.profiler would count scratch inside kernels too, but writes lines of its own to the terminal.
    """

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            self._meet(tensor, was_there=True)
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            self._meet(tensor, was_there=False)
        self.known = {key: entry for key, entry in self.known.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.known.values()))
        return result

    def _meet(self, tensor: Tensor, *, was_there: bool) -> None:
        storage = tensor.untyped_storage()
        seen = self.known.get(storage._cdata)
        if seen is None or seen[0].expired():
            self.known[storage._cdata] = StorageWeakRef(storage), 0 if was_there else storage.nbytes()


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, list | tuple):
        return []
    return [tensor for part in tree for tensor in _tensors(part)]


def _finish() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
