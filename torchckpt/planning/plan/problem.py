"""Problem: the checked input of the planner, and the forms of it that parts of the planner need."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torchckpt.errors import Fault, brief, check, raise_fault
from torchckpt.planning.budget import DeviceMemory, Limit, bytes_per_rank
from torchckpt.planning.order.program import Program
from torchckpt.planning.order.schedule import Kind, Schedule
from torchckpt.planning.order.validity import check_schedule
from torchckpt.planning.plan.search.bound import least_seconds
from torchckpt.planning.plan.search.lane import Holdings, Lane
from torchckpt.planning.step.placement import recomputed_early, without
from torchckpt.planning.step.simulated import Step
from torchckpt.planning.work.block import Link, Links, Stage, Stages, per_boundary, per_stage, restaged
from torchckpt.planning.work.choice import Choices
from torchckpt.planning.work.host import Host, Move

__all__ = ["Problem", "problem_of"]


@dataclass(frozen=True)
class Problem:
    """A planning problem whose arguments have been checked."""

    schedule: Schedule
    """The schedule, without recomputes."""
    stages: tuple[Stage, ...]
    links: tuple[Link, ...]
    budget_bytes: tuple[float, ...]
    """The budget of each rank."""
    memory: DeviceMemory | None = None
    """The device memory from which the budgets were computed; None if the user gave budgets."""
    host: Host | None = None

    def step(self, choices: Choices, schedule: Schedule | None = None, moves: tuple[Move, ...] = ()) -> Step:
        """A step with these choices and moves. Default: of the schedule as it is."""
        return Step(schedule or self.schedule, self.stages, self.links, choices, moves, self.host)

    @cached_property
    def host_bytes(self) -> tuple[float, ...]:
        """The host memory of each rank: none without a host."""
        ranks = len(self.schedule.ranks)
        return (0.0,) * ranks if self.host is None else self.host.bytes_of(ranks)

    @cached_property
    def keep_all(self) -> Step:
        """The step that keeps every block."""
        return self.step({})

    @cached_property
    def program(self) -> Program:
        """The program of the schedule without weight gradients."""
        return self.step({}, without(self.schedule, Kind.WEIGHT_GRAD)).program

    @cached_property
    def lanes(self) -> list[Lane]:
        by_stage = {stage: Holdings(stage) for stage in dict.fromkeys(self.stages)}
        holdings = [by_stage[stage] for stage in self.stages]
        return [Lane(rank, self.schedule, holdings, budget) for rank, budget in enumerate(self.budget_bytes)]

    @cached_property
    def least_bytes(self) -> tuple[float, ...]:
        """The peak bytes of each rank if it drops every block."""
        return tuple(max(lane.profile(lane.all_dropped()), default=0.0) for lane in self.lanes)

    @cached_property
    def least_device_bytes(self) -> tuple[float, ...]:
        """The same with parameters, gradients and optimizer state."""
        return tuple(map(sum, zip(self.keep_all.static_bytes, self.least_bytes)))

    @property
    def too_small(self) -> list[int]:
        """The ranks whose budget, or device, is below their least bytes."""
        if self.memory is not None:
            return [rank for rank, least in enumerate(self.least_device_bytes) if least > self.memory.total_bytes]
        pairs = zip(self.least_bytes, self.lanes)
        return [rank for rank, (least, lane) in enumerate(pairs) if least > lane.budget_bytes]

    @cached_property
    def bound_seconds(self) -> float:
        """A lower bound on the step of every plan; infinite if no plan fits."""
        return math.inf if self.too_small else least_seconds(self.program, self.lanes)

    def within(self, budget_bytes: Sequence[float]) -> Problem:
        return replace(self, budget_bytes=tuple(budget_bytes), memory=None)

    def restaged(self, counts: Sequence[int]) -> Problem:
        """The problem with ``counts`` blocks on the stages. Parameters move with their blocks."""
        stages = restaged(self.stages, counts)
        if self.memory is None:
            return replace(self, stages=stages)
        static = Step(self.schedule, stages, self.links).static_bytes
        return replace(self, stages=stages, budget_bytes=_left(self.memory, static))


def _left(memory: DeviceMemory, static_bytes: Sequence[float]) -> tuple[float, ...]:
    """The budget of each rank; none where parameters, gradients and optimizer state take more than there is."""
    return tuple(max(0.0, memory.total_bytes - taken) for taken in static_bytes)


def problem_of(schedule: Schedule, stages: Stages, budget: Limit, link: Links, host: Host | None = None) -> Problem:
    """The problem for the arguments of the caller. An ArgumentError has every fault of ``schedule``, ``stages`` and
    ``link``; then of ``budget`` and ``host``."""
    check_schedule(schedule)
    links, wrong_links = per_boundary(link, schedule.stages)
    listed, wrong_stages = per_stage(stages, schedule.stages, is_planned=True)
    rule = "the schedule has R already, but the plan says what is recomputed"
    replayed = Fault(rule, f"{schedule.name!r} with R", "the schedule before with_recompute()")
    check([*[replayed] * bool(recomputed_early(schedule)), *wrong_stages, *wrong_links])
    keep_all = Step(schedule, tuple(listed), tuple(links))
    host = None if host is None else _counted(host, len(schedule.ranks))
    if isinstance(budget, DeviceMemory):
        limits = _left(budget, keep_all.static_bytes)
        return Problem(schedule, keep_all.stages, keep_all.links, limits, budget, host)
    limits = bytes_per_rank(budget, len(schedule.ranks), max(keep_all.peak_bytes))
    return Problem(schedule, keep_all.stages, keep_all.links, limits, None, host)


def _counted(host: Host, ranks: int) -> Host:
    """``host`` in numbers."""
    if not isinstance(host, Host):
        raise_fault(Fault("host is not a Host", f"host={brief(host)}", 'Host("200GiB", out="25GB")'))
    return replace(host, bytes=host.bytes_of(ranks), out=host.out_rate, back=host.back_rate)
