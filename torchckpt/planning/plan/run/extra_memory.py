"""Extra memory: memory that a step needs in addition to the activations of its regions and stages, for each action.

This memory is gradients, messages in transit, losses, and the temporary memory of operations. It is measured in a step
that recomputes everything. A step of a plan needs the same, with one exception: a region uses temporary bytes while it
runs, and a kept region continues to hold most of them.

A whole backward is measured piece by piece (:class:`~torchckpt.planning.step.memory.Piece`): a block whose backward
takes much takes it beside all blocks before it that are kept, while the most that a backward takes may be elsewhere if
all are recomputed. So is a forward; what a block of it takes that is kept is seen from its replay.
"""
from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from torchckpt.planning.order.schedule import Action, Kind, Schedule
from torchckpt.planning.step.boundary import Place, levels_of_places, places_of
from torchckpt.planning.step.memory import Level, Piece
from torchckpt.planning.step.simulated import Step
from torchckpt.planning.work.block import Stage
from torchckpt.planning.work.choice import Choices

__all__ = ["ExtraMemory", "MeasuredStep", "beside_of", "peaks_of", "with_gradients"]


Pieces: TypeAlias = "Mapping[tuple[int, bool], ExtraMemory]"
"""Those of an action, by block and whether it is the replay."""


class ExtraMemory(NamedTuple):
    """Additional bytes of one action, beyond the activations of regions and stages."""

    rises: float
    """Bytes from the start of the action to its highest point."""
    leaves: float
    """Bytes that the action adds for later actions; negative if it frees bytes."""
    enters: float = 0.0
    """The bytes that it rises by until it starts to recompute. A plan may keep more bytes at that moment."""
    pieces: Mapping[tuple[int, bool], ExtraMemory] = {}
    """Those of its pieces, if they were measured."""
    tail: float = 0.0
    """Of the piece of a replay: the bytes that it rises by in what it need not run."""


@dataclass(frozen=True)
class MeasuredStep:
    """One measured step in which every region was recomputed. Bytes are relative to those alive before the step."""

    schedule: Schedule
    choices: Choices
    levels: Mapping[Action, Level]

    def peaks(self) -> list[float]:
        """The peak bytes of each rank."""
        return [max((self._level(action).highest for action in order), default=0.0) for order in self.schedule.ranks]

    def least(self, stages: Sequence[Stage]) -> list[float]:
        """For each rank, by how many bytes its peak was above the peak that ``stages`` predict."""
        return [max(0.0, peak - counted) for peak, counted in zip(self.peaks(), self._step(stages).peak_bytes)]

    def beside(self, stages: Sequence[Stage]) -> dict[Action, ExtraMemory]:
        """The extra memory of each action of the ranks whose bytes were counted."""
        step, extra = self._step(stages), {}
        for rank, order in enumerate(self.schedule.ranks):
            if self.levels.keys().isdisjoint(order):
                continue
            before = counted_left = 0.0
            is_in_pieces = any(self._level(action).pieces for action in order)
            places = _places(step, rank, is_in_pieces)
            in_places = levels_of_places(places, stages)
            for action, counted, at, levels in zip(order, step.levels(rank), places, in_places):
                level = self._level(action)
                left = level.left - counted.left
                enters = max(0.0, level.entered - counted_left - before)
                by_block = {place.boundary.block: each for place, each in zip(at, levels)}
                pieces = dict(_pieces(level, by_block, before))
                extra[action] = ExtraMemory(level.highest - counted.highest - before, left - before, enters, pieces)
                before, counted_left = left, counted.left
        return extra

    def _step(self, stages: Sequence[Stage]) -> Step:
        return Step(self.schedule, tuple(stages), (), self.choices)

    def _level(self, action: Action) -> Level:
        return self.levels.get(action, Level(0.0, 0.0))


def with_gradients(levels: Mapping[Action, Level], gradient_bytes: Mapping[int, float]) -> dict[Action, Level]:
    """The levels of one rank, as if the step had made the gradients that were there before it: those of a stage in the
    first action that makes any of them. ``levels``: in the order in which the actions ran. ``gradient_bytes``: by
    stage, of the gradients that were there."""
    made, left = 0.0, dict(gradient_bytes)
    shifted: dict[Action, Level] = {}
    for action, level in levels.items():
        entered = level.entered + made
        if action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD):
            made += left.pop(action.stage, 0.0)
        pieces = tuple(Piece(*piece[:2], *(amount + made for amount in piece[2:])) for piece in level.pieces)
        shifted[action] = Level(level.highest + made, level.left + made, entered, pieces)
    return shifted


