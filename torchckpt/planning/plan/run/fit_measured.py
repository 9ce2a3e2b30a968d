"""Fit measured: a plan for a budget that covers all memory of a step, not only the activations.

Measured steps show, for each action, the bytes of gradients, messages in transit, losses, and temporary memory. The
planner gets the rest of the budget for activations. These bytes are not all alive at once, so how much of a budget is
left for activations is seen from a plan: a rank that would exceed its budget gets so much less, one that would not use
all of it so much more, and it is planned again. The shortest plan that fits is returned.
"""
from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import median

from torchckpt.errors import BudgetInfeasible, Fault
from torchckpt.planning.budget import Bytes, bytes_per_rank, enough, whole
from torchckpt.planning.draw.units import Units, aligned
from torchckpt.planning.order.schedule import Action, Schedule
from torchckpt.planning.plan.figures import Rule, most_blocks, quickest
from torchckpt.planning.plan.pipeline import planned
from torchckpt.planning.plan.problem import Problem, problem_of
from torchckpt.planning.plan.result import PipelinePlan
from torchckpt.planning.plan.run.extra_memory import ExtraMemory, MeasuredStep, beside_of, peaks_of
from torchckpt.planning.plan.run.order import before_pairs, summed_as_given
from torchckpt.planning.plan.run.repair import repaired
from torchckpt.planning.step.memory import Curve, Level
from torchckpt.planning.step.placement import without
from torchckpt.planning.step.simulated import Step
from torchckpt.planning.step.table import table_of
from torchckpt.planning.step.timeline import Timeline
from torchckpt.planning.work.block import Link, Stage
from torchckpt.planning.work.choice import first_blocks
from torchckpt.planning.work.host import Host

__all__ = ["Fitted", "PlannedStep", "fitted", "with_levels"]

_TRIES = 8
"""The most plans that are made."""
_MORE_TRIES = 5
"""The most plans that are made after the first one that fits."""
_NEAR = 1.01
"""A step that is longer than its bound by less than this is not repaired."""
_LEAST_STEP = 0.02
"""The least share of a budget by which tries differ."""
_ROUNDING = 1e-9
_LEAST_BYTES = 1.0
"""A budget is above zero."""


@dataclass(frozen=True)
class Fitted:
    """A plan, and the peak bytes of a step of it."""

    plan: PipelinePlan
    budget_bytes: tuple[float, ...]
    """The budget of each rank."""
    peak_bytes: tuple[float, ...]
    """The peak of each rank, with its extra memory."""
    least_bytes: float = 0.0
    """The most of any rank if all is recomputed: no budget can be less. 0 if it is not known."""

    @property
    def fits(self) -> bool:
        return _fit(self.peak_bytes, self.budget_bytes)


def _fit(peaks: Iterable[float], limits: Iterable[float]) -> bool:
    return all(peak <= limit * (1 + _ROUNDING) for peak, limit in zip(peaks, limits))


def fitted(
    schedule: Schedule, stages: Sequence[Stage], links: Sequence[Link], budget: Bytes,
    took: Sequence[MeasuredStep], tied: bool = False, pairs: Collection[tuple[Action, Action]] = (),
    host: Host | None = None,
) -> Fitted:
    """The shortest plan found whose step takes at most ``budget`` bytes. A share is a share of the peak of a step that
    keeps everything.

    Args:
        took: the steps that were measured, all of which recomputed everything. The first one did whole backwards.
        tied: whether stages of a rank share parameters. Default: False.
        pairs: actions that run as one where the second follows the first; no recompute stands between them.
        host: where blocks may be sent. Default: nowhere.

    Raises:
        ArgumentError: ``budget`` is not a valid budget.
        BudgetInfeasible: the budget is below the peak of a step that recomputes everything.
    """
    beside, reserve = beside_of(took, stages), took[0].least(stages)
    problem = problem_of(schedule, stages, "100%", links, host)
    whole_peaks = peaks_of(problem.keep_all, beside)
    limits = bytes_per_rank(budget, len(schedule.ranks), max(whole_peaks))
    least = _recomputing_all(problem, [step.schedule for step in took], limits, beside)
    if not least.fits:
        raise _too_small(least)
    best = least
    within = [
        max(limit - taken, kept if limit >= whole_peak else 0.0)
        for limit, taken, kept, whole_peak in zip(limits, reserve, problem.keep_all.peak_bytes, whole_peaks)
    ]
    tries = _Tries(limits, _at_least(problem, within))
    left, plans = _TRIES, [least.plan]
    while left:
        plan = before_pairs(summed_as_given(planned(problem.within(tries.within)), tied), pairs)
        tried = Fitted(plan, limits, peaks_of(plan.step, beside))
        plans.append(plan)
        is_shortest = plan.step_seconds <= problem.keep_all.seconds
        if tried.fits and (is_shortest or plan.step_seconds < best.plan.step_seconds):
            best = tried
        if tried.fits and is_shortest:
            break
        if not tries.go_on(problem, tried.peak_bytes):
            break
        left = min(left - 1, _MORE_TRIES) if best is not least else left - 1
    shortest = _repaired(best, min(plans, key=lambda plan: plan.step_seconds), beside)
    plan = replace(shortest.plan, counted_rules=_rules(least, [step.schedule for step in took], beside))
    return replace(shortest, plan=plan, least_bytes=max(least.peak_bytes))


