"""Figures: a decided plan, and what follows from it: times, peaks, shares. No text and no picture."""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

from torchckpt.planning.figures import Row, overhead
from torchckpt.planning.order.schedule import Action, Kind, Schedule
from torchckpt.planning.plan.away import bound_seconds
from torchckpt.planning.plan.problem import Problem
from torchckpt.planning.step.simulated import Step
from torchckpt.planning.step.timeline import Timeline
from torchckpt.planning.work.choice import Choices, State, first_blocks
from torchckpt.planning.work.host import Move

__all__ = ["Alone", "PlanFigures", "Rule", "WholeStep", "most_blocks", "quickest", "within_budget"]

_WORK, _FEWEST = 200_000, 8
"""The actions of the orders that are tried; if these are fewer than ``_FEWEST`` orders, then so many."""


class Rule(NamedTuple):
    """What people do without a plan: recompute the first blocks of all stages and micro-batches, inside the backward.

    Its seconds are infinite if it does not fit the budget, however early weight gradients are done.
    """

    step_seconds: float
    blocks: int
    """The number of first blocks of each stage that are recomputed; a stage that has fewer recomputes all."""
    peak_bytes: tuple[float, ...]
    """Of activations, as those of a plan; empty if it does not fit."""


def most_blocks(problem: Problem) -> int:
    """The blocks of the stage that has most."""
    return max(len(stage.blocks) for stage in problem.stages)


def within_budget(problem: Problem, counts: Sequence[int]) -> Rule:
    """The :func:`quickest` step whose activations fit, over the numbers of weight gradients that may wait."""

    def fits(step: Step) -> bool:
        return all(peak <= lane.budget_bytes for peak, lane in zip(step.peak_bytes, problem.lanes))

    return quickest(problem, counts, _delays(problem.schedule), fits)


def quickest(problem: Problem, counts: Sequence[int], orders: Iterable[Schedule], fits: Callable[[Step], bool]) -> Rule:
    """The shortest step that drops the first blocks, one of ``counts``, in one of ``orders``; infinite seconds if no
    count fits. In one order, dropping more takes longer: so only the least count that fits is simulated."""
    best = Rule(math.inf, counts[0], ())
    for schedule in orders:
        for blocks in counts:
            step = problem.step(first_blocks(schedule, problem.stages, blocks), schedule)
            if fits(step):
                best = min(best, Rule(step.seconds, blocks, step.peak_bytes), key=itemgetter(0, 1))
                break
    return best


