"""Choice: what becomes of the blocks of a visit between its forward and its backward.

A *policy* is a function from a schedule to choices: :func:`none`, :func:`arrival`, :func:`ahead`, :func:`first_blocks`.
:func:`exempt` keeps some visits of another one. The planner chooses under a byte budget.
"""
from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from functools import cached_property
from itertools import chain
from typing import TypeAlias

from torchckpt.errors import Fault, called, check
from torchckpt.planning.order.schedule import BACKWARDS, Action, Kind, Schedule, Visit
from torchckpt.planning.work.block import Stage

__all__ = [
    "EXEMPTIONS", "Choice", "Choices", "Exemption", "State", "ahead", "arrival", "exempt", "first_blocks",
    "free_to_keep", "no_such_visit", "none", "visit_faults",
]


class State(Enum):
    """What becomes of one block of one visit. Each state is a field of :class:`Choice`.

    What tables, stored plans and runs have to know of a state is a property of it. The bytes of a state are counted in
    ``step/memory.py``, its seconds in ``step/simulated.py``, and ``plan/search`` chooses it.
    """

    KEPT = "kept"
    EARLY = "early"
    LATE = "late"
    AWAY = "away"

    @cached_property
    def restored_by(self) -> Kind | None:
        """The kind of action that recomputes the block; None if it is not recomputed.

        ``Kind.BACKWARD`` stands for both forms of a backward, whole and for inputs alone.
        """
        return _RESTORED_BY[self]

    @property
    def words(self) -> str:
        """What the state is, for the legend of a table."""
        return _WORDS[self]


_RESTORED_BY = {State.KEPT: None, State.EARLY: Kind.RECOMPUTE, State.LATE: Kind.BACKWARD, State.AWAY: None}
_WORDS = {
    State.KEPT: "kept", State.EARLY: "recomputed before the gradient arrives", State.LATE: "inside the backward",
    State.AWAY: "away on the host",
}  # fmt: skip
_ON_DEVICE = (State.KEPT, State.EARLY, State.LATE)
_RECOMPUTED = [state for state in State if state.restored_by is not None]
_STATES = {kind: [state for state in State if state.restored_by is kind] for kind in (None, *Kind)}


@dataclass(frozen=True)
class Choice:
    """The blocks of one visit, by index and by state. Each block is in one tuple."""

    kept: tuple[int, ...] = ()
    early: tuple[int, ...] = ()
    late: tuple[int, ...] = ()
    away: tuple[int, ...] = ()

    @classmethod
    def all(cls, state: State, blocks: int) -> Choice:
        """Every block of a stage in one state."""
        return cls(**{state.value: tuple(range(blocks))})

    def blocks(self, state: State) -> tuple[int, ...]:
        """The blocks in ``state``."""
        return getattr(self, state._value_)  # type: ignore[no-any-return]  # a field each

    def is_of(self, blocks: int) -> bool:
        """Whether this is a choice for a stage of so many blocks: each is in one state."""
        return sorted(block for state in State for block in self.blocks(state)) == list(range(blocks))

    def restored_by(self, kind: Kind | None) -> tuple[int, ...]:
        """The blocks whose :attr:`State.restored_by` is ``kind``."""
        return tuple(chain.from_iterable(map(self.blocks, _STATES[kind])))

    @property
    def recomputed(self) -> tuple[int, ...]:
        """The blocks that run twice."""
        return tuple(chain.from_iterable(map(self.blocks, _RECOMPUTED)))

    def __str__(self) -> str:
        return self.text(State if self.away else _ON_DEVICE)

    def text(self, states: Iterable[State]) -> str:
        """The numbers of blocks in ``states``, such as ``3/0/5``."""
        return "/".join(str(len(self.blocks(state))) for state in states)


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
        if kind in BACKWARDS:
            first.setdefault(stage, i)
    return set(first.items())


def _faults(schedule: Schedule, kept: Sequence[object]) -> Iterator[Fault]:
    for exemption in kept:
        if isinstance(exemption, str) and exemption not in EXEMPTIONS:
            rule = f"an exemption is not one of {', '.join(EXEMPTIONS)}, or a (stage, micro-batch)"
            yield Fault(rule, repr(exemption), repr(get_close_matches(exemption, EXEMPTIONS, n=1, cutoff=0.0)[0]))
    yield from visit_faults(schedule, [visit for visit in kept if not isinstance(visit, str)])


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


_MADE, _USED, _FREED = range(3)
_MOMENTS = {
    Kind.FORWARD: (_MADE,),
    Kind.BACKWARD: (_USED, _FREED),
    Kind.INPUT_GRAD: (_USED,),
    Kind.WEIGHT_GRAD: (_FREED,),
}


def free_to_keep(schedule: Schedule) -> frozenset[Visit]:
    """The (stage, micro-batch) pairs that can be kept without a higher peak than if everything were recomputed.

    In 1F1B these are all micro-batches of the last stage, which holds one at a time anyway. On the other stages of
    1F1B, and in GPipe, it is the micro-batch whose backward runs first.

    >>> sorted(free_to_keep(one_f_one_b(2, 3)))
    [(0, 0), (1, 0), (1, 1), (1, 2)]

    The count assumes that a micro-batch is recomputed right before its backward. Its boundary is then alive from the
    forward to the recompute, and its activations, the boundary among them, from there to the end of the backward.
    Activations that are kept are alive from the forward on. All micro-batches are taken to be of equal size, and
    boundaries to be small: they only decide which of two moments with equally many live micro-batches is higher.
    """
    return frozenset(visit for order in schedule.ranks for visit in _free_on_a_rank(order))


def _free_on_a_rank(order: Sequence[Action]) -> list[Visit]:
    spans: dict[Visit, list[int]] = {}
    for place, (stage, kind, i) in enumerate(order):
        for moment in _MOMENTS.get(kind, ()):
            spans.setdefault((stage, i), [0, 0, 0])[moment] = place
    saved = len(order) + 1  # a micro-batch outweighs all boundaries, each of which counts 1
    alive = [0] * len(order)
    for made, used, freed in spans.values():
        _add(1, alive, made, used - 1)
        _add(saved, alive, used, freed)
    peak = max(alive, default=0)
    free = []
    for visit, (made, used, _) in sorted(spans.items(), key=lambda item: item[1][_USED]):
        if max(alive[made:used], default=0) + saved - 1 <= peak:
            _add(saved - 1, alive, made, used - 1)
            free.append(visit)
    return free


def _add(amount: int, alive: list[int], first: int, last: int) -> None:
    for place in range(first, last + 1):
        alive[place] += amount
