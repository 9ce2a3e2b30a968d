"""A short soak, and that what grows is found."""
from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.distributed.ranks import one_rank
from tests.faults import soak
from tests.faults.soak import Amounts, grows
from tests.faults.tools import TOOLS
from tests.regions.moved.calls import let_cpu_move
from tests.settings import with_gloo
from tests.slow import few, slow_but

TYPICAL = ("checkpoint, keep, nested", "offload_layers", "Pipe(budget=).step", "recompute_ahead(budget=)")
QUICK = [(name, 33) for name in TYPICAL]
"""Each is most of what others are."""


@few(1)
@with_gloo
@pytest.mark.parametrize(("name", "steps"), slow_but(QUICK, product(TOOLS, [33, 55])))
def test_a_short_soak_is_flat(name: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    let_cpu_move(monkeypatch)
    torch.manual_seed(0)
    with one_rank():
        looks = soak.soak(TOOLS[name].make(2), steps)
    assert [text for text in grows(looks) if not text.startswith(("kilobytes", "seconds"))] == []


def test_what_grows_is_found() -> None:
    flat = [Amounts(1000, 5000, 40, 1.0)] * 10
    assert grows(flat) == []
    for name, step in (("kilobytes", 6000), ("objects", 300), ("tensors", 1), ("seconds", 2.0)):
        looks = [one._replace(**{name: getattr(one, name) + (n > 4) * step}) for n, one in enumerate(flat)]
        assert len(grows(looks)) == 1, name


def test_a_tensor_that_each_step_keeps_is_found() -> None:
    kept = []

    class Leaking:
        def step(self) -> None:
            kept.append(torch.ones(3))

    assert any(text.startswith("tensors: ") for text in grows(soak.soak(Leaking(), 110)))