def _pieces(
    level: Level, counted: Mapping[int, Level], before: float
) -> Iterator[tuple[tuple[int, bool], ExtraMemory]]:
    """The extra memory of the pieces of an action, for the level of each of its blocks as it is ``counted``."""
    pieces = _with_passed(level.pieces, list(counted))
    if [piece.block for piece in pieces if not piece.is_replay] != list(counted):  # one after the other
        return
    for block, is_replay, highest, left, tail in pieces:
        left -= counted[block].highest if is_replay else counted[block].left
        rises, rises_in_tail = (amount - counted[block].highest - before for amount in (highest, tail))
        yield (block, is_replay), ExtraMemory(rises, left - before, tail=rises_in_tail)
        before = left


def _with_passed(pieces: Sequence[Piece], blocks: Sequence[int]) -> list[Piece]:
    """``pieces``, with those of blocks that had nothing to replay: a backward passes them in the piece of a later one.
    """
    every, rest = [], list(reversed(blocks))
    for piece in pieces:
        while not piece.is_replay and piece.block in rest and (passed := rest.pop()) != piece.block:
            every.append(piece._replace(block=passed))
            piece = piece._replace(highest=piece.left)
        every.append(piece)
    return every


def beside_of(steps: Sequence[MeasuredStep], stages: Sequence[Stage]) -> dict[Action, ExtraMemory]:
    """The extra memory of each action: where several of ``steps`` have it, of the first."""
    extra: dict[Action, ExtraMemory] = {}
    for step in reversed(steps):
        extra |= step.beside(stages)
    return extra


def peaks_of(step: Step, beside: Mapping[Action, ExtraMemory]) -> tuple[float, ...]:
    """The peak bytes of each rank in a planned step."""
    return tuple(max(highest_bytes(step, rank, beside), default=0.0) for rank in range(len(step.schedule.ranks)))


def highest_bytes(step: Step, rank: int, beside: Mapping[Action, ExtraMemory]) -> Iterator[float]:
    """The most bytes during each action of one rank."""
    replays: dict[int, float] = {}  # by stage, what an R rises by
    for (number, kind, _), measured in beside.items():
        if kind is Kind.RECOMPUTE:
            replays[number] = max(measured.rises, replays.get(number, 0.0))
    before = counted_left = 0.0
    moves = bool(step.places[rank])
    places = step.places[rank] or _places(step, rank, any(extra.pieces for extra in beside.values()))
    in_places = levels_of_places(places, step.stages)
    for action, counted, at, levels in zip(step.schedule.ranks[rank], step.levels(rank), places, in_places):
        choice, stage = step.choice(action.visit), step.stages[action.stage]
        extra = _of(action, beside)
        if action.kind is Kind.FORWARD:
            extra = _less(extra, kept := _last_kept(choice.restored_by(None), stage))
            if kept:  # which it takes as its replay does
                extra = extra._replace(rises=max(extra.rises, extra.leaves + replays.get(action.stage, 0.0)))
        elif action.kind is Kind.RECOMPUTE and not extra.rises:  # nothing was replayed then
            run = beside.get(action._replace(kind=Kind.FORWARD), _NOTHING)
            last = min(choice.restored_by(Kind.RECOMPUTE))  # they are replayed from the last one to the first
            rises = _less(run, stage.blocks[last].freed_bytes).rises - run.leaves
            extra = ExtraMemory(max(rises, replays.get(action.stage, 0.0)), 0.0)
        elif action.kind is Kind.INPUT_GRAD and choice.restored_by(Kind.BACKWARD):  # they were replayed by an R then
            extra = extra._replace(rises=max(extra.rises, replays.get(action.stage, 0.0)))
        highest = counted.highest + before + extra.rises
        pieces = beside.get(action, _NOTHING).pieces
        if action.kind is Kind.FORWARD:
            backward = beside.get(action._replace(kind=Kind.BACKWARD), _NOTHING).pieces
            pieces = {**pieces, **_if_kept(pieces, backward, stage)} if pieces and backward else {}
        if at and pieces and (moves or action.kind in (Kind.FORWARD, Kind.BACKWARD)):
            is_forward = action.kind is Kind.FORWARD  # in which a caller may still hold what is released
            computing = (level.highest if is_forward else level.left + place.frees for place, level in zip(at, levels))
            by_block = [
                (place.boundary.block, level.highest if moves else 0.0, each)
                for place, level, each in zip(at, levels, computing)
            ]
            again = choice.recomputed if moves or is_forward else choice.late
            of_pieces = before + max(_highest_of_pieces(action.kind, by_block, pieces, again))
            highest = of_pieces if moves else max(highest, of_pieces)
        if moves:  # what moves where an action begins moves before anything else
            counted_left = levels[0].left + at[0].frees - at[0].takes
        yield max(highest, counted_left + before + extra.enters)
        before, counted_left = before + extra.leaves, counted.left


