"""Trials: a step of each variant, measured on simulated devices and computed by the simulator.

All is queued before the devices begin, so what is measured is what the devices do in the order that the library gives
them, to the microsecond and whatever else this machine does: a host that is ahead of its devices, as it should be.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import accelerator

from benchmarks.pipe.simulation.classic import Classic
from benchmarks.pipe.simulation.machines import Machine
from benchmarks.pipe.simulation.observed import MARKS, busy_seconds, done_by, step_seconds, timeline_of
from benchmarks.pipe.simulation.sizes import Sizes
from benchmarks.pipe.simulation.staged import (
    BOUNDARY_BYTES,
    VARIANTS,
    Variant,
    marked,
    on_paper,
    schedule_of,
    staged,
    stepper,
)
from benchmarks.pipe.variants import Job
from tests.device import Ran, Simulator
from torchckpt.planning import Block, Kind, Link, Timeline, simulate

__all__ = ["Cell", "Trial", "classic_seconds", "hidden", "replays_ahead", "timelines", "trials"]

_EARLY, _PLAIN = VARIANTS["GPipe, Pipe early"], VARIANTS["GPipe, none"]


@dataclass(frozen=True)
class Cell:
    """The pipeline and the machine that a step is measured on.

    Args:
        share: what a message takes, in forwards of a stage; by default what the machine's link needs.
        step_seconds: what a step without recomputation is to take, about.
    """

    machine: Machine
    stages: int
    m: int
    share: float | None = None
    step_seconds: float = 1.0

    @property
    def name(self) -> str:
        link = "its link" if self.share is None else f"link {self.share:g} tf"
        return f"{self.machine.name}, p = {self.stages}, m = {self.m}, {link}"


@dataclass(frozen=True)
class Trial:
    """A variant's step, measured and simulated."""

    measured_seconds: float
    simulated_seconds: float
    peak_bytes: list[int]
    predicted_bytes: list[int]


class Bench:
    """A cell with its model, at the pace that it is measured at."""

    def __init__(self, sim: Simulator, cell: Cell) -> None:
        self.sim, self.cell = sim, cell
        self.job: Job = staged(cell.stages, cell.m)
        self.machine, stretch = cell.machine, 1.0
        if cell.share is not None:
            forward_seconds = self._costs(self.machine, 1.0)[0].forward_seconds
            self.machine = self.machine.with_link(cell.share * forward_seconds, BOUNDARY_BYTES)
        schedule, choices = on_paper(_PLAIN, cell.stages, cell.m)
        paced = simulate(schedule, self._costs(self.machine, 1.0), self._link(1.0), choices)
        self.stretch = stretch = cell.step_seconds / paced.step_seconds
        self.costs, self.link = self._costs(self.machine, stretch), self._link(stretch)

    def _link(self, stretch: float) -> Link:
        rates = self.machine.rates(stretch)
        return Link(rates.seconds_per_copy, rates.link_bytes_per_second)

    def _costs(self, machine: Machine, stretch: float) -> list[Block]:
        """The durations of the operators of each stage, added up, a micro-batch in the mean."""
        schedule = schedule_of(_EARLY, self.cell.stages, self.cell.m)
        ran = self.record(_EARLY, machine, stretch)
        found = []
        for stage in range(self.cell.stages):
            own = [one for one in ran if one.device == stage and one.stream == 0]
            busy = busy_seconds(done_by(stage, schedule, own))
            forward, recompute, backward = (
                busy[kind] / self.cell.m for kind in (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD)
            )
            saved = 2.0 * BOUNDARY_BYTES  # no time depends on it
            costs = Block(forward, backward / 2, backward / 2, recompute, saved, BOUNDARY_BYTES)
            found.append(costs)
        return found

    def record(self, variant: Variant, machine: Machine | None = None, stretch: float | None = None) -> Sequence[Ran]:
        rates = (machine or self.machine).rates(stretch or self.stretch)
        step = stepper(self.job, variant, self.cell.m)
        step()  # afterwards shapes are known and gradients are allocated
        self.sim.synchronize()
        self.sim.reset_counts()
        with self.sim.durations(rates, MARKS), self.sim.record() as ran, self.sim.prepared():
            step()
        waited = self.sim.counts().synchronous
        assert not waited, f"{variant.name}: the host waited for {waited}"
        return ran

    def classic(self, own_streams: bool) -> Sequence[Ran]:
        """A step of torchgpipe's graph."""
        devices = [f"sim:{stage}" for stage in range(self.cell.stages)]
        pipe = Classic(marked(self.job.model), devices, self.cell.m, own_streams)
        x, target = self.job.x.to(devices[0]), self.job.target.to(devices[-1])
        for _ in range(2):
            self.sim.synchronize()
            with self.sim.durations(self.machine.rates(self.stretch), MARKS), self.sim.record() as ran:
                with self.sim.prepared():
                    self.job.loss(pipe(x), target).backward()
        pipe.close()
        return ran

    def on_paper(self, variant: Variant) -> Timeline:
        schedule, choices = on_paper(variant, self.cell.stages, self.cell.m)
        return simulate(schedule, self.costs, self.link, choices)

    def peaks(self, variant: Variant) -> list[int]:
        """Peak bytes of each device, parameters included. The backwards of all devices run in one thread: with several,
        a gradient may be allocated earlier than in the schedule."""
        devices = range(self.cell.stages)
        self.sim.synchronize()
        before = [accelerator.memory_allocated(device) for device in devices]
        step = stepper(self.job, variant, self.cell.m, is_marked=False)
        with torch.autograd.set_multithreading_enabled(False):
            step()
            self.sim.synchronize()
            for device in devices:
                accelerator.reset_peak_memory_stats(device)
            step()
        self.sim.synchronize()
        return [accelerator.max_memory_allocated(device) - before[device] for device in devices]


