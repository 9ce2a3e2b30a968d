"""Replicas: what several processes measured of the same stages and actions, as one plan for all of them needs it.

Replicas of a pipeline may have micro-batches of other sizes: in each state, a visit takes the most bytes of any.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from torchckpt.planning import Action, Block, Stage
from torchckpt.planning.step.memory import Level, Piece

__all__ = ["larger_levels", "larger_stages"]

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def larger_levels(first: Mapping[Action, Level], other: Mapping[Action, Level]) -> dict[Action, Level]:
    """The levels of two processes. Of an action that both ran, each number is the larger one."""
    return _together(first, other, _level)


def larger_stages(first: Mapping[int, Stage], other: Mapping[int, Stage]) -> dict[int, Stage]:
    """The stages of two processes. One that both have takes as much as either, whatever becomes of its blocks."""
    return _together(first, other, _stage)


def _together(
    first: Mapping[_Key, _Value], other: Mapping[_Key, _Value], larger: Callable[[_Value, _Value], _Value]
) -> dict[_Key, _Value]:
    both = {key: larger(value, other[key]) for key, value in first.items() if key in other}
    return {**first, **other, **both}


def _level(first: Level, other: Level) -> Level:
    places = [[(piece.block, piece.is_replay) for piece in level.pieces] for level in (first, other)]
    pieces = map(_piece, first.pieces, other.pieces) if places[0] == places[1] else ()
    highest, left, entered = map(max, first[:3], other[:3])
    return Level(highest, left, entered, tuple(pieces))


def _piece(first: Piece, other: Piece) -> Piece:
    return first._replace(highest=max(first.highest, other.highest), left=max(first.left, other.left))


def _stage(first: Stage, other: Stage) -> Stage:
    if len(first.blocks) != len(other.blocks):  # no plan is for both: a forward of the other will say so
        return first
    before, *blocks, after = map(_block, first.parts, other.parts)
    return replace(first, blocks=tuple(blocks), before=before, after=after)


def _block(first: Block, other: Block) -> Block:
    seconds = max(first.recompute_seconds, other.recompute_seconds)
    boundary, freed = max(first.boundary_bytes, other.boundary_bytes), max(first.freed_bytes, other.freed_bytes)
    larger = replace(first, recompute_seconds=seconds, saved_bytes=boundary + freed, boundary_bytes=boundary)
    if first.moved_bytes is None or other.moved_bytes is None:
        return larger
    moved = max(first.moved_bytes, other.moved_bytes)
    stays = max(first.saved_bytes - first.moved_bytes, other.saved_bytes - other.moved_bytes)
    return replace(larger, saved_bytes=max(larger.saved_bytes, moved + stays), moved_bytes=moved)