def _rules(least: Fitted, orders: Iterable[Schedule], beside: Mapping[Action, ExtraMemory]) -> tuple[Rule, Rule]:
    """To recompute everything, as ``least`` does, which fits; and the same first blocks of every stage, if that is
    shorter, inside the backwards of one of ``orders``."""
    plan, problem = least.plan, least.plan.problem

    def fits(step: Step) -> bool:
        return _fit(peaks_of(step, beside), least.budget_bytes)

    every = Rule(plan.step_seconds, most_blocks(problem), plan.peak_bytes)
    same = quickest(problem, range(max(1, most_blocks(problem))), map(without, orders), fits)
    return every, min(every, same, key=attrgetter("step_seconds"))


def _repaired(best: Fitted, shortest: PipelinePlan, beside: Mapping[Action, ExtraMemory]) -> Fitted:
    """``best``, or what becomes of it or of the shortest plan that was tried, where that fits and is shorter."""
    if best.plan.step_seconds <= _NEAR * best.plan.bound_seconds or best.plan.moves or shortest.moves:
        return best
    limits = best.budget_bytes
    plans = [repaired(plan, limits, beside) for plan in (shortest, best.plan)]
    fitting = [Fitted(plan, limits, peaks_of(plan.step, beside)) for plan in plans if plan is not None]
    return min([best, *fitting], key=lambda fit: fit.plan.step_seconds)


class _Tries:
    """The bytes for activations that are tried, by rank."""

    def __init__(self, limits: Sequence[float], within: Sequence[float]) -> None:
        self.within = tuple(within)
        self._limits = limits
        self._fitted = [-math.inf] * len(limits)
        """The most bytes with which a rank was within its budget."""
        self._exceeded = [math.inf] * len(limits)
        """The fewest bytes with which it was not."""
        self._steps = [_LEAST_STEP * limit for limit in limits]

    def go_on(self, problem: Problem, peaks: Sequence[float]) -> bool:
        """Take the excess from the ranks that exceeded; if none did, give all what they left. Returns whether that
        differs from the try before."""
        left = [limit * (1 + _ROUNDING) - peak for limit, peak in zip(self._limits, peaks)]
        wanted = [
            self._less(rank, within, -more) if more < 0 else self._more(rank, within, more if min(left) >= 0 else 0.0)
            for rank, (within, more) in enumerate(zip(self.within, left))
        ]
        before, self.within = self.within, _at_least(problem, wanted)
        return any(abs(tried - other) > limit * _LEAST_STEP / 2
                   for tried, other, limit in zip(before, self.within, self._limits))

    def _less(self, rank: int, within: float, excess: float) -> float:
        self._exceeded[rank] = within
        taken = max(excess, self._steps[rank])
        if self._fitted[rank] >= within:
            self._fitted[rank] = -math.inf  # other ranks made other choices then
            return within - taken
        self._steps[rank] *= 2  # what is freed may be less than what is taken
        return max(within - taken, (within + self._fitted[rank]) / 2)

    def _more(self, rank: int, within: float, left: float) -> float:
        self._fitted[rank] = within
        if self._exceeded[rank] <= within:
            self._exceeded[rank] = math.inf  # other ranks made other choices then
        return min(within + left, (within + self._exceeded[rank]) / 2) if left else within


def _at_least(problem: Problem, within: Sequence[float]) -> tuple[float, ...]:
    """``within``, where that is enough for a rank that recomputes everything."""
    return tuple(max(_LEAST_BYTES, *pair) for pair in zip(problem.least_bytes, within))


def _recomputing_all(
    problem: Problem, orders: Sequence[Schedule], limits: tuple[float, ...], beside: Mapping[Action, ExtraMemory]
) -> Fitted:
    """The plan that recomputes everything inside the backwards, in that of ``orders`` in which it takes least.

    It depends on measured bytes alone, so that what is too small a budget does not differ from run to run.
    """
    within = problem.within(_at_least(problem, problem.least_bytes))
    late = first_blocks(problem.schedule, problem.stages, most_blocks(problem))
    plans = [PipelinePlan.of(within, without(order), late) for order in orders]
    fits = [Fitted(plan, limits, peaks_of(plan.step, beside)) for plan in plans]
    return min(fits, key=lambda tried: max(map(_excess, tried.peak_bytes, limits)))


