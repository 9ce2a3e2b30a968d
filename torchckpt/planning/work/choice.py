"""Choice: what becomes of the blocks of a visit between its forward and its backward.

A *policy* is a function from a schedule to choices: :func:`none`, :func:`arrival`, :func:`ahead`, :func:`first_blocks`.
:func:`exempt` keeps some visits of another one. The planner chooses under a byte budget.
"""
from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from typing import TypeAlias

from torchckpt.errors import Fault, called, check
from torchckpt.planning.order.orders import Visit
from torchckpt.planning.order.schedule import Kind, Schedule
from torchckpt.planning.work.block import Stage

__all__ = [
    "EXEMPTIONS",
    "Choice",
    "Choices",
    "Exemption",
    "State",
    "ahead",
    "arrival",
    "exempt",
    "first_blocks",
    "no_such_visit",
    "none",
    "visit_faults",
]


class State(Enum):
    """What becomes of one block of one visit. Each state is a field of :class:`Choice`."""

    KEPT = "kept"
    EARLY = "early"
    """Recomputed by an ``R`` action, before the gradient arrives."""
    LATE = "late"
    """Recomputed inside the backward, when the gradient has arrived."""


@dataclass(frozen=True)
class Choice:
    """The blocks of one visit, by index and by state. Each block is in one tuple."""

    kept: tuple[int, ...] = ()
    early: tuple[int, ...] = ()
    late: tuple[int, ...] = ()

    @classmethod
    def all(cls, state: State, blocks: int) -> Choice:
        """Every block of a stage in one state."""
        return cls(**{state.value: tuple(range(blocks))})

    def blocks(self, state: State) -> tuple[int, ...]:
        """The blocks in ``state``."""
        return getattr(self, state.value)  # type: ignore[no-any-return]  # a field each

    def is_of(self, blocks: int) -> bool:
        """Whether this is a choice for a stage of so many blocks: each is in one state."""
        return sorted(block for state in State for block in self.blocks(state)) == list(range(blocks))

    @property
    def recomputed(self) -> tuple[int, ...]:
        """The blocks that run twice."""
        return (*self.early, *self.late)

    def __str__(self) -> str:
        return "/".join(str(len(self.blocks(state))) for state in State)


Choices: TypeAlias = Mapping[Visit, "Choice | State"]
"""For each visit, (stage, micro-batch), its choice, or one state for all of its blocks. A visit that is not in it keeps
everything."""

Exemption: TypeAlias = "str | Visit"
"""``"last_stage"``, ``"last_micro_batch"``, ``"first_backward"`` (on each stage, the micro-batch whose backward runs
first), or one (stage, micro-batch). The cheapest micro-batch to keep is the one whose backward runs first: in
torchgpipe the last one, in torch the first one."""

EXEMPTIONS = ("last_stage", "last_micro_batch", "first_backward")


def none(schedule: Schedule) -> Choices:
    """Keep everything."""
    return {}


def arrival(schedule: Schedule) -> Choices:
    """Recompute everything when its gradient has arrived, as ``torch.utils.checkpoint`` does."""
    return dict.fromkeys(_visits(schedule), State.LATE)


def ahead(schedule: Schedule) -> Choices:
    """Recompute everything before its gradient arrives."""
    return dict.fromkeys(_visits(schedule), State.EARLY)


def first_blocks(schedule: Schedule, stages: Sequence[Stage], count: int) -> Choices:
    """Recompute the first ``count`` blocks of every stage, for every micro-batch, when its gradient has arrived."""
    every = [tuple(range(len(stage.blocks))) for stage in stages]
    by_stage = [Choice(kept=blocks[count:], late=blocks[:count]) for blocks in every]
    return {(stage, i): by_stage[stage] for stage, i in _visits(schedule)}


@called("exempt()")
def exempt(schedule: Schedule, choices: Choices, *kept: Exemption) -> Choices:
    """``choices``, but the visits ``kept`` keep everything.

    >>> sorted(exempt(gpipe(2, 2), arrival(gpipe(2, 2)), "last_stage"))
    [(0, 0), (0, 1)]

    Raises:
        ArgumentError: an exemption is unknown, or ``schedule`` does not have the stage or the micro-batch.
    """
    check(_faults(schedule, kept))
    names = {exemption for exemption in kept if isinstance(exemption, str)}
    visits = {exemption for exemption in kept if not isinstance(exemption, str)}
    if "first_backward" in names:
        visits |= _first_backwards(schedule)
    last_stage = schedule.stages - 1 if "last_stage" in names else None
    last_micro_batch = schedule.micro_batches - 1 if "last_micro_batch" in names else None
    return {
        (stage, i): choice
        for (stage, i), choice in choices.items()
        if (stage, i) not in visits and stage != last_stage and i != last_micro_batch
    }


def _visits(schedule: Schedule) -> Iterator[Visit]:
    return ((stage, i) for stage in range(schedule.stages) for i in range(schedule.micro_batches))


def _first_backwards(schedule: Schedule) -> set[Visit]:
    first: dict[int, int] = {}
    for stage, kind, i in (action for order in schedule.ranks for action in order):
        if kind in (Kind.BACKWARD, Kind.INPUT_GRAD):
            first.setdefault(stage, i)
    return set(first.items())


def _faults(schedule: Schedule, kept: Sequence[object]) -> Iterator[Fault]:
    for one in kept:
        if isinstance(one, str) and one not in EXEMPTIONS:
            rule = f"an exemption is not one of {', '.join(EXEMPTIONS)}, or a (stage, micro-batch)"
            yield Fault(rule, repr(one), repr(get_close_matches(one, EXEMPTIONS, n=1, cutoff=0.0)[0]))
    yield from visit_faults(schedule, [one for one in kept if not isinstance(one, str)])


def visit_faults(schedule: Schedule, visits: Collection[object]) -> Iterator[Fault]:
    """A fault for each of ``visits`` that ``schedule`` does not have."""
    for visit in visits:
        if not _is_there(schedule, visit):
            yield Fault(no_such_visit(schedule), repr(visit), "(0, 0)")


def no_such_visit(schedule: Schedule) -> str:
    """What is wrong with a visit that ``schedule`` does not have."""
    return (
        f"the schedule has no such visit: its stages are 0 to {schedule.stages - 1}, "
        f"its micro-batches 0 to {schedule.micro_batches - 1}"
    )


def _is_there(schedule: Schedule, visit: object) -> bool:
    if not (isinstance(visit, tuple) and len(visit) == 2 and all(isinstance(number, int) for number in visit)):
        return False
    stage, i = visit
    return bool(0 <= stage < schedule.stages and 0 <= i < schedule.micro_batches)
