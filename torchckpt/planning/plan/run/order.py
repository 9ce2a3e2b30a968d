"""Order: the order of a plan as it can be run.

A plan moves weight gradients. Those of one stage are added up, and rounding depends on the order. So weight gradients
and whole backwards of a stage have to stay in the order of the schedule: a weight gradient that comes too late is moved
earlier, one that comes too early is moved later. Two actions that torch runs as one have no recompute between them.
"""
from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from torchckpt.planning.order.schedule import Action, Kind, Schedule, Visit
from torchckpt.planning.plan.result import PipelinePlan
from torchckpt.planning.step.boundary import places_of
from torchckpt.planning.work.host import Boundary, Move

__all__ = ["before_pairs", "done_whole", "summed_as_given"]

_SUMS = (Kind.BACKWARD, Kind.WEIGHT_GRAD)


def summed_as_given(plan: PipelinePlan, tied: bool = False) -> PipelinePlan:
    """``plan``, with weight gradients in the order in which its schedule adds them up. ``tied``: whether stages of a
    rank share parameters; their gradients then go into one sum. Default: False."""
    ranks = _summed(plan.schedule.ranks, plan.problem.schedule, tied)
    if ranks == plan.schedule.ranks:
        return plan
    return _in_order(plan, ranks)


def _in_order(plan: PipelinePlan, ranks: tuple[tuple[Action, ...], ...]) -> PipelinePlan:
    """``plan`` with its actions in the order of ``ranks``. Moves go with the actions at which they are."""
    schedule = replace(plan.schedule, ranks=ranks)
    moves = tuple(_moved_along(plan, schedule))
    ordered = PipelinePlan.of(plan.problem, schedule, plan.choices, moves)
    return replace(ordered, asked=plan.asked, whole_step=plan.whole_step, counted_rules=plan.counted_rules)


def _moved_along(plan: PipelinePlan, schedule: Schedule) -> Iterator[Move]:
    """The moves of ``plan`` in an order that has its actions elsewhere: between forward and backward as before."""
    choice, stages, placed = plan.step.choice, plan.problem.stages, schedule.placement
    for rank, order in enumerate(schedule.ranks):
        moves = [move for move in plan.moves if placed[move.stage] == rank]
        before, actions = plan.schedule.ranks[rank], {_named(action): index for index, action in enumerate(order)}
        boundaries = [place.boundary for places in places_of(order, stages, choice, ()) for place in places]
        position = {boundary: number for number, boundary in enumerate(boundaries)}
        for move in moves:
            forward, backward = (actions[kind, move.stage, move.micro_batch] for kind in (Kind.FORWARD, Kind.BACKWARD))
            first, last = position[Boundary(forward, move.block + 1)], position[Boundary(backward, move.block)]
            release, issue = (
                position[Boundary(actions[_named(before[index])], block)] for index, block in (move.release, move.issue)
            )
            release = min(max(release, first), last)
            issue = min(max(issue, release), last)
            yield move._replace(release=boundaries[release], issue=boundaries[issue])


def _named(action: Action) -> tuple[Kind, int, int]:
    """A name of the action by which a whole backward is that for inputs alone, too."""
    return Kind.BACKWARD if action.kind is Kind.INPUT_GRAD else action.kind, *action.visit


def done_whole(schedule: Schedule, tied: bool = False) -> Schedule:
    """``schedule`` with whole backwards in place of split ones, but for those whose sums would change their order."""
    ranks = tuple(
        tuple(action._replace(kind=Kind.BACKWARD) if action.kind is Kind.INPUT_GRAD else action
              for action in order if action.kind is not Kind.WEIGHT_GRAD)
        for order in schedule.ranks
    )
    return replace(schedule, ranks=_summed(ranks, schedule, tied))


def _summed(ranks: Sequence[Sequence[Action]], given: Schedule, tied: bool) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(_ordered(*pair, tied)) for pair in zip(ranks, given.ranks))


def _ordered(planned: Sequence[Action], given: Sequence[Action], tied: bool) -> Iterator[Action]:
    """The actions of one rank, with its weight gradients in the order of ``given``."""
    turns: defaultdict[int, deque[Visit]] = defaultdict(deque)  # still to be added, by stage unless tied
    for stage, kind, i in given:
        if kind in _SUMS:
            turns[0 if tied else stage].append((stage, i))
    early: set[Action] = set()  # weight gradients that have to wait for their turn
    done: set[Action] = set()
    begun: set[Visit] = set()
    for action in planned:
        stage, kind, i = action
        if kind not in _SUMS:
            begun |= {(stage, i)} if kind is Kind.INPUT_GRAD else set()
            yield action
            continue
        turn = turns[0 if tied else stage]
        while kind is Kind.BACKWARD and turn[0] != (stage, i) and turn[0] in begun:
            yield _weights(turn[0])
            done.add(_weights(turn.popleft()))
        if action in done:
            continue
        if turn[0] != (stage, i):  # a backward that is yet to come has to be added first
            if kind is Kind.BACKWARD:
                yield Action(stage, Kind.INPUT_GRAD, i)
                begun.add((stage, i))
            early.add(_weights((stage, i)))
            continue
        yield action
        turn.popleft()
        while turn and _weights(turn[0]) in early:
            yield _weights(turn[0])
            done.add(_weights(turn.popleft()))


def _weights(visit: Visit) -> Action:
    return Action(visit[0], Kind.WEIGHT_GRAD, visit[1])


def before_pairs(plan: PipelinePlan, pairs: Collection[tuple[Action, Action]]) -> PipelinePlan:
    """``plan``, with the recomputes that stand inside of a pair before it, as they will run; with those of the pair's
    own forward after it."""
    if not pairs:
        return plan
    ranks = tuple(tuple(_apart(order, pairs)) for order in plan.schedule.ranks)
    return plan if ranks == plan.schedule.ranks else _in_order(plan, ranks)


def _apart(order: Sequence[Action], pairs: Collection[tuple[Action, Action]]) -> Iterator[Action]:
    """``order`` without recomputes inside of ``pairs``, but for one between the forward and the backward of a visit,
    where it must stand."""
    recomputes: list[Action] = []
    first: Action | None = None
    for action in order:
        if action.kind is Kind.RECOMPUTE:
            recomputes.append(action)
            continue
        after: list[Action] = []
        if first is not None:
            is_pair = (first, action) in pairs and action.visit != first.visit
            after = [recompute for recompute in recomputes if is_pair and recompute.visit == first.visit]
            before = [recompute for recompute in recomputes if recompute not in after]
            yield from (*before, first) if is_pair else (first, *before)
        elif recomputes:
            yield from recomputes
        first, recomputes = action, after
    yield from (*filter(None, [first]), *recomputes)
