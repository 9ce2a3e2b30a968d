"""Move: when a block that is away leaves its device, and when it comes back; by position, not by time.

A *boundary* is a place between two pieces of the compute of a rank. Copies run beside the compute, in the order in
which they are queued, so a plan says two boundaries of each block that is away and nothing else:

* *release*: the compute waits for the end of the copy to the host, and the bytes are free from here on;
* *issue*: memory is taken for the block, and its copy back is queued.

At a boundary, in this order: copies that are issued there are queued; the compute waits for the releases there, then
(at the start of an action) for the message, then (in a backward) for the copy back of the block that runs next.
"""
from __future__ import annotations

from typing import NamedTuple

__all__ = ["Boundary", "Move"]


class Boundary(NamedTuple):
    """A place in the compute order of a rank.

    In a forward of n blocks, 0 is the start of the action, j is before block j, and n is after the last block. In a
    backward n is the start, then j is before the replay and the backward of block j, from n - 1 down to 0. A recompute
    and weight gradients have one boundary, 0, their start.
    """

    action: int
    """The index of an action in the row of the rank, recomputes and weight gradients included."""
    block: int


class Move(NamedTuple):
    """The way of one block of one visit to the host and back. The copy out is queued when its forward has ended."""

    stage: int
    micro_batch: int
    block: int
    release: Boundary
    """After the forward of the block."""
    issue: Boundary
    """At or after the release, and at or before the backward of the block."""
