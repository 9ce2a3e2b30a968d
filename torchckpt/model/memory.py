"""Memory: the bytes alive on each rank, from when each action ran."""
from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torchckpt.model.action import Kind
from torchckpt.model.costs import StageCosts
from torchckpt.model.program import recomputed_keys
from torchckpt.model.run import Run
from torchckpt.model.schedule import Schedule, Segments

__all__ = ["Curve", "curves"]

Curve: TypeAlias = tuple[tuple[float, float], ...]


def curves(schedule: Schedule, costs: Sequence[StageCosts], played: Run) -> tuple[Curve, ...]:
    """Per rank its bytes, as (seconds, bytes) at each change.

    A forward takes what it keeps as it starts: ``saved_bytes``, or ``boundary_bytes`` where they are recomputed.
    ``R`` takes its share of ``saved_bytes`` as it starts; the segments that are left to the backward are recomputed
    one at a time in room that the backward has freed. A backward frees everything of its micro-batch as it ends. Of a
    backward in two halves, ``I`` frees nothing and recomputes what ``R`` left; ``W`` frees everything as it ends.
    """
    keys = recomputed_keys(schedule)
    kept = [_changes(own, None) for own in costs]
    segments = schedule.segments or (Segments(),) * schedule.stages
    recomputed = [_changes(own, part) for own, part in zip(costs, segments)]
    static = [0.0] * len(schedule.ranks)
    for stage, rank in enumerate(schedule.placement):
        static[rank] += costs[stage].static_bytes
    m = schedule.micro_batches
    found = []
    for rank, order in enumerate(schedule.ranks):
        alive = static[rank]
        curve = [(0.0, alive)]
        for (stage, kind, i), start, end in zip(order, played.starts[rank], played.ends[rank]):
            takes, frees = (recomputed if keys[stage * m + i] else kept)[stage][kind]
            if takes:
                alive += takes
                curve.append((start, alive))
            if frees:
                alive -= frees
                curve.append((end, alive))
        found.append(tuple(curve))
    return tuple(found)


def _changes(own: StageCosts, part: Segments | None) -> dict[Kind, tuple[float, float]]:
    """Per kind the bytes that it takes as it starts, and those that it frees as it ends."""
    if part is None:
        boundary, early, late = own.saved_bytes, 0.0, 0.0
    else:
        boundary, early = own.boundary_bytes, own.saved_bytes * part.early / part.total
        late = own.saved_bytes - early
    return {
        Kind.FORWARD: (boundary, 0.0),
        Kind.RECOMPUTE: (early, 0.0),
        Kind.BACKWARD: (0.0, boundary + early),
        Kind.INPUT_GRAD: (late, 0.0),
        Kind.WEIGHT_GRAD: (0.0, boundary + early + late),
    }
