"""Generators: notice that a traced forward draws random numbers in Python, or sets a generator of torch."""
from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torchckpt.errors import CaptureError, Fault
from torchckpt.graph.private.operators import is_random

__all__ = ["Generators"]

_FIRST_SEED = 0x7C1B_0000_0000_0001


class Generators:
    """Refuses a forward whose random numbers a trace would freeze, or draw in another order.

    A trace draws nothing. So the CPU's generator is free to count: its seed is the number of random operations so far.
    A forward that seeds it, or puts an earlier state back, is noticed at the next random operation, or at the end.
    """

    def __init__(self) -> None:
        self._seed = _FIRST_SEED

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Run a forward inside this context. The generator of torch is afterwards as it was before.

        Raises:
            CaptureError: the forward drew a number of Python or NumPy, or set a generator of torch.
        """
        cpu, before = torch.default_generator, torch.default_generator.get_state()
        others, self._seed = _states(), _FIRST_SEED
        cpu.manual_seed(self._seed)
        try:
            yield
            self._check()
        finally:
            cpu.set_state(before)
        for name, state in _states().items():
            if others.get(name, state) != state:
                rule = "the call draws random numbers that are not torch's, and would be the same in all calls"
                works = "torch.rand(()) in place of random.random(); or a number that is drawn before the call"
                raise CaptureError(str(Fault(rule, f"a forward that draws numbers of {name}", works)))

    def drawn(self, operator: Any) -> None:
        """Take note of an operator of the trace."""
        if is_random(operator):
            self._check()
            self._seed += 1
            torch.default_generator.manual_seed(self._seed)

    def _check(self) -> None:
        if torch.default_generator.initial_seed() != self._seed:
            rule = "the call sets the state of a generator, by Python code that runs in the trace alone"
            works = "torch.manual_seed(0) before the call; or numbers that are drawn before the call, as an input"
            raise CaptureError(str(Fault(rule, "a forward that seeds torch's generator, or sets its state", works)))


def _states() -> dict[str, Any]:
    """By library, the state of its generator. NumPy's are asked for if they are imported."""
    states: dict[str, Any] = {"Python's random": random.getstate()}
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        states["numpy.random"] = pickle.dumps(numpy.get_state())
    return states
