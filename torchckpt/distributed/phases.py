"""The two phases of a schedule with a budget: *measuring* its first steps, then *following* the plan made of them.

Each says in which order a step runs, what becomes of the regions of a visit, and in which steps bytes are counted.
Between them, rank 0 makes the plan from the measurements of all processes, and sends it to all.
"""
from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import TypeAlias

import torch.distributed as dist

from torchckpt.distributed.meeting import (
    Gathered,
    all_gather,
    broadcast,
    check_the_same,
    combined,
    larger_level,
    order_told,
)
from torchckpt.errors import ArgumentError, CheckpointError, Fault, called, check, named, raise_fault, without_traceback
from torchckpt.measuring.link import MeasuredLink
from torchckpt.measuring.remembered import NEAR, digest
from torchckpt.planning import Action, Choice, Kind, Schedule, State, arrival, with_recompute
from torchckpt.planning.budget import Bytes, bytes_per_rank, enough
from torchckpt.planning.order.schedule import Visit
from torchckpt.planning.plan import PipelinePlan
from torchckpt.planning.plan.figures import WholeStep
from torchckpt.planning.plan.run.extra_memory import MeasuredStep, with_gradients
from torchckpt.planning.plan.run.fit_measured import Fitted, fitted
from torchckpt.planning.plan.run.order import done_whole, summed_as_given
from torchckpt.planning.step.memory import Level
from torchckpt.planning.step.placement import recomputed_early
from torchckpt.planning.work.host import Host

__all__ = ["FIRST_STEPS", "Following", "Measuring", "Plan", "plan_for"]

FIRST_STEPS = 4
"""With a budget: the steps that are measured before the plan is made."""

_COUNTED, _COUNTED_SPLIT = 1, 2
"""Steps are numbered from 0. The first number is the step that counts the bytes of whole backwards, and the step of a
plan that is counted; the second, the step that counts those of split ones."""

_CALLER = "recompute_ahead()"
_ASKED = "recompute_ahead(schedule, budget={})"
_NO_REGIONS = Fault(
    "no stage has regions, so nothing can be recomputed to meet the budget",
    "stages whose forwards entered none",
    "for block in stage_module.layers: torchckpt.checkpoint_module(block)",
)

_Levels: TypeAlias = Mapping[Action, Level]