def _places(step: Step, rank: int, in_pieces: bool) -> Sequence[Sequence[Place]]:
    """The places of each action of a rank; none, if nothing was measured in pieces."""
    order = step.schedule.ranks[rank]
    return places_of(order, step.stages, step.choice, ()) if in_pieces else [()] * len(order)


def _highest_of_pieces(
    kind: Kind, counted: Sequence[tuple[int, float, float]], pieces: Mapping[tuple[int, bool], ExtraMemory],
    recomputed: Collection[int],
) -> Iterator[float]:
    """The most bytes from each boundary of an action to the next, above the extra memory when it begins. ``counted``:
    the block of each boundary, the most activations from there on, and those of its compute. What is issued there may
    be there before another block is released, while nothing is computed."""
    before = 0.0
    for block, highest, computing in counted:
        piece, replay = pieces[block, False], pieces.get((block, True), _NOTHING)
        rises = piece.rises
        if kind is Kind.FORWARD and block not in recomputed and (block, True) in pieces:
            rises = max(piece.leaves, replay.rises)
        elif kind is Kind.BACKWARD:  # which begins where the replay has ended
            rises += max(0.0, replay.leaves)
            rises = max(rises, replay.rises) if block in recomputed else rises
        yield before + max(highest, computing + rises)
        before += piece.leaves + replay.leaves


def _if_kept(pieces: Pieces, backward: Pieces, stage: Stage) -> Pieces:
    """What a block of a forward rises by where it is kept: what its replay does, to its end if that was measured, and
    what is saved between the block before and it. No fewer bytes are there than where it is not kept."""
    kept = {}
    for (block, is_replay), each in backward.items():
        if is_replay:
            piece = pieces[block, False]
            between = min(max(0.0, piece.leaves), stage.after.saved_bytes)
            least = piece.rises - stage.blocks[block].freed_bytes
            kept[block, True] = ExtraMemory(max(between + max(each.rises, each.tail), least), 0.0)
    return kept


_NOTHING = ExtraMemory(0.0, 0.0)


def _of(action: Action, beside: Mapping[Action, ExtraMemory]) -> ExtraMemory:
    """The extra memory of ``action``. If its backward was measured in two parts, it is that of both together."""
    if action in beside or action.kind is not Kind.BACKWARD:
        return beside.get(action, _NOTHING)
    rises = leaves = 0.0
    for kind in (Kind.INPUT_GRAD, Kind.WEIGHT_GRAD):
        part = beside.get(action._replace(kind=kind), _NOTHING)
        rises, leaves = max(rises, leaves + part.rises), leaves + part.leaves
    return ExtraMemory(rises, leaves)


def _less(extra: ExtraMemory, kept_bytes: float) -> ExtraMemory:
    """The extra memory of a forward, without temporary bytes that it now holds afterwards (``held``)."""
    return ExtraMemory(extra.leaves + max(0.0, extra.rises - extra.leaves - kept_bytes), extra.leaves)


def _last_kept(kept: Sequence[int], stage: Stage) -> float:
    """The bytes of the kept blocks at the end of ``stage``, up to the last one that is dropped."""
    kept_bytes, last = 0.0, len(stage.blocks) - 1
    while last in kept:
        kept_bytes, last = kept_bytes + stage.blocks[last].freed_bytes, last - 1
    return kept_bytes