def trials(sim: Simulator, cell: Cell, names: Iterable[str] = VARIANTS) -> dict[str, Trial]:
    """Of each variant."""
    bench = Bench(sim, cell)
    sizes = Sizes(bench.job, cell.m)
    found = {}
    for variant in (VARIANTS[name] for name in names):
        found[variant.name] = Trial(
            step_seconds(bench.record(variant)),
            bench.on_paper(variant).step_seconds,
            bench.peaks(variant),
            sizes.predicted_bytes(variant),
        )
    return found


def hidden(found: dict[str, Trial], base: str, early: str) -> tuple[float, float]:
    """The share of late recomputation's extra time that early recomputation hides: measured, and simulated."""
    none, late, own = found[f"{base}, none"], found[f"{base}, torch.utils.checkpoint"], found[early]
    measured = (late.measured_seconds - own.measured_seconds) / (late.measured_seconds - none.measured_seconds)
    simulated = (late.simulated_seconds - own.simulated_seconds) / (late.simulated_seconds - none.simulated_seconds)
    return measured, simulated


def timelines(sim: Simulator, cell: Cell, names: Iterable[str]) -> list[Timeline]:
    """Each as measured, for a picture."""
    bench = Bench(sim, cell)
    variants = [VARIANTS[name] for name in names]
    return [timeline_of(schedule_of(one, cell.stages, cell.m), bench.record(one)) for one in variants]


def classic_seconds(sim: Simulator, cell: Cell, own_streams: bool, rounds: int) -> list[float]:
    """Of each round: which work its streams wait for depends on the host's threads."""
    bench = Bench(sim, cell)
    return sorted(step_seconds(bench.classic(own_streams)) for _ in range(rounds))


def replays_ahead(sim: Simulator, cell: Cell) -> dict[str, bool]:
    """Whether the last stage but one begins its first replay before the last stage begins its first backward."""
    bench = Bench(sim, cell)
    recorded = {
        "torchgpipe's graph": bench.classic(own_streams=False),
        "its nodes on copy streams": bench.classic(own_streams=True),
        "Pipe": bench.record(_EARLY),
    }
    schedule = schedule_of(_EARLY, cell.stages, cell.m)
    return {name: _is_ahead(timeline_of(schedule, ran)) for name, ran in recorded.items()}


def _is_ahead(timeline: Timeline) -> bool:
    last = timeline.schedule.stages - 1
    return _first(timeline, last - 1, Kind.RECOMPUTE) < _first(timeline, last, Kind.BACKWARD)


def _first(timeline: Timeline, stage: int, kind: Kind) -> float:
    """The time at which the stage begins its first action of this kind."""
    own = [one for one in timeline.events if (one.action.stage, one.action.kind) == (stage, kind)]
    return min(one.start_seconds for one in own)
