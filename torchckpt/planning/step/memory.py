"""Memory: the bytes that a rank holds at each position of its order. They follow from the order alone, not from times.

A forward allocates what its visit holds until the backward: everything of its kept blocks, the boundary of the others.
``R`` adds what its early blocks drop. A whole backward counts with its peak from its start to its end, and then frees
everything. If it is split, ``I`` adds what the late blocks drop and frees nothing; ``W`` frees everything. Static bytes
do not count.
"""
from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple, TypeAlias

from torchckpt.planning.order.schedule import Kind
from torchckpt.planning.work.block import Stage
from torchckpt.planning.work.choice import Choice

__all__ = ["Change", "Curve", "Level", "Piece", "changes_of", "curve", "levels_of", "use_bytes"]

Curve: TypeAlias = tuple[tuple[float, float], ...]
"""The bytes alive on one rank, as (seconds, bytes) at each change."""


class Change(NamedTuple):
    """What one action does to the bytes of its rank."""

    takes: float
    """The bytes that are allocated when it starts."""
    frees: float
    """The bytes that are freed when it ends."""


class Piece(NamedTuple):
    """Bytes of a rank during a measured piece of an action: a block, or a replay of it."""

    block: int
    is_replay: bool
    highest: float
    left: float
    tail: float = 0.0
    """Of a replay that ran on to the end of its forward: the most bytes from where it could stop; else any less."""


class Level(NamedTuple):
    """Bytes of a rank during one action, and after it."""

    highest: float
    """The most bytes during the action."""
    left: float
    """The bytes when the action has ended."""
    entered: float = 0.0
    """The most bytes from the end of the action before until it recomputes anything, if that was measured."""
    pieces: tuple[Piece, ...] = ()
    """Those of the action in their order, if they were measured."""


def changes_of(stage: Stage, choice: Choice) -> dict[Kind, Change]:
    """The change by an action of each kind, on a visit of ``stage`` with this choice. What is away leaves later."""
    dropped = choice.early, choice.late
    early, late = (sum([stage.blocks[block].freed_bytes for block in blocks]) for blocks in dropped)
    held = stage.saved_bytes - early - late
    highest = use_bytes(stage, choice.late)
    return {
        Kind.FORWARD: Change(held, 0.0),
        Kind.BACKWARD: Change(highest - held - early, highest),
        Kind.INPUT_GRAD: Change(late, 0.0),
        Kind.WEIGHT_GRAD: Change(0.0, stage.saved_bytes),
        Kind.RECOMPUTE: Change(early, 0.0),
    }


def use_bytes(stage: Stage, late: Collection[int]) -> float:
    """The bytes of a visit at the peak of a whole backward that recomputes the blocks ``late``: it goes from the last
    block to the first, and recomputes each in memory that later ones have freed.

    >>> stage = Stage((Block(boundary_bytes=0.25),) * 2)
    >>> use_bytes(stage, ()), use_bytes(stage, (0,)), use_bytes(stage, (0, 1))
    (2.0, 1.25, 1.25)
    """
    blocks = stage.blocks
    start = stage.saved_bytes - sum(blocks[block].freed_bytes for block in late)
    freed, extra = stage.after.saved_bytes, 0.0
    for block in range(len(blocks) - 1, -1, -1):
        if block in late:
            extra = max(extra, blocks[block].freed_bytes - freed)
            freed += blocks[block].boundary_bytes
        else:
            freed += blocks[block].saved_bytes
    return start + extra


def levels_of(changes: Iterable[Change]) -> Iterator[Level]:
    """The level of each action of one rank."""
    alive = 0.0
    for takes, frees in changes:
        yield Level(alive + takes, alive + takes - frees)
        alive = alive + takes - frees


def curve(levels: Iterable[Level], times: Iterable[tuple[float, float]]) -> Curve:
    """The bytes of one rank over time, for the levels of its actions, and when these started and ended."""
    points = [(0.0, 0.0)]
    for level, (start, end) in zip(levels, times):
        for seconds, amount in ((start, level.highest), (end, level.left)):
            if amount != points[-1][1]:
                points.append((seconds, amount))
    return tuple(points)