def _excess(peak_bytes: float, limit_bytes: float) -> float:
    """How many times the limit they are; a share of no bytes is none."""
    return peak_bytes / limit_bytes if limit_bytes else math.inf if peak_bytes else 0.0


def _too_small(least: Fitted) -> BudgetInfeasible:
    limits, peaks = least.budget_bytes, least.peak_bytes
    rank = max(range(len(limits)), key=lambda rank: _excess(peaks[rank], limits[rank]))
    needed, received = enough(peaks[rank]), f"{whole(limits[rank])} bytes for rank {rank}"
    rule = f"the budget is too small: rank {rank} takes {needed} bytes even if it recomputes everything"
    works = f"budget={needed} or more, or fewer micro-batches in flight, or smaller ones"
    return BudgetInfeasible(str(Fault(rule, received, works)), peaks[rank], least.plan, rank)


@dataclass(frozen=True)
class PlannedStep:
    """A planned step beside the steps that were measured. Collections of bytes have one entry per rank."""

    plan: PipelinePlan
    measured: Timeline
    """The last step. Its curves of memory are of the step whose bytes were counted."""
    steps_seconds: tuple[float, ...]
    """The seconds of the steps that are remembered."""
    budget_bytes: tuple[float, ...]
    planned_peak_bytes: tuple[float, ...]
    """The planned peaks. Where steps were measured before the plan was made, they count all that a step takes."""
    measured_peak_bytes: tuple[float, ...] | None
    """The peaks of the second step of this plan, beyond the bytes that were allocated before it. None until then."""
    waited_seconds: tuple[float, ...] = ()
    """The seconds of the last step in which each rank waited for copies; with a host alone."""
    host_peak_bytes: tuple[float, ...] = ()
    """The most bytes that each rank has had on its host."""

    @property
    def step_seconds(self) -> float:
        """The median of the measured steps."""
        return median(self.steps_seconds)

    @property
    def deviation(self) -> float:
        """The share by which the measured step is longer than the planned one."""
        return self.step_seconds / self.plan.step_seconds - 1

    def table(self) -> str:
        """The tables for people: the step, the peaks of the ranks, and what each stage recomputes."""
        rows = (
            self.plan.row("planned", self.plan.step_seconds, self.planned_peak_bytes),
            self.plan.row("measured", self.step_seconds, self.measured_peak_bytes or ()),
        )
        measured: Sequence[float | None] = self.measured_peak_bytes or [None] * len(self.budget_bytes)
        columns: dict[str, Sequence[float | None]] = {
            "planned peak": self.planned_peak_bytes, "measured peak": measured, "budget": self.budget_bytes
        }
        if self.waited_seconds:
            columns |= {"planned on host": self.plan.host_peak_bytes, "on host": self.host_peak_bytes}
        peaks: list[tuple[str, ...]] = [("rank", *columns, *["waited"] * bool(self.waited_seconds))]
        for rank, amounts in enumerate(zip(*columns.values())):
            texts = ["-" if amount is None else _UNITS.of_memory(amount) for amount in amounts]
            texts += map(_UNITS.of_time, self.waited_seconds[rank : rank + 1])
            peaks.append((str(rank), *texts))
        return f"{table_of(rows, _UNITS)}\n\n{aligned(peaks)}\n\n{self.plan.by_stage()}"

    def __str__(self) -> str:
        return f"{self.table()}\n\n{self.plan.summary}"


_UNITS = Units(time="ms", seconds=1e-3, memory="MB", bytes=1e6)


def with_levels(measured: Timeline, levels: Sequence[Mapping[Action, Level]]) -> Timeline:
    """``measured``, with the bytes that its actions were measured to hold on each rank."""
    times: list[dict[Action, tuple[float, float]]] = [{} for _ in measured.schedule.ranks]
    for event in measured.events:
        times[event.rank].setdefault(event.action, (event.start_seconds, event.end_seconds))
    return replace(measured, memory=tuple(map(_curve, times, levels)))


def _curve(times: Mapping[Action, tuple[float, float]], taken: Mapping[Action, Level]) -> Curve:
    """The curve of one rank: the most that each action takes, from its start on, and what it leaves."""
    curve = [(0.0, 0.0)]
    for action, (start, end) in sorted(times.items(), key=lambda pair: pair[1]):
        if action in taken:
            curve += [(start, taken[action].highest), (end, taken[action].left)]
    return tuple(curve)
