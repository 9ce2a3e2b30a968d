"""Exhaustive: the shortest step of all plans of a small pipeline.

Per rank every choice of blocks and every place of recomputes and weight gradients that fits is enumerated; what counts
of it for the other ranks is how many seconds come before, and in, each forward and backward. Of these, the ones that
are nowhere better than another are left out. Then every combination of ranks is run.
"""
from __future__ import annotations

from collections import defaultdict
from itertools import chain, combinations, product
from typing import NamedTuple

from torchckpt.planning.order.schedule import Kind
from torchckpt.planning.plan.problem import problem_of

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD  # noqa: E741  # as in torch


class Visit(NamedTuple):
    """Of a micro-batch on a stage: what was dropped, of that what was recomputed; whether its weights are to do."""

    dropped: frozenset[int]
    early: frozenset[int] = frozenset()
    waits: bool = False


def shortest_seconds(schedule, stages, budget, link=0.0) -> float:
    problem = problem_of(schedule, stages, budget, link)
    options = [rank_options(problem, rank) for rank in range(len(schedule.ranks))]
    return min(step_seconds(problem, chosen) for chosen in product(*options))


def rank_options(problem, rank):
    """Every (seconds before, seconds of) each forward and backward, and after the last, that is of use."""
    order = [action for action in problem.schedule.ranks[rank] if action.kind is not W]
    limit = problem.budget_bytes[rank] * (1 + 1e-11)
    states = {(): {()}}
    for action in order:
        found = defaultdict(set)
        for state, prefixes in states.items():
            for after, slot in between(problem, dict(state), limit):
                for last, seconds in done(problem, after, action, limit):
                    found[tuple(sorted(last.items()))] |= {(*prefix, slot, seconds) for prefix in prefixes}
        states = {state: undominated(prefixes) for state, prefixes in found.items()}
    ends = set()
    for state, prefixes in states.items():
        rest = sum(weight_seconds(problem.stages[j]) for (j, _), visit in state if visit.waits)
        ends |= {(*prefix, rest) for prefix in prefixes}
    return undominated(ends)


def undominated(options):
    found = []
    for one in sorted(options):
        if not any(all(a <= b for a, b in zip(other, one)) for other in found):
            found.append(one)
    return set(found)


def between(problem, state, limit):
    """Some weight gradients, then some recomputes."""
    waiting = [visit for visit, own in state.items() if own.waits]
    for finished in subsets(waiting):
        left = {visit: own for visit, own in state.items() if visit not in finished}
        seconds = sum(weight_seconds(problem.stages[j]) for j, _ in finished)
        open_ = [visit for visit, own in left.items() if own.dropped and not own.early and not own.waits]
        for chosen in product(*(subsets(left[visit].dropped) for visit in open_)):
            after = dict(left)
            redone = 0.0
            for visit, early in zip(open_, chosen):
                after[visit] = left[visit]._replace(early=frozenset(early))
                redone += sum(problem.stages[visit[0]].blocks[at].recompute_seconds for at in early)
            if sum(held(problem.stages[j], own) for (j, _), own in after.items()) <= limit:
                yield after, seconds + redone


def done(problem, state, action, limit):
    """What a forward or backward leaves, and its seconds."""
    j, kind, i = action
    stage = problem.stages[j]
    beside = sum(held(problem.stages[other], own) for (other, k), own in state.items() if (other, k) != (j, i))
    parts = (stage.before, *stage.blocks, stage.after)
    if kind is F:
        for dropped in subsets(range(len(stage.blocks))):
            own = Visit(frozenset(dropped))
            if beside + held(stage, own) <= limit:
                yield {**state, (j, i): own}, sum(part.forward_seconds for part in parts)
        return
    own = state[j, i]
    late = own.dropped - own.early
    seconds = sum(stage.blocks[at].recompute_seconds for at in late)
    seconds += sum(part.input_grad_seconds for part in parts)
    rest = {visit: other for visit, other in state.items() if visit != (j, i)}
    if beside + backward_bytes(stage, late) <= limit:
        yield rest, seconds + weight_seconds(stage)
    if kind is I and beside + stage.saved_bytes <= limit:
        yield {**rest, (j, i): Visit(frozenset(), frozenset(), True)}, seconds


def held(stage, own):
    gone = () if own.waits else own.dropped - own.early
    return stage.saved_bytes - sum(stage.blocks[at].saved_bytes - stage.blocks[at].boundary_bytes for at in gone)


def backward_bytes(stage, late):
    """The highest point, from the last block to the first."""
    alive = held(stage, Visit(late))
    highest, alive = alive, alive - stage.after.saved_bytes
    for at, block in reversed(list(enumerate(stage.blocks))):
        alive += block.saved_bytes - block.boundary_bytes if at in late else 0.0
        highest = max(highest, alive)
        alive -= block.saved_bytes
    return highest


def weight_seconds(stage):
    return sum(part.weight_grad_seconds for part in (stage.before, *stage.blocks, stage.after))


def subsets(things):
    listed = sorted(things)
    return chain.from_iterable(combinations(listed, count) for count in range(len(listed) + 1))


def step_seconds(problem, chosen):
    schedule, last = problem.schedule, problem.schedule.stages - 1
    orders = [[action for action in order if action.kind is not W] for order in schedule.ranks]
    clocks, places = [0.0] * len(orders), [0] * len(orders)
    arrived, wire_free = {}, defaultdict(float)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                j, kind, i = order[places[rank]]
                forth = kind is F
                needs = None if j == (0 if forth else last) else (forth, j, i)
                if needs and needs not in arrived:
                    break
                before, seconds = chosen[rank][2 * places[rank] : 2 * places[rank] + 2]
                clocks[rank] = end = max(clocks[rank] + before, arrived.get(needs, 0.0)) + seconds
                to = j + 1 if forth else j - 1
                if 0 <= to <= last:
                    there = schedule.placement[to]
                    if there != rank:
                        wire_free[rank, there] = end = max(end, wire_free[rank, there]) + travel(problem, j, to)
                    arrived[forth, to, i] = end
                places[rank] += 1
                moved = True
    return max(clock + own[-1] for clock, own in zip(clocks, chosen))


def travel(problem, j, k):
    size = problem.stages[max(j, k)].arriving_bytes
    return problem.links[min(j, k)].latency_seconds + size / problem.links[min(j, k)].bandwidth
