"""Boundary: the order of a rank cut at its boundaries, and the bytes of a rank from each boundary to the next.

A *piece* is the compute from one boundary to the next: a block, or what comes before or after all blocks. Its bytes
are those of :mod:`~torchckpt.planning.step.memory`, in more places: a forward takes them block by block, and a whole
backward frees them so. Of a block that is away, what moves is free from its release on, and is taken again from its
issue on. No time is in it: a copy that is slow costs seconds, never bytes.

>>> stage = Stage((Block(boundary_bytes=0.25),) * 2)
>>> [piece.takes for piece in pieces_of(stage, Choice(kept=(1,), late=(0,)), Kind.FORWARD)]
[0.25, 1.0, 0.0]
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from torchckpt.planning.order.schedule import BACKWARDS, Action, Kind, Visit
from torchckpt.planning.step.memory import Level
from torchckpt.planning.work.block import Stage
from torchckpt.planning.work.choice import Choice
from torchckpt.planning.work.move import Boundary, Move

__all__ = ["Piece", "Place", "Places", "levels_of_places", "misplaced_moves", "pieces_of", "places_of"]


class Piece(NamedTuple):
    """What a rank computes from one boundary to the next."""

    block: int
    """Of its boundary."""
    seconds: float
    takes: float
    """The bytes that are allocated when it starts."""
    frees: float
    """The bytes that are freed when it ends."""


class Place(NamedTuple):
    """A boundary of a rank, and what happens from there to the next one."""

    boundary: Boundary
    action: Action
    piece: Piece
    issued: Sequence[Move] = ()
    """In the order in which they are used, which is that of their copies back."""
    released: Sequence[Move] = ()


Places = Sequence[Sequence[Place]]
"""For each action of a rank, its places in their order."""


def pieces_of(stage: Stage, choice: Choice, kind: Kind) -> Iterator[Piece]:
    """The pieces of an action of this ``kind`` on a visit of ``stage``, in the order in which they run."""
    parts, before, is_whole = [*stage.blocks, stage.after], stage.before, kind is Kind.BACKWARD
    if kind is Kind.FORWARD:
        for block, part in enumerate(parts):
            held = part.boundary_bytes if block in choice.recomputed else part.saved_bytes
            first = (0.0, 0.0) if block else (before.forward_seconds, before.saved_bytes)
            yield Piece(block, part.forward_seconds + first[0], held + first[1], 0.0)
    elif kind is Kind.RECOMPUTE:
        blocks = [stage.blocks[block] for block in choice.early]
        seconds = sum(block.recompute_seconds for block in blocks)
        yield Piece(0, seconds, sum(block.freed_bytes for block in blocks), 0.0)
    elif kind is Kind.WEIGHT_GRAD:
        yield Piece(0, stage.weight_grad_seconds, 0.0, stage.saved_bytes)
    else:
        for block in reversed(range(len(parts))):
            both = parts[block : block + 1] if block else [parts[0], before]
            seconds = sum(part.input_grad_seconds + is_whole * part.weight_grad_seconds for part in both)
            late = [parts[block]] if block in choice.late else []
            seconds += sum(part.recompute_seconds for part in late)
            frees = is_whole * sum(part.saved_bytes for part in both)
            yield Piece(block, seconds, sum(part.freed_bytes for part in late), frees)


def places_of(
    order: Sequence[Action], stages: Sequence[Stage], choice: Callable[[Visit], Choice], moves: Iterable[Move]
) -> Places:
    """The places of each action of a rank, for the moves of this rank."""
    uses = {action.visit: index for index, action in enumerate(order) if action.kind in BACKWARDS}
    issued, released = defaultdict(list), defaultdict(list)
    for move in sorted(moves, key=lambda move: (uses[move.stage, move.micro_batch], -move.block)):
        issued[move.issue].append(move)
        released[move.release].append(move)

    def places(index: int, action: Action) -> Iterator[Place]:
        for piece in pieces_of(stages[action.stage], choice(action.visit), action.kind):
            boundary = Boundary(index, piece.block)
            yield Place(boundary, action, piece, issued.get(boundary, ()), released.get(boundary, ()))

    return [list(places(index, action)) for index, action in enumerate(order)]


def levels_of_places(places: Places, stages: Sequence[Stage]) -> Iterator[list[Level]]:
    """For each action of a rank, the level of each piece.

    Memory for what is issued is taken before what is released at the same boundary is free, as both happen in this
    order; then the piece takes its own.
    """
    alive = 0.0
    for of_action in places:
        levels = []
        for place in of_action:
            issued = alive + sum([stages[move.stage].moved_bytes(move.block) for move in place.issued])
            alive = issued - sum([stages[move.stage].moved_bytes(move.block) for move in place.released])
            alive += place.piece.takes
            highest = max(alive, issued if place.issued else 0.0)
            alive -= place.piece.frees
            levels.append(Level(highest, alive))
        yield levels


def misplaced_moves(places: Places, moves: Iterable[Move]) -> Iterator[Move]:
    """The moves of a rank whose boundaries are none of its, or not between the forward and the backward of its block in
    this order: release, issue."""
    flat = list(chain.from_iterable(places))
    at = {place.boundary: position for position, place in enumerate(flat)}
    ends = {
        (*place.action.visit, place.piece.block, place.action.kind is Kind.FORWARD): position
        for position, place in enumerate(flat)
        if place.action.kind is Kind.FORWARD or place.action.kind in BACKWARDS
    }
    for move in moves:
        release, issue = at.get(move.release, -1), at.get(move.issue, -1)
        made, used = (ends[move.stage, move.micro_batch, move.block, is_forward] for is_forward in (True, False))
        if not made < release <= issue <= used:
            yield move
