"""Schedules and choices of the usual policies, in short."""
from __future__ import annotations

from torchckpt.planning import ahead, arrival, exempt, quickest, with_recompute


def early(schedule, *kept, k=1):
    """``schedule`` with an ``R`` for all visits but ``kept``, each right before a backward."""
    return with_recompute(schedule, exempt(schedule, ahead(schedule), *kept), k)


def late(schedule, *kept):
    """The choices that recompute all visits but ``kept`` inside their backwards."""
    return exempt(schedule, arrival(schedule), *kept)


def placed(schedule, stages, link, *kept, k=1):
    """As :func:`early`, where the step is shortest."""
    return quickest(schedule, exempt(schedule, ahead(schedule), *kept), stages, link, k)
