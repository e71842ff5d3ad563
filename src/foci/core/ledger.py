"""Known-bad (library version, device, shape) combinations of foreign backends, each with its public issue.

Two kinds. A "veto" is a call that the kernel gets wrong: it is refused. A "normalised" defect is one that foci's
wrapper of the kernel corrects (an LSE in another convention, a mask of another dtype): it is recorded so that nobody
removes the correction as superfluous. `foci doctor` prints the entries that hold on this machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from foci.core.device import Platform, Version


class Use(NamedTuple):
    """What the ledger must know of one call of a foreign kernel."""

    T: int
    S: int
    G: int
    tensor_mask: bool = False
    causal: bool = False
    gradients: bool = False


def _always(use: Use) -> bool:
    return True


@dataclass(frozen=True)
class Defect:
    """One known defect: affected versions (half-open ranges, () is unbounded), the calls it affects, and its issue.

    `issue` is "owner/name#number" ("pytorch#1" for pytorch/pytorch#1), or "measured: ..." where no thread is known.
    """

    kernel: str
    kind: Literal["veto", "normalised"]
    what: str
    issue: str
    device: str = "cuda"
    capability: Version = ()
    torch: tuple[Version, Version] = ((), ())
    cuda: tuple[Version, Version] = ((), ())
    cudnn: tuple[Version, Version] = ((), ())
    when: Callable[[Use], bool] = field(default=_always, repr=False)

    def there(self, place: Platform) -> bool:
        """Whether this platform has the defect, whatever the call."""
        ranges = ((self.torch, place.torch), (self.cuda, place.cuda), (self.cudnn, place.cudnn))
        return (
            self.device == place.device
            and place.capability[: len(self.capability)] == self.capability
            and all(since <= version and (not until or version < until) for (since, until), version in ranges)
        )

    @property
    def url(self) -> str:
        """The public thread; "" where none is known."""
        project, _, number = self.issue.partition("#")
        if not number:
            return ""
        return f"https://github.com/{project if '/' in project else f'{project}/{project}'}/issues/{number}"


LEDGER: tuple[Defect, ...] = (
    Defect(
        "cudnn",
        "veto",
        "NaN dQ when S % 128 == 64 with a mask tensor and a row whose lse is below -88.7",
        "pytorch#196678",
        capability=(9, 0),
        when=lambda use: use.gradients and use.tensor_mask and use.S % 128 == 64,
    ),
    Defect(
        "cudnn",
        "veto",
        "NaN dK and dV when T == 1 and the row's lse is far below zero",
        "NVIDIA/cudnn-frontend#1072",
        capability=(9, 0),
        cudnn=((9, 26), ()),
        when=lambda use: use.gradients and use.T == 1,
    ),
    Defect(
        "cudnn",
        "veto",
        "output silently corrupt with fewer than 8 key heads",
        "pytorch#193893",
        capability=(10, 0),
        when=lambda use: use.G < 8,
    ),
    Defect(
        "cudnn",
        "veto",
        "illegal memory access in the backward before CUDA 12.9, where torch itself turns cuDNN off",
        "pytorch#169849",
        cuda=((), (12, 9)),
        when=lambda use: use.gradients,
    ),
    Defect(
        "cudnn",
        "normalised",
        "a float32 mask beside half-precision q is read as half precision: foci casts the mask to q's dtype",
        "pytorch#191612",
    ),
    Defect(
        "cudnn",
        "normalised",
        "torch keeps a plan of its backward for layouts of q, k and v, made for the first dout: others are read beside "
        "their memory (wrong gradients, illegal accesses): foci has all of them lie one way",
        "measured: torch 2.11, an H200, a small Flux by itself: gradients not finite in 10 of 15 runs, then a crash",
        torch=((2, 6), ()),
    ),
    Defect(
        "efficient",
        "veto",
        "wrong output with a mask tensor or causal past 65536 tokens",
        "pytorch#162588",
        when=lambda use: (use.tensor_mask or use.causal) and max(use.T, use.S) > 65536,
    ),
    Defect(
        "efficient",
        "normalised",
        "its lse is padded to a multiple of 32 rows: foci returns the first T",
        "feifeibear/long-context-attention#122",
    ),
    Defect(
        "cpu_flash",
        "veto",
        "a call without queries or without keys divides by zero and ends the process",
        "pytorch#141219",
        device="cpu",
        when=lambda use: use.T == 0 or use.S == 0,
    ),
    Defect(
        "cpu_flash",
        "normalised",
        "its lse is 0.0, not -inf, on a row that may see nothing: foci rewrites it",
        "measured: torch 2.13.0",
        device="cpu",
    ),
    Defect(
        "cpu_flash",
        "normalised",
        "rows whose logits are all NaN give 0 and an lse of 0 below 16 keys: foci computes such calls itself",
        "pytorch#141128",
        device="cpu",
    ),
    Defect(
        "flex",
        "veto",
        "its FLASH backend returns lse * ln 2",
        "pytorch#181645",
        torch=((), (2, 13)),
    ),
    Defect(
        "flex",
        "veto",
        "no backward on the CPU",
        "pytorch#148752",
        device="cpu",
        when=lambda use: use.gradients,
    ),
)


def in_force(place: Platform) -> tuple[Defect, ...]:
    """The entries that hold on this platform for some call: what `foci doctor` prints."""
    return tuple(defect for defect in LEDGER if defect.there(place))


def vetoes(kernel: str, use: Use, place: Platform) -> list[str]:
    """Reasons, each with its issue, why `kernel` must not run this call on this platform; [] if none is known."""
    known = _VETOES.get(kernel, ())
    # `when` first: it is cheap and nearly always false, and this runs on every call.
    return [f"ledger: {defect.what} ({defect.issue})" for defect in known if defect.when(use) and defect.there(place)]


_VETOES = {
    kernel: tuple(defect for defect in LEDGER if defect.kernel == kernel and defect.kind == "veto")
    for kernel in {defect.kernel for defect in LEDGER}
}
