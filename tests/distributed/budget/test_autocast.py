"""Casts of weights that autocast holds over all micro-batches: a plan has them once, however many it keeps."""
from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from tests.distributed.stages import parameters_of, schedule_on, stages_of, step
from tests.settings import with_gloo
from tests.slow import slow
from torchckpt import checkpoint_module
from torchckpt.distributed import recompute_ahead

pytestmark = [with_gloo, pytest.mark.usefixtures("alone")]

SIZE, ROWS, MICRO_BATCHES = 64, 32, 4


class Stage(nn.Module):
    """Blocks whose weights have more bytes than what is saved of their few rows. ``inside``: autocast is there."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.blocks = nn.Sequential(*(
                nn.Sequential(nn.Linear(SIZE, 2 * SIZE), nn.GELU(), nn.Dropout(0.2), nn.Linear(2 * SIZE, SIZE))
                for _ in range(3)
            ))
        for block in self.blocks:
            checkpoint_module(block)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16) if self.inside else nullcontext():
            return self.blocks(x).float()


def reported(name, is_around, budget, steps_in_one=1, evaluates=False):
    """``steps_in_one``: how many are in one autocast, as those whose gradients are added up."""
    stages = stages_of(name, lambda index: Stage(not is_around))
    schedule = recompute_ahead(schedule_on(stages, name, MICRO_BATCHES), budget=budget)
    batch = torch.randn(2, MICRO_BATCHES * ROWS, SIZE)
    for _ in range(6 // steps_in_one):
        with torch.autocast("cpu", torch.bfloat16) if is_around else nullcontext():
            if evaluates:
                schedule.eval(batch[0], target=batch[1])
        with torch.autocast("cpu", torch.bfloat16) if is_around else nullcontext():
            for _ in range(steps_in_one):
                for parameter in parameters_of(stages):
                    parameter.grad = None
                step(schedule, stages, *batch)
    return schedule.report()


@pytest.mark.parametrize("is_around", [True, False], ids=["around the step", "inside of the stage"])
@pytest.mark.parametrize("name", ["ScheduleGPipe", *slow(["ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"])])
def test_casts_of_weights_are_planned_as_often_as_they_are_there(name, is_around):
    for budget in ("1GB", "85%"):
        report = reported(name, is_around, budget)
        (measured,), (planned,) = report.measured_peak_bytes, report.planned_peak_bytes
        assert measured <= planned <= 1.15 * measured, budget


@pytest.mark.parametrize("otherwise", [{"steps_in_one": 2}, {"evaluates": True}], ids=str)
def test_a_step_is_counted_with_its_casts_though_they_were_there_before(otherwise):
    reports = [reported("ScheduleGPipe", True, "1GB", **options) for options in ({}, otherwise)]
    first, second = ([*report.planned_peak_bytes, *report.measured_peak_bytes] for report in reports)
    assert first == second
