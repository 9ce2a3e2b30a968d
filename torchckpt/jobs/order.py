"""Order: the schedule of a layout."""
from __future__ import annotations

import re

from torchckpt.errors import ArgumentError
from torchckpt.jobs.layout import Layout
from torchckpt.planning.order.schedule import Schedule, Visit, in_turn
from torchckpt.planning.order.schedules import CHUNKS, named_schedule

__all__ = ["schedule_of"]


def schedule_of(layout: Layout) -> Schedule:
    """The order of actions, of one micro-batch where a rank has the whole model. 1F1B may have fewer micro-batches than
    ranks.

    Raises:
        ArgumentError: the micro-batches do not suit the schedule.
    """
    name, ranks, count = layout.schedule, layout.pp, layout.micro_batches
    if ranks == 1:
        return named_schedule("1f1b", 1, 1)
    if name == "zb-2p":
        return _ordered(name, ranks, count, ahead=2, behind=2)
    if name == "1f1b":
        return _ordered(name, ranks, count, extra=layout.ahead)
    try:
        return named_schedule(name, ranks, count, layout.chunks if name in CHUNKS else None)
    except ArgumentError as error:
        sequences = layout.dp * layout.micro_batch
        text = re.sub(r"\bm=(\d+)", lambda m: f"global_batch={int(m[1]) * sequences}", str(error))
        raise ArgumentError(text) from None


def _ordered(name: str, ranks: int, count: int, ahead: int = 1, behind: int | None = None, extra: int = 0) -> Schedule:
    """1F1B with more forwards ahead: so many times as many, and some more. ZB-H2 has twice as many, and its weight
    gradients wait twice as long as those of ZB-H1 (Qi et al. 2024, arXiv:2401.10241, section 2.2)."""
    orders = []
    for rank in range(ranks):
        visits: list[Visit] = [(rank, micro_batch) for micro_batch in range(count)]
        weights = None if behind is None else behind * rank
        orders.append(tuple(in_turn(visits, visits, ahead * (ranks - 1 - rank) + extra, weights)))
    return Schedule(name, tuple(orders), tuple(range(ranks)), count)
