"""ShapeError(ValueError), Unsupported(NotImplementedError) carrying its list of reasons, MissingExtra(ImportError)."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType


class ShapeError(ValueError):
    """Tensors whose sizes do not fit together, or an argument of the wrong size: it names both."""


class Unsupported(NotImplementedError):
    """A correct call that a backend cannot run.

    `what` begins the sentence ("attention: backend 'cudnn' cannot run this call"), `reasons` says why, one clause each,
    and `hint` what would work instead. The reasons stay a list, so that a program can read them.
    """

    def __init__(self, what: str, reasons: Sequence[str] = (), hint: str = "") -> None:
        self.what = what
        self.reasons = list(reasons)
        self.hint = hint
        lines = [what + ":" * bool(reasons), *(f"  - {reason}" for reason in self.reasons)]
        super().__init__("\n".join([*lines, f"  {hint}"] if hint else lines))

    def __reduce__(self) -> tuple[type[Unsupported], tuple[str, list[str], str]]:
        # Otherwise exceptions pickle as their printed text, and a subprocess would lose the reasons.
        return type(self), (self.what, self.reasons, self.hint)


class MissingExtra(ImportError):
    """A package that foci needs only for this, and that is not installed: it names the extra to install."""


def require(package: str, extra: str) -> ModuleType:
    """Import and return `package` (a dotted name will do), or raise MissingExtra naming `pip install 'foci[extra]'`.

    A package that is there but fails to import raises its own error: that one is not about a missing extra.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        root = package.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != root:
            raise
        message = f"this needs {root}, which is not installed: pip install 'foci[{extra}]'"
        raise MissingExtra(message, name=root) from error
