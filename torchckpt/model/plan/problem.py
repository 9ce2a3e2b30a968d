"""Problem: the checked input of the planner, and the forms of it that parts of the planner need."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

from torchckpt.errors import Fault, raise_faults
from torchckpt.model.plan.search.bound import least_seconds
from torchckpt.model.plan.search.replay import first_dropped, replay, without_weight_grads
from torchckpt.model.plan.stage.holding import Holdings
from torchckpt.model.plan.stage.lane import Lane, lanes_of
from torchckpt.model.plan.stage.limit import DeviceMemory, Limit, bytes_per_rank, without_static
from torchckpt.model.plan.stage.stage import Stage, restaged, stage_faults
from torchckpt.model.schedule.action import Kind
from torchckpt.model.schedule.costs import Link
from torchckpt.model.schedule.program import Program, compile_program
from torchckpt.model.schedule.schedule import Schedule
from torchckpt.model.schedule.validity import check_schedule
from torchckpt.model.simulation.inputs import per_boundary
from torchckpt.model.simulation.timeline import Timeline

__all__ = ["Links", "Problem", "problem_of", "static_bytes"]

Links: TypeAlias = "float | Link | Sequence[Link]"
"""Seconds of a message, or what :func:`~torchckpt.model.simulation.simulator.simulate` takes."""


@dataclass(frozen=True)
class Problem:
    """A planning problem whose arguments have been checked."""

    schedule: Schedule
    """The schedule, without recomputes."""
    stages: tuple[Stage, ...]
    links: tuple[Link, ...]
    budget_bytes: tuple[float, ...]
    """Per rank."""
    memory: DeviceMemory | None = None
    """The device memory from which the budgets were computed; None if the user gave budgets."""

    @cached_property
    def keep_all(self) -> Timeline:
        """The step that keeps every block."""
        return keep_all(self.schedule, self.stages, self.links)

    @cached_property
    def program(self) -> Program:
        """The program of the schedule without weight gradients."""
        costs = [stage.costs() for stage in self.stages]
        return compile_program(without_weight_grads(self.schedule), costs, self.links)

    @cached_property
    def lanes(self) -> list[Lane]:
        made: dict[Stage, Holdings] = {}
        holdings = [made.setdefault(stage, Holdings(stage)) for stage in self.stages]
        return lanes_of(self.schedule, holdings, self.budget_bytes)

    @cached_property
    def least_bytes(self) -> tuple[float, ...]:
        """The peak bytes of each rank if it drops every block."""
        return tuple(max(lane.profile(lane.all_dropped()), default=0.0) for lane in self.lanes)

    @property
    def too_small(self) -> list[int]:
        """The ranks whose budget is below their least bytes."""
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
        static = static_bytes(self.schedule, stages)
        total = self.memory.total_bytes  # a budget below zero is one of a partition that is not planned
        return replace(self, stages=stages, budget_bytes=tuple(max(0.0, total - one) for one in static))


def static_bytes(schedule: Schedule, stages: Sequence[Stage]) -> tuple[float, ...]:
    """The bytes of parameters, gradients and optimizer state on each rank."""
    found = [0.0] * len(schedule.ranks)
    for stage, rank in zip(stages, schedule.placement):
        found[rank] += stage.static_bytes
    return tuple(found)


def keep_all(schedule: Schedule, stages: Sequence[Stage], links: Sequence[Link]) -> Timeline:
    """One step that recomputes nothing."""
    return replay(schedule, stages, links, first_dropped(schedule, stages, 0))


def problem_of(caller: str, schedule: Schedule, stages: Sequence[Stage], budget: Limit, link: Links) -> Problem:
    """The problem for the arguments of the caller.

    Raises:
        ArgumentError: with every fault of ``schedule``, ``stages`` and ``link``; then of ``budget``.
    """
    check_schedule(caller, schedule)
    each = Link(link) if isinstance(link, (int, float)) else link
    links, wrong_links = per_boundary(each, schedule.stages)
    raise_faults(caller, [*_recomputes(schedule), *stage_faults(stages, schedule.stages), *wrong_links])
    schedule = replace(schedule, segments=())  # segments describe recomputes, and there are none
    if isinstance(budget, DeviceMemory):
        limits = without_static(caller, budget, static_bytes(schedule, stages))
        return Problem(schedule, tuple(stages), tuple(links), limits, budget)
    peak = max(keep_all(schedule, stages, links).peak_bytes)
    limits = bytes_per_rank(caller, budget, len(schedule.ranks), peak)
    return Problem(schedule, tuple(stages), tuple(links), limits)


def _recomputes(schedule: Schedule) -> list[Fault]:
    if not any(kind is Kind.RECOMPUTE for order in schedule.ranks for _, kind, _ in order):
        return []
    rule = "the plan says what is recomputed, so the schedule has no R yet"
    return [Fault(rule, f"{schedule.name!r} with R", "the schedule before with_recompute()")]
