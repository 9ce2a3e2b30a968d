"""Blocks whose own backward, or forward, takes much memory: beside blocks that are kept it comes on top of them."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.own_memory import Nested, Plain, Spread, Summed, SummedFirst, SummedLast
from tests.pipe.budget.models import SIZE, WAYS, step
from tests.slow import few, slow_but
from torchckpt import BudgetInfeasible, Pipe

ROWS = 256

MODELS = {
    "nested": ((Plain, Nested), [2]),
    "between": ((Plain, Nested, Plain, Spread), [4]),
    "spread": ((Plain, Plain, Spread, Plain, Nested), [3, 2]),
    "first": ((Plain, Plain, SummedFirst, SummedFirst), [3, 1]),
    "last": ((Plain, SummedLast, SummedLast, Plain), [3, 1]),
    "unsaved": ((Plain, Plain, Summed, Plain), [3, 1]),
}


def stepped(name, way, budget):
    torch.manual_seed(0)
    kinds, balance = MODELS[name]
    pipe = Pipe(nn.Sequential(*(kind(SIZE) for kind in kinds)), balance, ["cpu"] * len(balance), 2, budget=budget)
    x = torch.randn(ROWS, SIZE)
    for _ in range(3):
        step(pipe, x, way)
    return pipe.report()


@few(1)
@pytest.mark.parametrize(
    ("name", "way"),
    slow_but(
        [
            ("nested", "step"), ("nested", "graph"), ("spread", "step"), ("first", "graph"), ("last", "step"),
            ("unsaved", "step"),
        ],
        [(n, w) for n in MODELS for w in WAYS],
    ),
)
def test_a_step_takes_at_most_what_is_planned(name, way):
    with pytest.raises(BudgetInfeasible) as caught:
        stepped(name, way, 1000)
    least, kept = caught.value.least_bytes, max(stepped(name, way, "100%").budget_bytes)
    for share in (0.0, 0.3, 0.6, 0.9, 1.0):
        report = stepped(name, way, least + share * (kept - least))
        for measured, planned, budget in zip(
            report.measured_peak_bytes, report.planned_peak_bytes, report.budget_bytes
        ):
            assert measured <= 1.002 * planned, share
            assert measured <= budget * (1 + 1e-9), share
