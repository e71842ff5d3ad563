"""One accelerated model of each library, shared by the tests that only look at it."""

from __future__ import annotations

import pytest

from foci.accelerate import zoo
from foci.accelerate.run import Accelerated, accelerate


@pytest.fixture(scope="session")
def bert() -> Accelerated:
    """The small BERT of the zoo, accelerated without compilation; its plan and report are what tests read."""
    subject = zoo.load("bert")
    done = accelerate(subject.model, subject.inputs, compile="off", name=subject.name, note=subject.note)
    done.restore()
    return done
