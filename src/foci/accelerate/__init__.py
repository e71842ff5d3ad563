"""The main job: take a model, find its attention, plan, prove, time, compile if it pays, report."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    """`foci.accelerate(model, example_inputs)` calls the room; its modules stay importable under the same name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from foci.accelerate.run import accelerate

        return accelerate(*args, **kwargs)

    @property
    def __signature__(self) -> Any:
        import inspect

        from foci.accelerate.run import accelerate

        return inspect.signature(accelerate)


sys.modules[__name__].__class__ = _Room
