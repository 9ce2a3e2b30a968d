"""Boundary: the order of a rank cut at its boundaries, and the bytes of a rank from each boundary to the next.

From one boundary to the next a rank computes a block, or what comes before or after all blocks. Its bytes are those of
:mod:`~torchckpt.planning.step.memory`, in more places: a forward takes them block by block, and a whole backward frees
them so. Of a block that is away, what moves is free from its release on, and is taken again from its issue on. No time
is in these: a copy that is slow costs seconds, never bytes.

The seconds are those of engines: the compute of one rank, and beside it those that copy blocks to its host and back.
There are two, one for each direction; of a half-duplex link one for both. Each copies what is queued, in that
order. A copy out is queued when the forward of its block has ended. A copy back is queued at the boundary of its issue,
and starts when the copy out has ended. What the compute waits for: :class:`~torchckpt.planning.work.host.Move`. The
search simulates the same in :mod:`~torchckpt.planning.plan.away.rank`.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import NamedTuple, TypeAlias

from torchckpt.planning.figures import Copy
from torchckpt.planning.order.schedule import BACKWARDS, Action, Kind, Visit
from torchckpt.planning.step.memory import Curve, Level
from torchckpt.planning.work.block import Stage
from torchckpt.planning.work.choice import Choice
from torchckpt.planning.work.host import Boundary, Host, Move

__all__ = ["Engines", "Place", "Places", "host_curve", "host_peak", "levels_of_places", "misplaced_moves", "places_of"]


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


class Engines:
    """The compute and the copies of one rank in one run: called for each action in turn with the time at which it may
    start, it returns when that ends, as :func:`~torchckpt.planning.order.program.run` takes it."""

    def __init__(
        self, rank: int, places: Places, late_seconds: Iterable[float | None], stages: Sequence[Stage], host: Host
    ) -> None:
        """``late_seconds``: of each action, if it has a late recompute, which is an action of its own in a program."""
        self.copies: list[Copy] = []
        """In the order in which they were queued."""
        self.waited_seconds = 0.0
        """The seconds that the compute waited for copies."""
        self._rank, self._stages, self._host = rank, stages, host
        self._rest: Iterator[tuple[Sequence[Place], float | None]] = iter(list(zip(places, late_seconds)))
        self._backward_end: float | None = None
        self._now = self._drag = 0.0
        self._free = [0.0, 0.0]
        self._ends: dict[tuple[tuple[int, ...], bool], float] = {}
        self._away = _away(places)

    def __call__(self, start: float) -> float:
        if self._backward_end is not None:
            end, self._backward_end = self._backward_end, None
            return end
        places, late = next(self._rest)
        for place in places:
            self._run(place, start)
        if late is None:
            return self._now
        self._backward_end = self._now  # replays go to and fro with the backward; they are shown together, first
        return start + late

    def _run(self, place: Place, arrived: float) -> None:
        stage, kind, i = place.action
        block, due = (stage, i, place.boundary.block), self._now
        awaited = due
        for move, is_issued in place.moves:
            if is_issued:
                self._copy(move[:3], awaited, is_back=True)
            else:
                awaited = max(awaited, self._ends[move[:3], False])
        if kind in BACKWARDS and block in self._away:
            awaited = max(awaited, self._ends[block, True])
        start = max(arrived, awaited)
        self.waited_seconds += start - max(due, arrived)
        self._now, self._drag = start + place.seconds + self._drag, 0.0
        if kind is Kind.FORWARD and block in self._away:
            self._copy(block, self._now, is_back=False)

    def _copy(self, block: tuple[int, ...], queued: float, is_back: bool) -> None:
        """Queue a copy of a block: stage, micro-batch, index."""
        stage, i, index = block
        amount = self._stages[stage].moved_bytes(index)
        seconds = amount / (self._host.back_rate if is_back else self._host.out_rate)
        engine = 0 if self._host.half_duplex else int(is_back)
        start = max(queued, self._free[engine], self._ends[block, False] if is_back else 0.0)
        self._free[engine] = self._ends[block, is_back] = start + seconds
        self._drag += self._host.drag * seconds
        self.copies.append(Copy(self._rank, stage, i, index, is_back, start, start + seconds, amount))


def _away(places: Places) -> set[tuple[int, ...]]:
    return {move[:3] for place in chain.from_iterable(places) for move, _ in place.moves}


def host_curve(copies: Iterable[Copy]) -> Curve:
    """The bytes of one rank on its host over time: from the start of a copy out to the end of the copy back."""
    changes = [(copy.end_seconds, -copy.bytes) if copy.is_back else (copy.start_seconds, copy.bytes) for copy in copies]
    changes.sort()
    return ((0.0, 0.0), *zip((seconds for seconds, _ in changes), accumulate(amount for _, amount in changes)))


def host_peak(places: Places, stages: Sequence[Stage]) -> float:
    """The most bytes of one rank on its host, by position: of a block from the end of its forward until its backward
    begins. What comes at a boundary comes before what goes there."""
    away, changes = _away(places), [0.0]
    for (_, block), (stage, kind, i), *_ in chain.from_iterable(places):
        if (stage, i, block) in away and (kind is Kind.FORWARD or kind in BACKWARDS):
            moved = stages[stage].moved_bytes(block)
            changes.append(moved if kind is Kind.FORWARD else -moved)
    return max(accumulate(changes))
