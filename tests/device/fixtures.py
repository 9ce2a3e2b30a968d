"""Fixtures of tests that run on the simulated device. A ``conftest.py`` has them by importing from here."""
from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.device import Simulator, load, why_not

__all__ = ["sim", "simulator"]


@pytest.fixture(scope="session")
def simulator() -> Simulator:
    """The simulated devices of this process. Skips where there is no compiler to build them with."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    return load()


@pytest.fixture
def sim(simulator: Simulator) -> Iterator[Simulator]:
    """The same, idle and with nothing set; what fails in a stream of its devices fails the test."""
    simulator.reset()
    yield simulator
    simulator.reset()
    simulator.synchronize()
