"""Rules: the usual ways to recompute without a plan, under the same budget, for comparison."""
from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torchckpt.model.plan.problem import Problem
from torchckpt.model.plan.search.replay import first_dropped, replay
from torchckpt.model.schedule.action import Action, Kind
from torchckpt.model.schedule.schedule import Schedule

__all__ = ["Rule", "everything", "same_blocks"]


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
    return _quickest(problem, max(len(stage.blocks) for stage in problem.stages))


def same_blocks(problem: Problem) -> Rule:
    """Recompute the first k blocks of every stage, with the k that makes the shortest step of those that fit."""
    most = max(len(stage.blocks) for stage in problem.stages)
    return min((_quickest(problem, blocks) for blocks in range(most + 1)), key=lambda rule: rule.step_seconds)


def _quickest(problem: Problem, blocks: int) -> Rule:
    """The shortest step that drops the first ``blocks``, over all numbers of weight gradients that may wait."""
    choices = first_dropped(problem.schedule, problem.stages, blocks)
    best = Rule(blocks, math.inf)
    for schedule in _delays(problem.schedule):
        found = replay(schedule, problem.stages, problem.links, choices)
        fits = all(peak <= lane.budget_bytes for peak, lane in zip(found.peak_bytes, problem.lanes))
        if fits and found.step_seconds < best.step_seconds:
            best = Rule(blocks, found.step_seconds, found.peak_bytes)
    return best


def _delays(schedule: Schedule) -> Iterator[Schedule]:
    """``schedule`` itself; if it has split backwards, then also with fewer and fewer weight gradients that wait."""
    yield schedule
    waiting = most = 0
    for order in schedule.ranks:
        waiting = 0
        for _, kind, _ in order:
            waiting += (kind is Kind.INPUT_GRAD) - (kind is Kind.WEIGHT_GRAD)
            most = max(most, waiting)
    for few in range(most - 1, -1, -1):
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
