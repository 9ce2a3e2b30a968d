"""Rules: the usual ways to recompute without a plan, under the same budget, for comparison."""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torchckpt.planning.order.schedule import Action, Kind, Schedule
from torchckpt.planning.plan.problem import Problem
from torchckpt.planning.work.choice import first_blocks

__all__ = ["Rule", "everything", "same_blocks"]

_WORK, _FEWEST = 200_000, 8
"""The actions of the orders that are tried; if these are fewer than ``_FEWEST`` orders, then so many."""


@dataclass(frozen=True)
class Rule:
    """The same for all stages and micro-batches; recomputed inside the backward."""

    blocks: int
    """Of each stage, the first ones; stages that have fewer recompute all of theirs."""
    step_seconds: float
    """Infinite if the rule does not fit the budget, however early weight gradients are done."""
    peak_bytes: tuple[float, ...] = ()
    """Per rank."""


def everything(problem: Problem) -> Rule:
    """Recompute every block."""
    return _quickest(problem, [max(len(stage.blocks) for stage in problem.stages)])


def same_blocks(problem: Problem) -> Rule:
    """Recompute the first k blocks of every stage, with the k that makes the shortest step of those that fit."""
    return _quickest(problem, range(max(len(stage.blocks) for stage in problem.stages) + 1))


def _quickest(problem: Problem, counts: Sequence[int]) -> Rule:
    """The shortest step that drops the first blocks, one of ``counts``, over the numbers of weight gradients that may
    wait. In one order, dropping more takes longer: so only the least count that fits is simulated."""
    best = Rule(counts[0], math.inf)
    for schedule in _delays(problem.schedule):
        for blocks in counts:
            step = problem.step(first_blocks(schedule, problem.stages, blocks), schedule)
            if all(peak <= lane.budget_bytes for peak, lane in zip(step.peak_bytes, problem.lanes)):
                if (step.seconds, blocks) < (best.step_seconds, best.blocks):
                    best = Rule(blocks, step.seconds, step.peak_bytes)
                break
    return best


def _delays(schedule: Schedule) -> Iterator[Schedule]:
    """``schedule`` itself; if it has split backwards, then also with fewer and fewer weight gradients that wait, but
    in so many orders as ``_WORK`` allows: these rules are for comparison, and must cost less than the plan."""
    yield schedule
    waiting = most = 0
    for order in schedule.ranks:
        waiting = 0
        for _, kind, _ in order:
            waiting += (kind is Kind.INPUT_GRAD) - (kind is Kind.WEIGHT_GRAD)
            most = max(most, waiting)
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
