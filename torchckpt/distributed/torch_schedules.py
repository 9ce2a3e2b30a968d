"""Torch schedules: converts a schedule of ``torch.distributed.pipelining`` to a ``torchckpt.planning.Schedule``."""
from __future__ import annotations

from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe

from torchckpt.distributed.private import Live, micro_batches_of, order_of, stages_of
from torchckpt.errors import Fault, called, check
from torchckpt.planning import Schedule, from_csv, gpipe, one_f_one_b

__all__ = ["schedule_of"]


@called("schedule_of()")
def schedule_of(live: Live) -> Schedule:
    """The order that a schedule object of torch runs, on all ranks, as a :class:`~torchckpt.planning.Schedule`.

    Args:
        live: ``ScheduleGPipe``, ``Schedule1F1B``, or any schedule of several stages per rank. For the first two the
            order comes from ``torchckpt.planning``: torch does not run them from a list of actions, and the list that
            it gives for 1F1B is off by one on the last rank (torch 2.13).

    Raises:
        ArgumentError: ``live`` is no schedule of torch, or torch does not list its order.
    """
    if isinstance(live, (ScheduleGPipe, Schedule1F1B)):
        make = gpipe if isinstance(live, ScheduleGPipe) else one_f_one_b
        return make(stages_of(live)[0].num_stages, micro_batches_of(live))
    order = order_of(live)
    works = "schedule_of(ScheduleInterleaved1F1B(stages, n_microbatches=8, loss_fn=loss_fn))"
    rule = "the argument is no schedule of torch.distributed.pipelining that lists its order"
    check([] if order else [Fault(rule, type(live).__name__, works)])
    rows = (",".join("" if action is None else str(action) for action in order[rank]) for rank in sorted(order))
    return from_csv("\n".join(rows) + "\n", name=type(live).__name__)
