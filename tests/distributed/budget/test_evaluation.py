"""What stands in torch's buffers of messages before a step, as an evaluation or another step left it, is no byte of it.

``eval()`` has torch make them anew.
"""
from __future__ import annotations

import pytest
import torch

from tests.distributed.ranks import on_ranks
from tests.distributed.stages import Blocks, Stage, batch, parameters_of, schedule_on, stages_of, step
from tests.settings import with_gloo
from tests.slow import few, rarely, slow
from torchckpt.distributed import recompute_ahead
from torchckpt.planning.plan.run import fit_measured
from torchckpt.planning.plan.run.extra_memory import beside_of, highest_bytes
from torchckpt.regions.saved import bytes_of

pytestmark = with_gloo

ROWS = 16
STEPS = 6  # bytes are counted in the second and, with split backwards, the third; and in the sixth, of the plan
BEFORE = [(1,), (2,), (5,), (1, 2, 5)]
"""The steps that an evaluation comes before."""


def peaks_after(name, evaluated, device=None):
    """The planned and the measured peaks of all ranks; on a ``device``, that of the only rank, of two stages."""
    stages = stages_of(name, Blocks)
    if device is not None:
        stages = [Stage(Blocks(index).to(device), index, 2, torch.device(device)) for index in range(2)]
    schedule = recompute_ahead(schedule_on(stages, name, 4), budget="1GB")  # all is kept: other plans depend on seconds
    x, target = (tensor.to(device) for tensor in batch(4, ROWS))
    for number in range(STEPS):
        if number in evaluated:
            inputs = (x,) if any(stage.is_first for stage in stages) else ()
            schedule.eval(*inputs, target=target, losses=[])
        for parameter in parameters_of(stages):
            parameter.grad = None
        step(schedule, stages, x, target)
    report = schedule.report()
    return report.planned_peak_bytes, report.measured_peak_bytes


@few(1)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("evaluated", BEFORE, ids=str)
@pytest.mark.parametrize("name", [*slow(["ScheduleInterleaved1F1B"]), "ScheduleInterleavedZeroBubble"])
def test_a_step_takes_what_it_takes_without(name, evaluated):
    assert peaks_after(name, evaluated) == peaks_after(name, ())


@few(1)
@pytest.mark.accelerator
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("evaluated", rarely(BEFORE[1:3], BEFORE), ids=str)
def test_an_allocator_says_so_too(accelerator, evaluated):
    name = "ScheduleInterleaved1F1B"
    assert peaks_after(name, evaluated, accelerator) == peaks_after(name, (), accelerator)


class Passing(Blocks):
    """Hands on a second tensor as it is: in whole backwards its gradient is a copy, and in split ones it is not."""

    def forward(self, x, y=None):
        y = x.tanh() if y is None else y
        x = super().forward(x)
        return x + y if self.blocks[0].name == "2.0" else (x, y)


@pytest.mark.accelerator
@pytest.mark.usefixtures("alone")
def test_what_steps_with_other_backwards_have_handed_over_is_no_part_of_a_step(accelerator, monkeypatch):
    measured = []
    monkeypatch.setattr(fit_measured, "beside_of", lambda *args: measured.append(beside_of(*args)) or measured[-1])
    stages = [Stage(Passing(index).to(accelerator), index, 3, accelerator) for index in range(3)]
    schedule = recompute_ahead(schedule_on(stages, "ScheduleInterleavedZeroBubble", 2), budget="1GB")
    x, target = (tensor.to(accelerator) for tensor in batch(2, 2048))
    for _ in range(STEPS):
        for parameter in parameters_of(stages):
            parameter.grad = None
        step(schedule, stages, x, target)
    planned, (beside,) = schedule.plan.step, measured
    # torch comes to the parameters of a stage in the order of a set, so gradients of a layer may be there earlier.
    early = max(bytes_of(stage.submod.parameters()) for stage in stages)
    for action, highest in zip(planned.schedule.ranks[0], highest_bytes(planned, 0, beside)):
        assert schedule._phase.levels[action].highest <= highest + early, action


def of_rank(rank):
    return [peaks_after("Schedule1F1B", evaluated) for evaluated in [(), *BEFORE]]


def test_two_ranks(tmp_path):
    for without, *after in on_ranks(of_rank, tmp_path):
        assert after == [without] * len(BEFORE)