class Measuring:
    """The first steps, in which every region is recomputed.

    A schedule with split backwards does whole ones in ``_COUNTED`` alone. In others it does its own, and recomputes
    right before them: what a split backward recomputes stays until its end anyway. They come first, for
    ``torch.compile``: a backward that was whole when it was compiled cannot be split later (pytorch/pytorch#139669).

    Raises:
        ArgumentError: ``budget`` is not a valid budget for the ranks of ``schedule``.
    """

    def __init__(self, schedule: Schedule, budget: Bytes, host: Bytes | None = None) -> None:
        self._budget, self._plain, ranks = budget, schedule, len(schedule.ranks)
        self.host_bytes = None if host is None else Host(host, out=1.0).bytes_of(ranks)
        """The host memory of each rank; the link to it is measured."""
        limits = [bytes_per_rank(budget, ranks, peak) for peak in (1.0, 2.0)]  # a share differs in the two
        self._key = str([*limits, *([] if host is None else [self.host_bytes])])
        self._host = host
        self._counted: list[tuple[Schedule, _Levels]] = []
        """For each step in which bytes were counted, its order, and the levels of this rank's actions: the bytes beyond
        those allocated before the step. The first had whole backwards."""
        actions = [action for order in schedule.ranks for action in order]
        self._split = frozenset((stage, i) for stage, kind, i in actions if kind is Kind.INPUT_GRAD)
        self._is_whole = False
        self._split_order = with_recompute(schedule, dict.fromkeys(self._split, State.EARLY))
        self._whole_order = schedule

    def told(self) -> tuple[str, str]:
        """A key that is equal on all ranks that mean the same, however they write it, and its name in an error."""
        budget = f"budget={self._budget!r}" + ("" if self._host is None else f", host={self._host!r}")
        order, shown = order_told(self._plain, f"of {self._plain.micro_batches} micro-batches")
        return f"{self._key} {order}", f"{shown}, {budget}"

    def agreed(self, tied: bool) -> Measuring:
        """The phase, when all processes are about to make its first step. ``tied``: stages of one share parameters."""
        self._whole_order = done_whole(self._plain, tied)
        return self

    def order(self, step: int) -> Schedule:
        self._is_whole = bool(self._split) and step == _COUNTED
        return self._whole_order if self._is_whole else self._split_order

    def choice(self, visit: Visit) -> State:
        return State.EARLY if visit in self._split and not self._is_whole else State.LATE

    def counts(self, step: int) -> bool:
        return step == _COUNTED or (step == _COUNTED_SPLIT and bool(self._split))

    def count(self, order: Schedule, levels: _Levels, gradient_bytes: Mapping[int, float]) -> None:
        """Note the levels of a step in which bytes were counted.

        Args:
            gradient_bytes: by stage, those that were there before the step. One that begins without them makes them.
        """
        self._counted.append((order, with_gradients(levels, gradient_bytes)))

    def planned(
        self, measured: Gathered, tied: bool, pairs: Collection[tuple[Action, Action]], link: MeasuredLink | None = None
    ) -> Following:
        """Make the plan. Collective: all processes of the job must call it, and all get the same plan.

        Args:
            measured: the combined records of steps that recomputed all regions.
            tied: whether stages of some process share parameters.
            pairs: actions that torch runs as one where the second follows the first.
            link: of this rank to its host, if it has one.

        Raises:
            ArgumentError, BudgetInfeasible, ScheduleError: on every rank.
        """
        levels_of_processes = all_gather([levels for _, levels in self._counted])
        host = self._measured_host(link)
        is_first = dist.get_rank() == 0
        made = broadcast(self._outcome(measured, levels_of_processes, tied, pairs, host) if is_first else None)
        if isinstance(made, CheckpointError):
            raise without_traceback(made)
        check_the_same("plan", [(one, one) for one in all_gather(digest(made.plan.to_json()))])
        return Following(made)

    def _measured_host(self, link: MeasuredLink | None) -> Host | None:
        """The host with the slowest of the links that were measured. Collective."""
        if self.host_bytes is None:
            return None
        links = [each for each in all_gather(link) if each is not None]
        rates = (min(each.out for each in links), min(each.back for each in links))
        return Host(list(self.host_bytes), *rates, drag=max(each.drag for each in links))

    def _outcome(
        self,
        measured: Gathered,
        levels_of_processes: Sequence[Sequence[_Levels]],
        tied: bool,
        pairs: Collection[tuple[Action, Action]],
        host: Host | None,
    ) -> Fitted | CheckpointError:
        """What rank 0 sends to the others, which wait for it: the plan with its bytes, or why there is none."""
        stages, links = measured.step.stages, measured.step.links
        try:
            orders = [order for order, _ in self._counted]
            steps = [_measured_step(*step) for step in zip(orders, zip(*levels_of_processes))]
            with called(_CALLER):
                check([] if any(stage.blocks for stage in stages) else [_NO_REGIONS])
                fit = fitted(self._plain, stages, links, self._budget, steps, tied, pairs, host)
        except CheckpointError as error:
            return error
        except Exception as error:
            works = "plan=plan_pipeline(...), made in a process of its own"
            return ArgumentError(str(Fault(f"{_CALLER}: rank 0 could not make the plan", named(error), works)))
        return replace(fit, plan=replace(fit.plan, whole_step=WholeStep(fit.budget_bytes, fit.peak_bytes)))


