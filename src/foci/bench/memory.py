"""The most memory that a run holds at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


def peak_memory(run: Callable[[], object], device: torch.device) -> int:
    """Most bytes of tensors that one run holds at once beyond what was there before.

    On the CPU without the scratch memory inside kernels.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
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
