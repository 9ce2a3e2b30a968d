"""Inputs that a kept block does not save: they are in no plan."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.halves import ROWS, SIZE, Half
from tests.pipe.budget.models import WAYS, step
from tests.slow import few, slow_but
from torchckpt import Pipe


def report_of(way, budget, balance, chunks=4):
    torch.manual_seed(0)
    model = nn.Sequential(*(Half(2 * SIZE) for _ in range(sum(balance)))).bfloat16()
    pipe = Pipe(model, balance, ["cpu"] * len(balance), chunks, budget=budget)
    x = torch.randn(chunks * ROWS, SIZE, dtype=torch.bfloat16)
    for _ in range(4):
        step(pipe, x, way)
    return pipe.report()


EACH = [(way, budget, balance) for way in WAYS for budget in ("90%", "70%") for balance in ([6], [3, 3])]
PAIRS = [EACH[0], EACH[3], EACH[5], EACH[6]]  # of any two, each pair


@few(1)
@pytest.mark.parametrize(("way", "budget", "balance"), slow_but(PAIRS, EACH), ids=str)
def test_what_is_planned_is_taken(way, budget, balance):
    report = report_of(way, budget, balance)
    for measured, planned in zip(report.measured_peak_bytes, report.planned_peak_bytes):
        assert 0.96 * planned <= measured <= 1.001 * planned
    assert report.plan.recomputed_share > 0
