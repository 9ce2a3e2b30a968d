"""Schedule: the order of actions on every rank, as data."""
from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeAlias

from torchckpt.errors import Fault, brief

__all__ = [
    "BACKWARDS", "Action", "Kind", "Schedule", "Visit", "enough", "in_turn", "number_of", "phases", "visits", "whole",
]


class Kind(str, Enum):
    """The kind of an action. ``B`` is a whole backward; ``I`` (input gradients) and ``W`` (weight gradients) are its
    two halves."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    RECOMPUTE = "R"

    def __str__(self) -> str:
        return self.value


BACKWARDS = (Kind.BACKWARD, Kind.INPUT_GRAD)
"""The kinds of action that take a gradient from the next stage."""

Visit: TypeAlias = tuple[int, int]
"""A stage and a micro-batch."""


class Action(NamedTuple):
    """``Action(0, Kind.FORWARD, 3)`` is ``0F3``: stage 0, forward, micro-batch 3."""

    stage: int
    kind: Kind
    micro_batch: int

    @property
    def visit(self) -> Visit:
        return self.stage, self.micro_batch

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """A schedule of a pipeline: the actions of every rank, in order, and nothing else. Immutable; made by functions of
    ``schedules.py``, ``from_csv``, or by hand.

    A rank runs its actions one after the other, and starts an action when all actions that it depends on are done.
    ``jFi`` depends on ``(j-1)Fi``. ``jBi`` and ``jIi`` depend on ``jFi``, on ``(j+1)Bi`` or ``(j+1)Ii``, and on
    ``jRi`` if the schedule has it. ``jWi`` depends on ``jIi``, and ``jRi`` on ``jFi``.
    """

    name: str
    ranks: tuple[tuple[Action, ...], ...]
    """For each rank, its actions in order."""
    placement: tuple[int, ...]
    """For each stage, the rank that runs it."""
    micro_batches: int

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def counts(self) -> str:
        """Its stages and micro-batches, in words."""
        return f"{number_of(self.stages, 'stage')}, {number_of(self.micro_batches, 'micro-batch')}"


def number_of(count: int, noun: str) -> str:
    """A number with its noun: "1 stage", "2 micro-batches"."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{plural if count != 1 else ''}"


def visits(stages: Sequence[int], m: int, together: int) -> list[Visit]:
    """Visits in groups of ``together`` micro-batches. A group goes through all ``stages`` before the next starts."""
    groups = [range(first, min(first + together, m)) for first in range(0, m, together)]
    return [(stage, i) for group in groups for stage in stages for i in group]


def in_turn(
    forwards: Sequence[Visit], backwards: Sequence[Visit], ahead: int, weights_behind: int | None = None
) -> Iterator[Action]:
    """``ahead`` forwards, then one forward and one backward in turn, then the remaining backwards. ``weights_behind``:
    splits each backward. The weight gradients follow this many backwards after the input gradients; 0 is right after
    them. Default: None, whole backwards."""
    ahead = min(ahead, len(forwards))
    kind = Kind.BACKWARD if weights_behind is None else Kind.INPUT_GRAD
    behind = len(backwards) if weights_behind is None else weights_behind
    for stage, i in forwards[:ahead]:
        yield Action(stage, Kind.FORWARD, i)
    for turn, (stage, i) in enumerate(backwards):
        if ahead + turn < len(forwards):
            yield Action(forwards[ahead + turn][0], Kind.FORWARD, forwards[ahead + turn][1])
        yield Action(stage, kind, i)
        if turn >= behind:
            yield Action(backwards[turn - behind][0], Kind.WEIGHT_GRAD, backwards[turn - behind][1])
    if weights_behind is not None:
        for stage, i in backwards[max(0, len(backwards) - behind) :]:
            yield Action(stage, Kind.WEIGHT_GRAD, i)


def phases(plan: Iterable[tuple[int, str]], chunks: dict[str, int], m: int) -> Iterator[Action]:
    """Expand a plan such as ``(3, "Fa"), (2, "Fb Ib Wb")``: three forwards of chunk a, then twice a forward of chunk b
    and its split backward.

    Each chunk takes its micro-batches in order. A word is skipped if its chunk has no micro-batch left. ``Wa`` is the
    oldest pending weight gradient of chunk a; ``W`` is the oldest pending one of any chunk. ``plan``: pairs of a repeat
    count and the words to repeat. ``chunks``: for each lower-case letter, its stage.
    """
    done: Counter[tuple[str, bool]] = Counter()
    pending: deque[tuple[str, int]] = deque()
    for word in (word for times, words in plan for _ in range(times) for word in words.split()):
        kind, chunk = Kind(word[0]), word[1:]
        if kind is Kind.WEIGHT_GRAD:
            oldest = next((entry for entry in pending if not chunk or entry[0] == chunk), None)
            if oldest is not None:
                pending.remove(oldest)
                yield Action(chunks[oldest[0]], kind, oldest[1])
            continue
        i = done[chunk, kind is Kind.FORWARD]
        if i == m:
            continue
        done[chunk, kind is Kind.FORWARD] += 1
        if kind is Kind.INPUT_GRAD:
            pending.append((chunk, i))
        yield Action(chunks[chunk], kind, i)


def whole(name: str, value: object) -> list[Fault]:
    """A fault unless ``value`` is an integer of 1 or more."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return []
    return [Fault(f"{name} is not an integer >= 1", f"{name}={brief(value)}", f"{name}=1")]


def enough(schedule: str, m: int, name: str, stages: int, factor: int = 1) -> list[Fault]:
    """Faults unless both are integers of 1 or more, and there are ``m >= factor * stages`` micro-batches."""
    faults = [*whole(name, stages), *whole("m", m)]
    if faults or m >= factor * stages:
        return faults
    rule = f"m is too small: {schedule} needs m >= {f'{factor} ' if factor > 1 else ''}{name}"
    return [Fault(rule, f"m={m}, {name}={stages}", f"m={factor * stages}, the nearest")]
