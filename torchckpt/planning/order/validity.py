"""Validity: check whether a schedule can run, and find the actions that are wrong."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from torchckpt.errors import Fault, brief, check, raise_fault
from torchckpt.planning.order.program import Run, compile_program, run
from torchckpt.planning.order.schedule import Action, Kind, Schedule

__all__ = ["Misplaced", "check_order", "check_schedule"]

_BIT = {kind: 1 << bit for bit, kind in enumerate(Kind)}
_F, _B, _I, _W, _R = (_BIT[kind] for kind in Kind)
_NEEDS = {_F: 0, _B: _F, _I: _F, _W: _I, _R: _F}
"""For each action, the actions of the same stage and micro-batch that must be done before it."""
_EXCLUDES = {_F: _F, _B: _B | _I, _I: _B | _I, _W: _B | _W, _R: _R | _B | _I}
"""For each action, the actions of the same stage and micro-batch that must not be done before it."""
_COMPLETE = (_F | _B, _F | _I | _W)
_NAMES = {
    _F: "its forward",
    _B: "its backward",
    _I: "its input gradients",
    _W: "its weight gradients",
    _R: "its recompute",
}


class Misplaced(NamedTuple):
    """A fault of the action at ``position`` in the order of ``rank``. Without a position, a fault of the whole rank."""

    rank: int
    position: int | None
    fault: Fault


def check_schedule(schedule: Schedule, where: Callable[[Misplaced], str] | None = None) -> None:
    """Raise one :class:`~torchckpt.errors.ArgumentError` with all faults of ``schedule``: of single ranks, and ranks
    that wait for each other forever.

    Args:
        where: returns the place of a misplaced action in words. Default: such as ``rank 0, action 3``.
    """
    check_order(schedule, where)
    check(located(stuck(schedule, run(compile_program(schedule))), where))


def check_order(schedule: Schedule, where: Callable[[Misplaced], str] | None = None) -> None:
    """Check as :func:`check_schedule` does, except for ranks that wait for each other."""
    if not isinstance(schedule, Schedule):
        raise_fault(Fault("the schedule is not a Schedule", brief(schedule), "one_f_one_b(4, 8)"))
    check([*_shape(schedule)] or located(misplaced(schedule), where))


def located(actions: Iterable[Misplaced], where: Callable[[Misplaced], str] | None = None) -> list[Fault]:
    """The faults, each with the place of its action in front."""
    where = where or _position
    return [replace(action.fault, wrong=f"{where(action)}: {action.fault.wrong}") for action in actions]


def stuck(schedule: Schedule, played: Run) -> Iterator[Misplaced]:
    """The actions at which ranks wait for each other, forever."""
    for rank in played.stuck:
        position = len(played.starts[rank])
        action = schedule.ranks[rank][position]
        if action.kind is Kind.FORWARD:
            awaited = Action(action.stage - 1, Kind.FORWARD, action.micro_batch)
        else:
            awaited = Action(action.stage + 1, Kind.BACKWARD, action.micro_batch)
        owner = schedule.placement[awaited.stage]
        here = len(played.starts[owner])
        rule = "ranks wait for each other: a deadlock"
        waits = f"{action} waits for {awaited} of rank {owner}, which stands at {schedule.ranks[owner][here]}"
        works = f"{awaited} earlier on rank {owner}, or {action} later here"
        yield Misplaced(rank, position, Fault(rule, waits, works))


def misplaced(schedule: Schedule) -> Iterator[Misplaced]:
    """Every action that its rank cannot run at its position; then the actions that are missing."""
    m, stages = schedule.micro_batches, schedule.stages
    done = bytearray(stages * m)
    for rank, order in enumerate(schedule.ranks):
        for position, action in enumerate(order):
            stage, kind, i = action
            if not (0 <= stage < stages and 0 <= i < m and schedule.placement[stage] == rank):
                yield Misplaced(rank, position, _elsewhere(schedule, action, rank))
                continue
            key, bit = stage * m + i, _BIT[kind]
            if _NEEDS[bit] & ~done[key] or _EXCLUDES[bit] & done[key]:
                yield Misplaced(rank, position, _out_of_order(action, bit, done[key]))
            done[key] |= bit
    yield from _missing(schedule, done)


def _missing(schedule: Schedule, done: bytearray) -> Iterator[Misplaced]:
    for key, state in enumerate(done):
        if state & ~_R not in _COMPLETE:
            stage, i = divmod(key, schedule.micro_batches)
            kind = Kind.FORWARD if not state & _F else Kind.WEIGHT_GRAD if state & _I else Kind.BACKWARD
            what = Action(stage, kind, i)
            rule = "an action is missing: every stage runs every micro-batch forward and backward"
            yield Misplaced(schedule.placement[stage], None, Fault(rule, f"no {what}", f"{what} on this rank"))


def _shape(schedule: Schedule) -> Iterator[Fault]:
    ranks, stages = len(schedule.ranks), schedule.stages
    if not stages or not schedule.micro_batches:
        received = f"{stages} stages, {schedule.micro_batches} micro-batches"
        yield Fault("the schedule has no stage, or no micro-batch", received, "gpipe(1, 1)")
    for stage, rank in enumerate(schedule.placement):
        if not 0 <= rank < ranks:
            rule = f"a stage is on none of the {ranks} ranks"
            yield Fault(rule, f"stage {stage} on rank {rank}", f"placement[{stage}]=0")


def _elsewhere(schedule: Schedule, action: Action, rank: int) -> Fault:
    here = [stage for stage, home in enumerate(schedule.placement) if home == rank]
    last = schedule.micro_batches - 1
    rule = f"the action is not of this rank, which has stages {here} and micro-batches 0 to {last}"
    return Fault(rule, str(action), str(Action(here[0] if here else 0, action.kind, 0)))


def _out_of_order(action: Action, bit: int, state: int) -> Fault:
    missing = _NEEDS[bit] & ~state
    if missing:
        rule = f"{action} stands before {_NAMES[missing]}"
        return Fault(rule, f"{action} before {_of(action, missing)}", f"{_of(action, missing)}, ..., {action}")
    before = next(other for other in _NAMES if _EXCLUDES[bit] & state & other)
    if before == bit:
        return Fault("the action appears twice", f"{action} again", f"one {action}")
    received = f"{action} after {_of(action, before)}"
    if bit == _R:
        return Fault(f"{action} stands after {_NAMES[before]}", received, f"{action}, ..., {_of(action, before)}")
    rule = "a backward is both whole (B) and in two halves (I, W)"
    return Fault(rule, received, f"{action}, without {_of(action, before)}")


def _of(action: Action, bit: int) -> Action:
    kind = next(kind for kind, other in _BIT.items() if other == bit)
    return action._replace(kind=kind)


def _position(action: Misplaced) -> str:
    return f"rank {action.rank}" if action.position is None else f"rank {action.rank}, action {action.position}"