class Following:
    """The steps of a plan, whose choices and order they run. The methods are those of :class:`Measuring`.

    Args:
        is_given: whether the plan was made before, or in another run.
    """

    def __init__(self, fitted: Fitted, is_given: bool = False) -> None:
        self.fitted, self.plan, self._is_given = fitted, fitted.plan, is_given
        self.levels: _Levels = {}
        """The levels of this rank's actions in a step of the plan; empty until they were counted."""

    @classmethod
    def of(cls, plan: PipelinePlan) -> Following:
        """The phase of a ``plan`` that was made before, or in another run."""
        summed = summed_as_given(plan)
        whole_step = plan.whole_step or WholeStep(plan.problem.budget_bytes, summed.peak_bytes)
        return cls(Fitted(summed, *whole_step), is_given=True)

    def told(self) -> tuple[str, str]:
        text = f"plan {digest(self.plan.to_json())}"
        return text, text

    def agreed(self, tied: bool) -> Following:
        if not tied:
            return self
        return Following(replace(self.fitted, plan=summed_as_given(self.plan, tied=True)), self._is_given)

    def order(self, step: int) -> Schedule:
        return self.plan.schedule

    def choice(self, visit: Visit) -> Choice:
        return self.plan.step.choice(visit)

    def counts(self, step: int) -> bool:
        return step == _COUNTED

    def count(self, order: Schedule, levels: _Levels, gradient_bytes: Mapping[int, float]) -> None:
        self.levels = levels  # as it was, with or without gradients
        if not levels:
            return
        rank = self.plan.schedule.placement[next(iter(levels)).stage]
        peak = max(level.highest for level in levels.values())
        if peak > NEAR * self._limit_bytes(rank):
            warnings.warn(self._over(rank, peak), stacklevel=7)  # where the user calls step()

    def _limit_bytes(self, rank: int) -> float:
        """What a step may take. A plan that was made on paper has activations alone, in any unit."""
        if not self._is_given:
            return self.fitted.budget_bytes[rank]
        return math.inf if self.plan.whole_step is None else self.plan.whole_step.peak_bytes[rank]

    def _over(self, rank: int, peak: float) -> str:
        """The text of a warning: this ``rank`` took more than it may."""
        planned, budget = self.fitted.peak_bytes[rank], self.fitted.budget_bytes[rank]
        rule, works = "the plan that was given says, as one for other shapes does", _ASKED.format("...")
        if not self._is_given:
            rule = "its budget, and than the steps that were measured"
            asked = max(budget * budget / peak, self.fitted.least_bytes)
            works = _ASKED.format(enough(asked)) if asked < budget else "fewer micro-batches in flight, or smaller ones"
        stages = ", ".join(str(stage) for stage, of in enumerate(self.plan.schedule.placement) if of == rank)
        taken = f"{peak:.0f} bytes measured, {planned:.0f} planned, budget {budget:.0f}"
        received = f"rank {rank} (stages {stages}): {taken}"
        return str(Fault(f"recompute_ahead: a step takes more than {rule}", received, works))


def _measured_step(order: Schedule, levels_of_processes: Sequence[_Levels]) -> MeasuredStep:
    levels: dict[Action, Level] = {}
    for levels_of_process in levels_of_processes:
        levels = combined(levels, levels_of_process, larger_level)
    return MeasuredStep(order, {**arrival(order), **dict.fromkeys(recomputed_early(order), State.EARLY)}, levels)


# a plan that the user gives -------------------------------------------------------------------------------------------

Plan: TypeAlias = "PipelinePlan | str | Path"
"""A plan, its JSON text (``to_json()``), or the path of a file with that text."""

_WORKS = "plan=plan_pipeline(schedule_of(schedule), stages, budget), or its to_json() text, or a file with that text"


def plan_for(plan: Plan, schedule: Schedule) -> PipelinePlan:
    """Read ``plan`` and check that it is a plan for ``schedule``.

    Raises:
        ArgumentError: it is no plan, or a plan for another schedule.
    """
    if isinstance(plan, (str, Path)):
        plan = _read(plan)
    if not isinstance(plan, PipelinePlan):
        raise_fault(Fault("the plan is neither a PipelinePlan nor its JSON text", type(plan).__name__, _WORKS))
    check(_schedule_faults(plan.problem.schedule, schedule))
    return plan


def _read(plan: str | Path) -> PipelinePlan:
    text = str(plan)
    if not text.lstrip().startswith("{"):
        try:
            text = Path(plan).read_text(encoding="utf-8-sig")
        except (OSError, ValueError) as error:  # such as a file that is not UTF-8
            reason = getattr(error, "strerror", None) or type(error).__name__
            received = f"{text if len(text) <= 80 else text[:77] + '...'!r}: {reason}"
            raise_fault(Fault("the plan is neither JSON nor a file that can be read", received, _WORKS))
    return PipelinePlan.from_json(text)


def _schedule_faults(planned: Schedule, schedule: Schedule) -> Iterator[Fault]:
    rule, works = "the plan was made for another schedule", "plan_pipeline(schedule_of(schedule), stages, budget)"
    sizes = {
        "stages": (planned.stages, schedule.stages),
        "micro-batches": (planned.micro_batches, schedule.micro_batches),
        "ranks": (len(planned.ranks), len(schedule.ranks)),
    }
    wrong = [f"{size} {name} for one of {live}" for name, (size, live) in sizes.items() if size != live]
    if wrong:
        yield Fault(rule, f"a plan of {', of '.join(wrong)}", works)
    elif planned.ranks != schedule.ranks:
        orders = enumerate(zip(planned.ranks, schedule.ranks))
        rank, pair = next((rank, pair) for rank, pair in orders if pair[0] != pair[1])
        places = enumerate(zip_longest(*pair))
        place, (first, second) = next((place, actions) for place, actions in places if actions[0] != actions[1])
        where = f"action {place} of rank {rank} is {first or 'none'} in the plan, {second or 'none'} in the schedule"
        yield Fault(rule, f"a plan of another {planned.name!r}: {where}", works)
