"""Casts of weights that autocast holds over a step: a plan has them once, however many micro-batches it keeps."""
from __future__ import annotations

import torch
from torch.nn.functional import mse_loss

from tests.pipe.budget.models import SIZE, wide
from torchckpt import Pipe


def reported(device, steps_in_one):
    """Of ``Pipe.step``, so many of which are in one autocast."""
    pipe = Pipe(wide().to(device), [3, 3], [device] * 2, 4, budget="1GB")
    x = torch.randn(4 * 4, SIZE).to(device)
    for _ in range(4 // steps_in_one):
        with torch.autocast(device.type, torch.bfloat16):
            for _ in range(steps_in_one):
                pipe.zero_grad()
                pipe.step(x, target=x, loss_fn=lambda y, target: mse_loss(y.float(), target))
    return pipe.report()


def test_casts_are_planned_once(device):
    report = reported(device, 1)
    for measured, planned in zip(report.measured_peak_bytes, report.planned_peak_bytes):
        assert measured <= planned <= 1.12 * measured


def test_a_step_is_counted_with_its_casts_though_they_were_there_before(device):
    first, second = (reported(device, count) for count in (1, 4))  # the third one shows what the plan takes
    assert first.planned_peak_bytes == second.planned_peak_bytes
    assert first.measured_peak_bytes == second.measured_peak_bytes
