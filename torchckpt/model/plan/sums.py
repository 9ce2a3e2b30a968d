"""Sums: weight gradients in the order of the schedule, as the last bits of a sum depend on the order of its terms.

A plan moves weight gradients. Those of one stage are added up, so among themselves, and among the whole backwards of
the stage, they keep the order that the schedule gives them: one that comes too late for that is done earlier, and one
that comes too early is done later.
"""
from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torchckpt.model.action import Action, Kind
from torchckpt.model.plan.result import PipelinePlan

__all__ = ["summed_as_given"]

_SUMS = (Kind.BACKWARD, Kind.WEIGHT_GRAD)


def summed_as_given(plan: PipelinePlan) -> PipelinePlan:
    """``plan``, with weight gradients in the order in which its schedule adds them up."""
    given = plan.problem.schedule
    ranks = tuple(tuple(_ordered(*pair)) for pair in zip(plan.schedule.ranks, given.ranks))
    return plan if ranks == plan.schedule.ranks else replace(plan, schedule=replace(plan.schedule, ranks=ranks))


def _ordered(planned: Sequence[Action], given: Sequence[Action]) -> Iterator[Action]:
    """Of one rank."""
    turns: defaultdict[int, deque[int]] = defaultdict(deque)  # by stage, the micro-batches that are still to add up
    for stage, kind, i in given:
        if kind in _SUMS:
            turns[stage].append(i)
    early: set[Action] = set()  # weight gradients that have to wait for their turn
    done: set[Action] = set()
    begun: set[tuple[int, int]] = set()
    for action in planned:
        stage, kind, i = action
        if kind not in _SUMS:
            begun |= {(stage, i)} if kind is Kind.INPUT_GRAD else set()
            yield action
            continue
        turn = turns[stage]
        while kind is Kind.BACKWARD and turn[0] != i and (stage, turn[0]) in begun:
            yield _weights(stage, turn[0])
            done.add(_weights(stage, turn.popleft()))
        if action in done:
            continue
        if turn[0] != i:  # its turn is after a backward that is still to come
            if kind is Kind.BACKWARD:
                yield Action(stage, Kind.INPUT_GRAD, i)
                begun.add((stage, i))
            early.add(_weights(stage, i))
            continue
        yield action
        turn.popleft()
        while turn and _weights(stage, turn[0]) in early:
            yield _weights(stage, turn[0])
            done.add(_weights(stage, turn.popleft()))


def _weights(stage: int, i: int) -> Action:
    return Action(stage, Kind.WEIGHT_GRAD, i)
