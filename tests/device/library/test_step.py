"""``Pipe.step`` on simulated devices, by the clock of the devices: who waits for what, and for nothing else."""
from __future__ import annotations

import pytest
import torch
from torch import nn

import torchckpt
from tests.device import Rates
from torchckpt.planning import Block, Kind, Link, one_f_one_b, simulate

FORWARD = "aten::tanh"


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return torch.tanh(x * self.weight)


def forwards(sim, p, m):
    """When each stage began its forwards, in milliseconds: they take two, a copy one, a backward nothing."""
    stages = nn.Sequential(*(Stage() for _ in range(p)))
    pipe = torchckpt.Pipe(stages, [1] * p, [f"sim:{stage}" for stage in range(p)], chunks=m, checkpoint="never")
    x, target = torch.ones(m, 2, device="sim:0"), torch.ones(m, 2, device=f"sim:{p - 1}")
    sim.synchronize()
    sim.reset_counts()
    with sim.durations(Rates(seconds_per_copy=0.001), {FORWARD: 0.002}), sim.record() as ran, sim.prepared():
        pipe.step(x, target, loss_fn=lambda output, target: (output * target).sum())
    assert sim.counts().synchronous == {}
    began = [[one.start_seconds for one in ran if (one.device, one.operator) == (stage, FORWARD)] for stage in range(p)]
    return [[round((one - began[0][0]) * 1e3, 3) for one in each] for each in began]


def on_paper(p, m):
    timeline = simulate(one_f_one_b(p, m), Block(0.002, 0.0, 0.0), Link(0.001))
    events = [event for event in timeline.events if event.action.kind is Kind.FORWARD]
    return [[round(event.start_seconds * 1e3, 3) for event in events if event.rank == rank] for rank in range(p)]


def test_a_stage_waits_for_its_message_and_not_for_the_one_behind_it(sim):
    """The host has queued the copy after 0F1 by the time it starts 1F0, which used to wait for that copy too."""
    assert forwards(sim, 2, 4) == [[0, 2, 6, 8], [3, 5, 9, 11]]


@pytest.mark.parametrize(("p", "m"), [(2, 5), (3, 3), (3, 6), (4, 4)])
def test_stages_start_when_the_model_of_the_schedule_says(sim, p, m):
    assert forwards(sim, p, m) == on_paper(p, m)
