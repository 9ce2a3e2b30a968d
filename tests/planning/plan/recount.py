"""Recount: a plan checked and counted again, block by block, by means of its own."""
from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from torchckpt.planning.order.schedule import Kind

F, B, I, W, R = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD, Kind.RECOMPUTE  # noqa: E741  # as in torch


@dataclass
class Recount:
    step_seconds: float
    peak_bytes: list[float]
    recompute_seconds: float


def recount(plan) -> Recount:
    """Raises if the plan is none of what was asked."""
    check_orders(plan)
    ends = times(plan)
    redone = sum(
        plan.problem.stages[stage].blocks[at].recompute_seconds
        for (stage, _), choice in plan.choices.items()
        for at in (*choice.early, *choice.late)
    )
    return Recount(max(ends.values()), [peak(plan, rank) for rank in range(len(plan.schedule.ranks))], redone)


def check_orders(plan):
    given, made = plan.problem.schedule, plan.schedule
    assert (given.placement, given.micro_batches) == (made.placement, made.micro_batches)
    for before, after in zip(given.ranks, made.ranks):
        split = {(j, i) for j, kind, i in before if kind is I}
        plain = [(j, "F" if kind is F else "B", i) for j, kind, i in after if kind in (F, B, I)]
        assert plain == [(j, "F" if kind is F else "B", i) for j, kind, i in before if kind in (F, B, I)]
        assert all((j, i) in split for j, kind, i in after if kind is I)
        seen = set()
        for j, kind, i in after:
            assert (j, kind, i) not in seen
            if kind is R:
                assert plan.choices[j, i].early
                assert (j, F, i) in seen
                assert not {(j, B, i), (j, I, i)} & seen
            if kind is W:
                assert (j, I, i) in seen
            if kind in (B, I) and plan.choices[j, i].early:
                assert (j, R, i) in seen
            seen.add((j, kind, i))
        assert {(j, i) for j, kind, i in after if kind is I} == {(j, i) for j, kind, i in after if kind is W}
    for (j, _), choice in plan.choices.items():
        blocks = sorted((*choice.kept, *choice.early, *choice.late))
        assert blocks == list(range(len(plan.problem.stages[j].blocks)))


def seconds_of(plan, action):
    stage, choice = plan.problem.stages[action.stage], plan.choices[action.stage, action.micro_batch]
    parts = [stage.before, *stage.blocks, stage.after]
    late = sum(stage.blocks[at].recompute_seconds for at in choice.late)
    return {
        F: lambda: sum(part.forward_seconds for part in parts),
        B: lambda: late + sum(part.input_grad_seconds + part.weight_grad_seconds for part in parts),
        I: lambda: late + sum(part.input_grad_seconds for part in parts),
        W: lambda: sum(part.weight_grad_seconds for part in parts),
        R: lambda: sum(stage.blocks[at].recompute_seconds for at in choice.early),
    }[action.kind]()


def travel_seconds(plan, j, k):
    if plan.schedule.placement[j] == plan.schedule.placement[k]:
        return 0.0
    stage, link = plan.problem.stages[max(j, k)], plan.problem.links[min(j, k)]
    size = stage.message_bytes
    if size is None:
        size = stage.blocks[0].boundary_bytes if stage.blocks else 0.0
    return link.latency_seconds + size / link.bandwidth


def times(plan):
    """When each action ends. A wire carries one message after the other, in the order in which they were sent."""
    schedule = plan.schedule
    last = schedule.stages - 1
    ends, arrived, wire_free = {}, {}, defaultdict(float)
    places, clocks = [0] * len(schedule.ranks), [0.0] * len(schedule.ranks)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(schedule.ranks):
            while places[rank] < len(order):
                action = order[places[rank]]
                j, kind, i = action
                inputs = 0.0
                if kind is F and j:
                    inputs = arrived.get(("F", j, i))
                elif kind in (B, I) and j < last:
                    inputs = arrived.get(("B", j, i))
                if inputs is None:
                    break
                end = max(clocks[rank], inputs) + seconds_of(plan, action)
                clocks[rank] = ends[action] = end
                to = j + 1 if kind is F else j - 1
                if kind in (F, B, I) and 0 <= to <= last:
                    there = schedule.placement[to]
                    if there != rank:
                        wire_free[rank, there] = end = max(end, wire_free[rank, there]) + travel_seconds(plan, j, to)
                    arrived["F" if kind is F else "B", to, i] = end
                places[rank] += 1
                moved = True
    assert places == [len(order) for order in schedule.ranks]
    return ends


def peak(plan, rank):
    """Everything that a rank holds, thing by thing."""
    alive: dict[tuple, float] = {}
    highest = 0.0
    for j, kind, i in plan.schedule.ranks[rank]:
        stage, choice = plan.problem.stages[j], plan.choices[j, i]
        if kind is F:
            alive[j, i, "before"], alive[j, i, "after"] = stage.before.saved_bytes, stage.after.saved_bytes
            for at, block in enumerate(stage.blocks):
                alive[j, i, at] = block.saved_bytes if at in choice.kept else block.boundary_bytes
        elif kind in (R, I):
            for at in choice.early if kind is R else choice.late:
                alive[j, i, at] = stage.blocks[at].saved_bytes
        elif kind is B:
            highest = max(highest, sum(alive.values()))
            del alive[j, i, "after"]
            for at in reversed(range(len(stage.blocks))):
                if at in choice.late:
                    alive[j, i, at] = stage.blocks[at].saved_bytes
                highest = max(highest, sum(alive.values()))
                del alive[j, i, at]
            del alive[j, i, "before"]
        highest = max(highest, sum(alive.values()))
        if kind is W:
            for key in [key for key in alive if key[:2] == (j, i)]:
                del alive[key]
    assert not alive
    return highest
