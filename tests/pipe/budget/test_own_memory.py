"""Blocks whose own backward takes much memory: beside blocks that are kept it comes on top of them."""
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu

from tests.pipe.budget.models import SIZE, WAYS, step
from tests.slow import slow_but
from torchckpt import BudgetInfeasible, Pipe, checkpoint

ROWS = 256


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, 8 * SIZE), nn.Linear(8 * SIZE, SIZE)

    def inner(self, x):
        return self.down(gelu(self.up(x)))

    def forward(self, x):
        return x + self.inner(x)


class Nested(Plain):
    """Saves little, and makes all that it saves in its backward."""

    def forward(self, x):
        return x + checkpoint(self.inner, x)


class Spread(nn.Module):
    """Saves little, and its backward has a large tensor of zeros; its forward has none."""

    def __init__(self):
        super().__init__()
        self.part = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        return x + self.part(x.expand(48, *x.shape)[0])


MODELS = {
    "nested": ((Plain, Nested), [2]),
    "between": ((Plain, Nested, Plain, Spread), [4]),
    "spread": ((Plain, Plain, Spread, Plain, Nested), [3, 2]),
}


def stepped(name, way, budget):
    torch.manual_seed(0)
    kinds, balance = MODELS[name]
    pipe = Pipe(nn.Sequential(*(kind() for kind in kinds)), balance, ["cpu"] * len(balance), 2, budget=budget)
    x = torch.randn(ROWS, SIZE)
    for _ in range(3):
        step(pipe, x, way)
    return pipe.report()


@pytest.mark.parametrize(
    ("name", "way"),
    slow_but([("nested", "step"), ("nested", "graph"), ("spread", "step")], [(n, w) for n in MODELS for w in WAYS]),
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
