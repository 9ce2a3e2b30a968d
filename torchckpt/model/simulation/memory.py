"""Memory: the bytes alive on each rank over time, computed from when each action ran."""
from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torchckpt.model.schedule.action import Kind
from torchckpt.model.schedule.costs import StageCosts
from torchckpt.model.schedule.program import recomputed_keys
from torchckpt.model.schedule.run import Run
from torchckpt.model.schedule.schedule import Schedule, Segments

__all__ = ["Curve", "curves"]

Curve: TypeAlias = tuple[tuple[float, float], ...]


def curves(schedule: Schedule, costs: Sequence[StageCosts], played: Run) -> tuple[Curve, ...]:
    """For each rank, its bytes alive, as (seconds, bytes) at each change.

    When a forward starts, it allocates ``saved_bytes``, or ``boundary_bytes`` if its micro-batch is recomputed. When
    ``R`` starts, it allocates its share of ``saved_bytes``. The backward recomputes the remaining segments one at a
    time, in memory that it has already freed. When a backward ends, it frees all bytes of its micro-batch. If the
    backward is split, ``I`` frees nothing and recomputes the remaining segments; ``W`` frees all bytes when it ends.
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
    """For each kind of action, the bytes that it allocates at its start, and those that it frees at its end."""
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
