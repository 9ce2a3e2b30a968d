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

from torchckpt.planning.order.schedule import BACKWARDS, Action, Kind, Schedule, Visit
from torchckpt.planning.step.memory import Curve, Level
from torchckpt.planning.work.block import Stage
from torchckpt.planning.work.choice import Choice
from torchckpt.planning.work.move import Boundary, Move

__all__ = [
    "Piece", "Place", "curve_of_places", "levels_of_places", "ordered", "pieces_of", "places_of", "spread",
    "wrong_moves",
]


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
    issued: tuple[Move, ...] = ()
    """In the order in which their copies back are queued."""
    released: tuple[Move, ...] = ()


def pieces_of(stage: Stage, choice: Choice, kind: Kind) -> list[Piece]:
    """The pieces of an action of this ``kind`` on a visit of ``stage``, in the order in which they run."""
    if kind is Kind.RECOMPUTE:
        blocks = [stage.blocks[block] for block in choice.early]
        seconds = sum(block.recompute_seconds for block in blocks)
        return [Piece(0, seconds, sum(block.freed_bytes for block in blocks), 0.0)]
    if kind is Kind.WEIGHT_GRAD:
        return [Piece(0, stage.weight_grad_seconds, 0.0, stage.saved_bytes)]
    return list(_forward(stage, choice) if kind is Kind.FORWARD else _backward(stage, choice, kind is Kind.BACKWARD))


def _forward(stage: Stage, choice: Choice) -> Iterator[Piece]:
    for block, part in enumerate((*stage.blocks, stage.after)):
        seconds = part.forward_seconds + (0.0 if block else stage.before.forward_seconds)
        held = part.boundary_bytes if block in choice.recomputed else part.saved_bytes
        yield Piece(block, seconds, held + (0.0 if block else stage.before.saved_bytes), 0.0)


def _backward(stage: Stage, choice: Choice, is_whole: bool) -> Iterator[Piece]:
    for block, part in reversed(list(enumerate((*stage.blocks, stage.after)))):
        parts = (part,) if block else (part, stage.before)
        seconds = sum(each.input_grad_seconds + (each.weight_grad_seconds if is_whole else 0.0) for each in parts)
        frees = sum(each.saved_bytes for each in parts) if is_whole else 0.0
        is_late = block in choice.late
        yield Piece(
            block, seconds + (part.recompute_seconds if is_late else 0.0), part.freed_bytes if is_late else 0.0, frees
        )


def places_of(
    order: Sequence[Action], stages: Sequence[Stage], choice: Callable[[Visit], Choice], moves: Iterable[Move]
) -> list[list[Place]]:
    """The places of each action of a rank, for the moves of this rank."""
    issued, released = defaultdict(list), defaultdict(list)
    for move in moves:
        issued[move.issue].append(move)
        released[move.release].append(move)
    places = []
    for index, action in enumerate(order):
        pieces = pieces_of(stages[action.stage], choice(action.visit), action.kind)
        at = [Boundary(index, piece.block) for piece in pieces]
        columns = zip(at, pieces)
        places.append([Place(b, action, p, tuple(issued.get(b, ())), tuple(released.get(b, ()))) for b, p in columns])
    return places


def levels_of_places(places: Iterable[Iterable[Place]], stages: Sequence[Stage]) -> Iterator[list[Level]]:
    """For each action, the level of each of its pieces.

    Memory for what is issued is taken before what is released at the same boundary is free, as both happen in this
    order; then the piece takes its own.
    """
    alive = 0.0
    for of_action in places:
        levels = []
        for place in of_action:
            begun = alive + sum([stages[move.stage].moved_bytes(move.block) for move in place.issued])
            alive = begun - sum([stages[move.stage].moved_bytes(move.block) for move in place.released])
            alive += place.piece.takes
            highest = max(begun, alive) if place.issued else alive
            alive -= place.piece.frees
            levels.append(Level(highest, alive))
        yield levels


