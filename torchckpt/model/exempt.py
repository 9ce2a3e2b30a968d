"""Exempt: what may as well be kept, because to drop it would not lower the peak of memory."""
from __future__ import annotations

from collections.abc import Sequence

from torchckpt.model.action import Action, Kind
from torchckpt.model.orders import Visit
from torchckpt.model.schedule import Schedule

__all__ = ["free_to_keep"]

_FIRST = (Kind.BACKWARD, Kind.INPUT_GRAD)
_LAST = (Kind.BACKWARD, Kind.WEIGHT_GRAD)


def free_to_keep(schedule: Schedule) -> frozenset[Visit]:
    """The (stage, micro-batch) whose activations may be kept at the peak that recomputing everything has anyway.

    The last stage of 1F1B holds one micro-batch at a time either way; elsewhere in 1F1B, and in GPipe, it is the
    micro-batch that goes back first.

    >>> sorted(free_to_keep(one_f_one_b(2, 3)))
    [(0, 0), (1, 0), (1, 1), (1, 2)]

    A micro-batch that is recomputed, right before its backward, is alive from there to the end of its backward; one
    that is kept is alive from its forward on. Counted are micro-batches alive at once on each rank, all alike.
    """
    return frozenset(visit for order in schedule.ranks for visit in _free_on_a_rank(order))


def _free_on_a_rank(order: Sequence[Action]) -> list[Visit]:
    spans: dict[Visit, list[int]] = {}
    for place, (stage, kind, i) in enumerate(order):
        span = spans.setdefault((stage, i), [0, 0, 0])
        for index, kinds in enumerate(((Kind.FORWARD,), _FIRST, _LAST)):
            if kind in kinds:
                span[index] = place
    alive = [0] * len(order)
    for _, used, freed in spans.values():
        for place in range(used, freed + 1):
            alive[place] += 1
    peak = max(alive, default=0)
    free = []
    for visit, (made, used, _) in sorted(spans.items(), key=lambda item: item[1][1]):
        if max(alive[made:used], default=0) < peak:
            alive[made:used] = [count + 1 for count in alive[made:used]]
            free.append(visit)
    return free