def _delays(schedule: Schedule) -> Iterator[Schedule]:
    """``schedule`` itself; if it has split backwards, then also with fewer and fewer weight gradients that wait.
    ``_WORK`` limits their number, for these rules are for comparison, and must cost less than the plan."""
    yield schedule
    most = 0
    for order in schedule.ranks:
        steps = ((kind is Kind.INPUT_GRAD) - (kind is Kind.WEIGHT_GRAD) for _, kind, _ in order)
        most = max(most, *accumulate(steps, initial=0))
    orders = max(_FEWEST, _WORK // max(1, sum(map(len, schedule.ranks))))
    for few in sorted({most * part // orders for part in range(orders)}, reverse=True) if most else ():
        ranks = (tuple(_with_few_waiting(order, few)) for order in schedule.ranks)
        yield replace(schedule, ranks=tuple(ranks))


def _with_few_waiting(order: tuple[Action, ...], few: int) -> Iterator[Action]:
    """``order`` with weight gradients moved earlier, so that at most ``few`` wait. If 0, all backwards are whole."""
    waiting: list[Action] = []
    for action in order:
        if action.kind is Kind.WEIGHT_GRAD:
            if action in waiting:
                waiting.remove(action)
                yield action
        elif action.kind is Kind.INPUT_GRAD and not few:
            yield action._replace(kind=Kind.BACKWARD)
        else:
            yield action
            if action.kind is Kind.INPUT_GRAD:
                waiting.append(action._replace(kind=Kind.WEIGHT_GRAD))
                while len(waiting) > few:
                    yield waiting.pop(0)


_ROUNDING = 1e-9


def _above(amounts: Sequence[float], limits: Sequence[float]) -> list[int]:
    return [rank for rank, (amount, limit) in enumerate(zip(amounts, limits)) if amount > limit * (1 + _ROUNDING)]


class WholeStep(NamedTuple):
    """Bytes of each rank in a step: activations, and all that was measured beside them."""

    budget_bytes: tuple[float, ...]
    peak_bytes: tuple[float, ...]


class Alone(NamedTuple):
    """Steps under the same budget: the shortest that are found; infinite where nothing fits."""

    recomputing_seconds: float
    """Nothing is sent away."""
    offloading_seconds: float
    """Nothing is recomputed."""


@dataclass(frozen=True)
class PlanFigures:
    """A plan as data, and its figures."""

    problem: Problem
    """What was planned: ``schedule``, ``stages``, ``links``, and ``budget_bytes`` of each rank."""
    schedule: Schedule
    """The planned order: with an ``R`` for each visit of which something is recomputed early, and with weight gradients
    where they are done."""
    choices: Choices
    """The blocks that are kept, early and late, of each visit (stage, micro-batch)."""
    asked: Problem | None = None
    """What was asked, if blocks were moved between stages since."""
    whole_step: WholeStep | None = None
    """The bytes of a whole step, not of activations alone, if the plan was made of measured steps."""
    moves: tuple[Move, ...] = ()
    """One of each block that is away: when it leaves its device, and when it comes back."""
    alone: Alone | None = None
    """What either way alone takes, of a plan with a host."""
    counted_rules: tuple[Rule, ...] = ()
    """If the plan was made of measured steps: to recompute everything, and the same blocks, in steps that fit whole."""

    @cached_property
    def bound_seconds(self) -> float:
        """No plan of the same schedule, stages and budget is shorter. If it was made of measured steps: none whose
        activations have the bytes that this one was given for them; those beside them depend on the plan."""
        return bound_seconds(self.problem)

    @cached_property
    def step(self) -> Step:
        """The planned step."""
        return self.problem.step(self.choices, self.schedule, self.moves)

    @property
    def states(self) -> tuple[State, ...]:
        """The states that a block may be in."""
        return tuple(state for state in State if state is not State.AWAY or self.problem.host is not None)

    @property
    def timeline(self) -> Timeline:
        """When everything happens; memory is what the actions of a rank hold."""
        return self.step.timeline

    @property
    def step_seconds(self) -> float:
        return self.step.seconds

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """The most bytes that the actions of each rank hold."""
        return self.step.peak_bytes

    @property
    def over_budget(self) -> list[int]:
        """The ranks that hold more than their budget."""
        return _above(self.peak_bytes, self.problem.budget_bytes)

    @property
    def over_host(self) -> list[int]:
        """The ranks that hold more on their host than it has."""
        return _above(self.host_peak_bytes, self.problem.host_bytes)

    @property
    def host_peak_bytes(self) -> tuple[float, ...]:
        """The most bytes of each rank on its host, by position: they fit however slow a copy is."""
        return self.step.host_peak_bytes

    @property
    def keep_all_seconds(self) -> float:
        """The step of what was asked, if nothing is recomputed, whatever memory that takes."""
        return (self.asked or self.problem).keep_all.seconds

    @cached_property
    def recomputed_share(self) -> float:
        """The seconds of recomputation, as a share of what recomputing every block of every visit takes."""
        stages, m = self.problem.stages, self.schedule.micro_batches
        every = m * sum(stage.recompute_seconds for stage in stages)
        return sum(self.recompute_seconds) / every if every else 0.0

    @cached_property
    def recompute_seconds(self) -> tuple[float, ...]:
        """The seconds of recomputation of each stage, of all micro-batches."""
        seconds = [0.0] * len(self.problem.stages)
        for (stage, _), recompute in self.step.recomputed.items():
            seconds[stage] += recompute
        return tuple(seconds)

    @cached_property
    def all_recomputed(self) -> Rule:
        """The step in which every block is recomputed inside its backward."""
        asked = self.asked or self.problem
        return self.counted_rules[0] if self.counted_rules else within_budget(asked, [most_blocks(asked)])

    @cached_property
    def same_recomputed(self) -> Rule:
        """The step in which the first k blocks of every stage are, of all micro-batches, with the best k that fits."""
        asked = self.asked or self.problem
        return self.counted_rules[1] if self.counted_rules else within_budget(asked, range(most_blocks(asked) + 1))

    def row(self, name: str, step_seconds: float, peak_bytes: tuple[float, ...]) -> Row:
        """A step of this plan, beside keeping all, recomputing all, and the bound."""
        every = self.all_recomputed.step_seconds
        return Row(name, step_seconds, peak_bytes, self.keep_all_seconds, self.bound_seconds, every)

    @property
    def balance(self) -> tuple[int, ...]:
        """The number of blocks of each stage."""
        return tuple(len(stage.blocks) for stage in self.problem.stages)

    @property
    def static_bytes(self) -> tuple[float, ...]:
        """The parameters, gradients and optimizer state of each rank. No budget counts them."""
        return self.step.static_bytes

    def overhead(self, seconds: float) -> float:
        """The share by which a step of so many seconds is longer than one that keeps all."""
        return overhead(seconds, self.keep_all_seconds)