def curve_of_places(
    places: Iterable[Iterable[Place]], times: Iterable[tuple[float, float, float, float]], stages: Sequence[Stage]
) -> Curve:
    """The bytes of a rank over time.

    Args:
        times: of each place: when the compute came to it, when the releases there were done, and the start and the end
            of its piece.
    """
    alive, points = 0.0, [(0.0, 0.0)]
    for place, (due, released, start, end) in zip(chain.from_iterable(places), times):
        changes = [(due, stages[move.stage].moved_bytes(move.block)) for move in place.issued]
        changes += [(released, -stages[move.stage].moved_bytes(move.block)) for move in place.released]
        for seconds, amount in (*changes, (start, place.piece.takes), (end, -place.piece.frees)):
            if amount:
                alive += amount
                points.append((seconds, alive))
    return tuple(points)


def spread(
    places: Iterable[Sequence[Place]], starts: Iterable[float], ends: Iterable[float]
) -> Iterator[tuple[float, float, float, float]]:
    """The times of places for :func:`curve_of_places` where only those of actions are known: each piece has its share
    of its action."""
    for of_action, start, end in zip(places, starts, ends):
        whole = sum(place.piece.seconds for place in of_action)
        scale, now = (end - start) / whole if whole else 0.0, start
        for place in of_action:
            begun, now = now, now + place.piece.seconds * scale
            yield begun, begun, begun, now


def ordered(moves: Iterable[Move], schedule: Schedule, stages: Sequence[Stage]) -> tuple[Move, ...]:
    """``moves`` by rank, then by the boundary of their issue, then by use: the order of their copies back."""
    uses = _uses(schedule)

    def key(move: Move) -> tuple[int, ...]:
        issue, (use, rank) = move.issue, uses[move.stage, move.micro_batch]
        is_forward = schedule.ranks[rank][issue.action].kind is Kind.FORWARD
        return rank, issue.action, issue.block if is_forward else -issue.block, use, -move.block

    return tuple(sorted(moves, key=key))


def _uses(schedule: Schedule) -> dict[Visit, tuple[int, int]]:
    """For each visit, the index of its backward, and its rank."""
    return {
        action.visit: (index, rank)
        for rank, order in enumerate(schedule.ranks)
        for index, action in enumerate(order)
        if action.kind in BACKWARDS
    }


def wrong_moves(
    moves: Sequence[Move], places: Sequence[Sequence[Sequence[Place]]], choices: Callable[[Visit], Choice]
) -> Iterator[str]:
    """What is wrong with ``moves``, in words.

    Args:
        places: for each rank, those of :func:`places_of`.
        choices: of each visit.
    """
    where: dict[tuple[Visit, bool, int], tuple[int, int]] = {}
    visits: dict[Visit, int] = {}
    at: list[dict[Boundary, int]] = []
    for rank, of_rank in enumerate(places):
        at.append({})
        for place in (place for of_action in of_rank for place in of_action):
            position = len(at[rank])
            at[rank][place.boundary] = position
            visits[place.action.visit] = rank
            if place.action.kind is Kind.FORWARD or place.action.kind in BACKWARDS:
                where[place.action.visit, place.action.kind is Kind.FORWARD, place.piece.block] = rank, position
    away = {(visit, block) for visit in visits for block in choices(visit).away}
    listed = [((move.stage, move.micro_batch), move.block) for move in moves]
    if len(set(listed)) != len(listed) or set(listed) != away:
        yield f"{len(listed)} moves of {len(away)} blocks that are away"
        return
    for move, (visit, block) in zip(moves, listed):
        rank, made = where[visit, True, block]
        used = where[visit, False, block][1]
        release, issue = at[rank].get(move.release, -1), at[rank].get(move.issue, -1)
        if not made < release <= issue <= used:
            yield f"stage {visit[0]}, micro-batch {visit[1]}, block {block}: released at {tuple(move.release)}, " \
                  f"issued at {tuple(move.issue)}"
