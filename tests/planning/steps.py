"""Timelines to draw: 1F1B in which every stage but the last recomputes right before its backwards."""
from __future__ import annotations

from dataclasses import replace

from torchckpt.planning.figures import Event, Message
from torchckpt.planning.order.schedule import Action, Kind, Schedule
from torchckpt.planning.order.schedules import dualpipe_v, gpipe, interleaved_one_f_one_b, one_f_one_b, zbv
from torchckpt.planning.step.simulated import simulate
from torchckpt.planning.step.timeline import Timeline
from torchckpt.planning.work.block import Block, Link

COSTS = Block(forward_seconds=1, input_grad_seconds=1, weight_grad_seconds=1, recompute_seconds=1, saved_bytes=1)

EMPTY = Timeline(Schedule("empty", ((), ()), (0, 1), 0), (), (), ((), ()))


def recomputing(schedule: Schedule, kept: tuple[int, ...] = ()) -> Schedule:
    def order(actions: tuple[Action, ...]) -> tuple[Action, ...]:
        found: list[Action] = []
        for action in actions:
            if action.kind in (Kind.BACKWARD, Kind.INPUT_GRAD) and action.stage not in kept:
                found.append(action._replace(kind=Kind.RECOMPUTE))
            found.append(action)
        return tuple(found)

    return replace(schedule, ranks=tuple(map(order, schedule.ranks)))


def step(p: int, m: int, link: float = 0.0, recompute: bool = True, costs: Block = COSTS) -> Timeline:
    schedule = one_f_one_b(p, m)
    return simulate(recomputing(schedule, (p - 1,)) if recompute else schedule, costs, Link(link))


def several_stages_a_rank() -> dict[str, Timeline]:
    costs = replace(COSTS, boundary_bytes=0.25)
    return {
        "interleaved": simulate(recomputing(interleaved_one_f_one_b(2, 2, 4)), costs, Link(0.25)),
        "dualpipe_v": simulate(recomputing(dualpipe_v(2, 4)), costs, Link(0.25)),
        "zbv": simulate(zbv(2, 4), costs, Link(0.25)),
    }


def measured() -> Timeline:
    """Times that no grid fits, as they come from a clock; made by hand."""
    schedule = gpipe(2, 1)
    times = (
        (0, "0F0", 0.0, 0.0313),
        (1, "1F0", 0.0347, 0.0652),
        (1, "1B0", 0.0652, 0.1301),
        (0, "0B0", 0.1339, 0.2017),
    )
    actions = {str(action): action for order in schedule.ranks for action in order}
    events = tuple(Event(rank, actions[name], start, end) for rank, name, start, end in times)
    messages = (
        Message(actions["0F0"], 1, 0.0313, 0.0347),
        Message(actions["1B0"], 0, 0.1301, 0.1339),
    )
    memory = (((0.0, 3e9), (0.2017, 0.0)), ((0.0347, 3e9), (0.1301, 0.0)))
    return Timeline(schedule, events, messages, memory)
