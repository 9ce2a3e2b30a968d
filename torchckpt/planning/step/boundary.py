"""Boundary: the order of a rank cut at its boundaries, and the bytes of a rank from each boundary to the next.

From one boundary to the next a rank computes a block, or what comes before or after all blocks. Its bytes are those of
:mod:`~torchckpt.planning.step.memory`, in more places: a forward takes them block by block, and a whole backward frees
them so. Of a block that is away, what moves is free from its release on, and is taken again from its issue on. No time
is in it: a copy that is slow costs seconds, never bytes.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple, TypeAlias

from torchckpt.planning.order.schedule import BACKWARDS, Action, Kind, Visit
from torchckpt.planning.step.memory import Level
from torchckpt.planning.work.block import Stage
from torchckpt.planning.work.choice import Choice
from torchckpt.planning.work.host import Boundary, Move

__all__ = ["Place", "Places", "levels_of_places", "misplaced_moves", "places_of"]


class Place(NamedTuple):
    """A boundary of a rank, and what happens from there to the next one."""

    boundary: Boundary
    action: Action
    seconds: float
    """Of compute."""
    takes: float
    """The bytes that are allocated when the compute starts."""
    frees: float
    """The bytes that are freed when it ends."""
    moves: Sequence[tuple[Move, bool]] = ()
    """What happens there before that, in this order: each move, and whether it is issued, or released."""


Places: TypeAlias = "Sequence[Sequence[Place]]"
"""For each action of a rank, its places in their order."""


def places_of(
    order: Sequence[Action], stages: Sequence[Stage], choice: Callable[[Visit], Choice], moves: Iterable[Move]
) -> Places:
    """The places of each action of a rank, for the moves of this rank."""
    uses = {action.visit: index for index, action in enumerate(order) if action.kind in BACKWARDS}
    makes = {action.visit: index for index, action in enumerate(order) if action.kind is Kind.FORWARD}
    happens: defaultdict[Boundary, list[tuple[Move, bool]]] = defaultdict(list)
    moves = sorted(moves, key=lambda move: (makes[move.stage, move.micro_batch], move.block))
    for move in moves:
        happens[move.release].append((move, False))
    behind = {}
    for move in moves:
        released = [other for other, _ in happens[move.issue]]
        own = released.index(move) + 1 if move in released else 0
        behind[move] = min(max(move.behind, own), len(released))
    moves.sort(key=lambda move: (behind[move], uses[move.stage, move.micro_batch], -move.block))
    for move in reversed(moves):
        happens[move.issue].insert(behind[move], (move, True))

    def places(index: int, action: Action) -> Iterator[Place]:
        for block, seconds, takes, frees in _pieces(stages[action.stage], choice(action.visit), action.kind):
            at = Boundary(index, block)
            yield Place(at, action, seconds, takes, frees, happens.get(at, ()))

    return [list(places(index, action)) for index, action in enumerate(order)]


def _pieces(stage: Stage, choice: Choice, kind: Kind) -> Iterator[tuple[int, float, float, float]]:
    """The block of each boundary of an action, and the seconds, what is taken, and what is freed from there on."""
    parts, is_whole = [*stage.blocks, stage.after], kind is Kind.BACKWARD
    if kind is Kind.FORWARD:
        for block, part in enumerate(parts):
            first = (0.0, 0.0) if block else (stage.before.forward_seconds, stage.before.saved_bytes)
            held = part.boundary_bytes if block in choice.recomputed else part.saved_bytes
            yield block, first[0] + part.forward_seconds, first[1] + held, 0.0
    elif kind is Kind.RECOMPUTE:
        blocks = [stage.blocks[block] for block in choice.early]
        yield 0, sum(block.recompute_seconds for block in blocks), sum(block.freed_bytes for block in blocks), 0.0
    elif kind is Kind.WEIGHT_GRAD:
        yield 0, stage.weight_grad_seconds, 0.0, stage.saved_bytes
    else:
        for block in reversed(range(len(parts))):
            both = [parts[block], *([] if block else [stage.before])]
            late = [parts[block]] if block in choice.late else []
            seconds = sum(part.recompute_seconds for part in late)
            seconds += sum(part.input_grad_seconds + is_whole * part.weight_grad_seconds for part in both)
            frees = is_whole * sum(part.saved_bytes for part in both)
            yield block, seconds, sum(part.freed_bytes for part in late), frees


def levels_of_places(places: Places, stages: Sequence[Stage]) -> Iterator[list[Level]]:
    """For each action of a rank, the level from each of its boundaries to the next, with what happens there."""
    alive = 0.0
    for of_action in places:
        levels = []
        for place in of_action:
            highest = 0.0
            for move, is_issued in place.moves:
                moved = stages[move.stage].moved_bytes(move.block)
                alive += moved if is_issued else -moved
                highest = max(highest, alive if is_issued else 0.0)
            alive += place.takes
            highest = max(highest, alive)
            alive -= place.frees
            levels.append(Level(highest, alive))
        yield levels


def misplaced_moves(places: Places, moves: Iterable[Move]) -> Iterator[Move]:
    """The moves of a rank whose release and issue are no boundaries of it, or stand not in this order between the
    forward and the backward of their block."""
    steps: defaultdict[tuple[int, ...], list[str]] = defaultdict(list)
    for (_, block), (stage, kind, i), *_, there in chain.from_iterable(places):
        for move, is_issued in there:
            steps[move[:3]].append("issued" if is_issued else "released")
        if kind is Kind.FORWARD or kind in BACKWARDS:
            steps[stage, i, block].append("made" if kind is Kind.FORWARD else "used")
    yield from (move for move in moves if steps[move[:3]] != ["made", "released", "issued", "used"])
