"""Exempt: what may as well be kept, because to drop it would not lower the peak of memory."""
from __future__ import annotations

from collections.abc import Sequence

from torchckpt.model.action import Action, Kind
from torchckpt.model.orders import Visit
from torchckpt.model.schedule import Schedule

__all__ = ["free_to_keep"]

_MADE, _USED, _FREED = range(3)
_MOMENTS = {
    Kind.FORWARD: (_MADE,),
    Kind.BACKWARD: (_USED, _FREED),
    Kind.INPUT_GRAD: (_USED,),
    Kind.WEIGHT_GRAD: (_FREED,),
}


def free_to_keep(schedule: Schedule) -> frozenset[Visit]:
    """The (stage, micro-batch) whose activations may be kept at the peak that recomputing everything has anyway.

    The last stage of 1F1B holds one micro-batch at a time either way; elsewhere in 1F1B, and in GPipe, it is the
    micro-batch that goes back first.

    >>> sorted(free_to_keep(one_f_one_b(2, 3)))
    [(0, 0), (1, 0), (1, 1), (1, 2)]

    A micro-batch that is recomputed, right before its backward, is alive from there to the end of its backward, and its
    boundary from its forward on; one that is kept is alive from its forward on. All are alike, and boundaries are small
    beside them: of two places with as many micro-batches alive, the one with more boundaries is the higher.
    """
    return frozenset(visit for order in schedule.ranks for visit in _free_on_a_rank(order))


def _free_on_a_rank(order: Sequence[Action]) -> list[Visit]:
    spans: dict[Visit, list[int]] = {}
    for place, (stage, kind, i) in enumerate(order):
        for moment in _MOMENTS.get(kind, ()):
            spans.setdefault((stage, i), [0, 0, 0])[moment] = place
    saved = len(order) + 1  # of boundaries, which count 1: more than there are
    alive = [0] * len(order)
    for made, used, freed in spans.values():
        _add(1, alive, made, freed)
        _add(saved, alive, used, freed)
    peak = max(alive, default=0)
    free = []
    for visit, (made, used, freed) in sorted(spans.items(), key=lambda item: item[1][_USED]):
        if max(alive[made:used], default=0) + saved - 1 <= peak:
            _add(saved, alive, made, used - 1)
            _add(-1, alive, made, freed)
            free.append(visit)
    return free


def _add(amount: int, alive: list[int], first: int, last: int) -> None:
    for place in range(first, last + 1):
        alive[place] += amount
