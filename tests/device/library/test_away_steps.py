"""Planned steps with a host, run on simulated devices: their seconds, bytes, waits and bits are those of the plan."""
from __future__ import annotations

import gc
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.device import Rates
from tests.slow import slow
from torchckpt import checkpoint
from torchckpt.distributed.moving import AllMoved, Boundaries
from torchckpt.planning import Block, Host, Kind, Link, Stage, one_f_one_b
from torchckpt.planning.plan import plan_pipeline
from torchckpt.regions.flags import local
from torchckpt.regions.moved.copies import copies_of

ROWS, WIDTH, HIDDEN, BLOCKS, MICRO_BATCHES = 4096, 8, 64, 8, 6  # what tanh returns has 1 MiB, and goes
FORWARD_SECONDS = 0.005
INPUT_BYTES = ROWS * WIDTH * 4
SAVED_BYTES = INPUT_BYTES + ROWS * HIDDEN * 4 + ROWS * WIDTH  # the input, what tanh returns, the mask of the dropout
FLOPS = 2 * 2 * ROWS * WIDTH * HIDDEN


class Part(nn.Module):
    """Its backward takes twice as long as its forward."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return x + F.dropout(self.second(torch.tanh(self.first(x))), 0.1)


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(BLOCKS))

    def forward(self, x):
        for part in self.parts:
            x = checkpoint(part, x)
        return x


class Pipeline:
    """A pipeline of one process, whose ranks are simulated devices. It runs any plan of 1F1B, block by block."""

    def __init__(self, sim, p, copy):
        """``copy``: seconds of the copy of a block one way, over those of its forward."""
        torch.manual_seed(0)
        self.sim, self.p = sim, p
        self.devices = [torch.device("sim", rank) for rank in range(p)]
        self.stages = [Parts().to(device) for device in self.devices]
        self.inputs = [torch.randn(ROWS, WIDTH, device="sim:0", requires_grad=True) for _ in range(MICRO_BATCHES)]
        self.wires = [[torch.Stream(device) for _ in range(4)] for device in self.devices]
        self.link = SAVED_BYTES / (copy * FORWARD_SECONDS)
        self.rates = Rates(flops_per_second=FLOPS / FORWARD_SECONDS, link_bytes_per_second=self.link)
        self.going = [self._sent(stage, device) for stage, device in zip(self.stages, self.devices)]
        block = Block(*[FORWARD_SECONDS] * 4, SAVED_BYTES, INPUT_BYTES)
        self.blocks = [
            Stage(tuple(replace(block, moved_bytes=sum(each.values())) for each in of_stage), message_bytes=INPUT_BYTES)
            for of_stage in self.going
        ]
        self.schedule = one_f_one_b(p, MICRO_BATCHES)

    def _sent(self, stage, device):
        scope, x = AllMoved(), torch.randn(ROWS, WIDTH, device=device, requires_grad=True)
        with scope.entered():
            y = stage(x)
        assert y.grad_fn is not None
        return scope.sent()

    def plan(self, budget, host=True):
        link = Link(bandwidth=self.link)
        beside = Host(1e9, out=self.link) if host else None
        return plan_pipeline(self.schedule, self.blocks, budget, link, host=beside)

    def run(self, plan, rates=None):
        """The seconds of a step by the clock of the devices; its gradients; the peak of each device; waits for copies.
        """
        for device, stage in zip(self.devices, self.stages):
            stage.zero_grad()
            copies_of(device).waits = []
        local.thread.order = None
        gc.collect()
        self.sim.synchronize()
        torch.manual_seed(1)
        before = [torch.accelerator.memory_allocated(device) for device in self.devices]
        self._scopes, self._alive, self._messages, self._levels = {}, {}, {}, [[] for _ in self.devices]
        boundaries = [Boundaries(plan, rank) for rank in range(self.p)]
        with self.sim.durations(rates or self.rates), self.sim.record() as ran, self.sim.prepared():
            for device in self.devices:
                torch.accelerator.reset_peak_memory_stats(device)
            queues = [list(order) for order in plan.schedule.ranks]
            while any(queues):
                for rank, queue in enumerate(queues):
                    while queue and self._is_ready(queue[0]):
                        self._act(plan, boundaries[rank], queue.pop(0))
        peaks = [torch.accelerator.max_memory_allocated(each) - least for each, least in zip(self.devices, before)]
        seconds = max(each.end_seconds for each in ran) - min(each.start_seconds for each in ran)
        waited = [copies_of(device).waited_seconds() for device in self.devices]
        gradients = [parameter.grad.cpu() for stage in self.stages for parameter in stage.parameters()]
        return seconds, gradients, peaks, waited

    def _is_ready(self, action):
        stage, kind, i = action
        first = 0 if kind is Kind.FORWARD else self.p - 1
        return kind is Kind.RECOMPUTE or stage == first or (stage, kind, i) in self._messages

    def _act(self, plan, boundaries, action):
        stage, kind, i = action
        torch.accelerator.set_device_index(stage)
        boundaries.begins(action)
        if kind is Kind.FORWARD:
            self._forward(plan, boundaries, stage, i)
        elif kind is Kind.RECOMPUTE:
            scope, early = self._scopes[stage, i], plan.step.choice((stage, i)).early
            for frame in [frame for number, frame in zip(scope.numbers, scope.frames) if number in early][::-1]:
                frame.recompute()
        else:
            self._backward(stage, i)

    def _forward(self, plan, boundaries, stage, i):
        x = self.inputs[i] if stage == 0 else self._received(stage, Kind.FORWARD, i).requires_grad_()
        choice = plan.step.choice((stage, i))
        scope = boundaries.scope(choice, self.going[stage], lambda *_: nullcontext(), (stage, i))
        with scope.entered():
            y = self.stages[stage](x)
        self._scopes[stage, i], self._alive[stage, i] = scope, (x, y)
        if stage < self.p - 1:
            self._send(stage, stage + 1, Kind.FORWARD, i, y.detach())

    def _backward(self, stage, i):
        x, y = self._alive.pop((stage, i))
        gradient = torch.ones_like(y) if stage == self.p - 1 else self._received(stage, Kind.BACKWARD, i)
        del self._scopes[stage, i]
        torch.autograd.backward(y, gradient, inputs=[x, *self.stages[stage].parameters()])
        if stage:
            self._send(stage, stage - 1, Kind.BACKWARD, i, x.grad)
        x.grad = None

    def _send(self, sender, taker, kind, i, tensor):
        wire, end = self.wires[sender][taker > sender], self.wires[taker][2 + (taker > sender)]
        wire.wait_stream(torch.accelerator.current_stream(self.devices[sender]))
        with wire, end:  # a copy waits for the streams that are current on both devices, which then wait for it
            came = tensor.to(self.devices[taker], non_blocking=True)
            event = end.record_event()
        tensor.record_stream(wire)
        self._messages[taker, kind, i] = came, event

    def _received(self, stage, kind, i):
        tensor, event = self._messages.pop((stage, kind, i))
        current = torch.accelerator.current_stream(self.devices[stage])
        current.wait_event(event)
        tensor.record_stream(current)
        return tensor


FEW, SLOW = [(4, 1.0)], [(2, 0.5), (4, 2.0), (2, 1.0), (2, 2.0), (4, 0.5)]


@pytest.fixture(scope="module", params=[*FEW, *slow(SLOW)], ids=str)
def pipeline(request, simulator):
    return Pipeline(simulator, *request.param)


@pytest.fixture(scope="module")
def steps(pipeline):
    """What keeps all, what recomputes within 30 % of the memory, and what may send blocks away, too."""
    plans = [pipeline.plan("100%", host=False), pipeline.plan("30%", host=False), pipeline.plan("30%")]
    return [(plan, *pipeline.run(plan)) for plan in plans]


def test_a_step_takes_the_seconds_of_its_plan(steps):
    keeping, recomputing, away = steps
    assert away[0].moves
    for plan, seconds, *_ in steps:
        assert seconds == pytest.approx(plan.step_seconds, rel=0.02)
    assert away[1] < recomputing[1]
    if away[0].step_seconds <= keeping[0].step_seconds * (1 + 1e-9):
        assert away[1] <= 1.02 * keeping[1]


def test_where_copies_are_fast_nobody_waits_for_them(pipeline, steps):
    plan, *_, waited = steps[2]
    copied_seconds = sum(event.end_seconds - event.start_seconds for event in plan.timeline.copies)
    if pipeline.p > 2 and pipeline.link >= SAVED_BYTES / FORWARD_SECONDS:  # with two ranks, 30 % are few blocks
        assert sum(waited) <= 0.02 * copied_seconds


def test_gradients_are_equal_to_the_bit(steps):
    for *_, gradients, _, _ in steps[1:]:
        assert all(map(torch.equal, gradients, steps[0][2]))


def test_peaks_are_those_of_the_plan_and_what_operators_take(steps):
    (_, *_), (recompute, _, _, recomputing, _), (both, _, _, away, _) = steps
    for rank, budget in enumerate(both.problem.budget_bytes):
        assert both.peak_bytes[rank] <= budget
        operators = recomputing[rank] - recompute.peak_bytes[rank]
        assert abs(away[rank] - both.peak_bytes[rank] - operators) < 0.25 * SAVED_BYTES


def test_slow_copies_cost_seconds_and_no_bytes(pipeline, steps):
    plan, seconds, gradients, peaks, _ = steps[2]
    slow = pipeline.rates._replace(link_bytes_per_second=pipeline.link / 4)
    slower, same, levels, _ = pipeline.run(plan, slow)
    assert slower > seconds
    assert levels == peaks
    assert all(map(torch.equal, same, gradients))


def test_whatever_is_late_bits_and_bytes_are_the_same(sim, pipeline, steps):
    plan, _, gradients, peaks, _ = steps[2]
    with sim.delays(seed=1, most_seconds=0.002, share=0.3):
        _, same, levels, _ = pipeline.run(plan)
    assert levels == peaks
    assert all(map(torch.equal, same, gradients))
