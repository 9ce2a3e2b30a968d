"""Free to keep: micro-batches whose activations can be kept, because dropping them would not lower the peak."""
from __future__ import annotations

from collections.abc import Sequence

from torchckpt.model.schedule.action import Action, Kind
from torchckpt.model.schedule.orders import Visit
from torchckpt.model.schedule.schedule import Schedule

__all__ = ["free_to_keep"]

_MADE, _USED, _FREED = range(3)
_MOMENTS = {
    Kind.FORWARD: (_MADE,),
    Kind.BACKWARD: (_USED, _FREED),
    Kind.INPUT_GRAD: (_USED,),
    Kind.WEIGHT_GRAD: (_FREED,),
}


def free_to_keep(schedule: Schedule) -> frozenset[Visit]:
    """The (stage, micro-batch) pairs that can be kept without a higher peak than if everything were recomputed.

    In 1F1B these are all micro-batches of the last stage, which holds one at a time anyway. On the other stages of
    1F1B, and in GPipe, it is the micro-batch whose backward runs first.

    >>> sorted(free_to_keep(one_f_one_b(2, 3)))
    [(0, 0), (1, 0), (1, 1), (1, 2)]

    The count assumes that a micro-batch is recomputed right before its backward. Its boundary is then alive from the
    forward to the recompute, and its activations, the boundary among them, from there to the end of the backward.
    Activations that are kept are alive from the forward on. All micro-batches are taken to be of equal size, and
    boundaries to be small: they only decide which of two moments with equally many live micro-batches is higher.
    """
    return frozenset(visit for order in schedule.ranks for visit in _free_on_a_rank(order))


def _free_on_a_rank(order: Sequence[Action]) -> list[Visit]:
    spans: dict[Visit, list[int]] = {}
    for place, (stage, kind, i) in enumerate(order):
        for moment in _MOMENTS.get(kind, ()):
            spans.setdefault((stage, i), [0, 0, 0])[moment] = place
    saved = len(order) + 1  # a micro-batch outweighs all boundaries, each of which counts 1
    alive = [0] * len(order)
    for made, used, freed in spans.values():
        _add(1, alive, made, used - 1)
        _add(saved, alive, used, freed)
    peak = max(alive, default=0)
    free = []
    for visit, (made, used, _) in sorted(spans.items(), key=lambda item: item[1][_USED]):
        if max(alive[made:used], default=0) + saved - 1 <= peak:
            _add(saved - 1, alive, made, used - 1)
            free.append(visit)
    return free


def _add(amount: int, alive: list[int], first: int, last: int) -> None:
    for place in range(first, last + 1):
        alive[place] += amount
