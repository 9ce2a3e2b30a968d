"""Holding: what one visit, a micro-batch on a stage, has in memory when some of its blocks are dropped.

A dropped block is recomputed *early*, by an ``R`` action before the gradient arrives, or *late*, inside the backward.
The last of the dropped blocks are the early ones. A backward goes from the last block to the first, so it recomputes
the late ones in memory that later blocks have freed.
"""
from __future__ import annotations

from collections.abc import Sequence

from torchckpt.planning.step.memory import use_bytes
from torchckpt.planning.work.block import Block, Stage

__all__ = ["DROP_ORDERS", "Holding", "Holdings"]

DROP_ORDERS = ("first", "cheap", "small", "large")
"""Which block of a stage is dropped first: the first one, the one with the fewest recompute seconds per byte, the one
that frees the fewest bytes, or the one that frees the most. If all blocks are equal, the orders are the same."""


class Holding:
    """The bytes and seconds of a visit for one choice of dropped blocks. Lists are indexed by how many are early."""

    __slots__ = ("dropped", "early_bytes", "early_seconds", "held_bytes", "kept", "late_seconds", "use_bytes")

    def __init__(self, stage: Stage, dropped: tuple[int, ...]) -> None:
        blocks = stage.blocks
        self.dropped = dropped
        self.kept = len(blocks) - len(dropped)
        self.held_bytes = stage.saved_bytes - sum(blocks[at].freed_bytes for at in dropped)
        """Bytes from the forward to the backward, without early blocks."""
        self.early_bytes: list[float] = []
        """Bytes that ``R`` adds."""
        self.early_seconds: list[float] = []
        self.late_seconds: list[float] = []
        self.use_bytes: list[float] = []
        """Bytes at the peak of a whole backward."""
        for early in range(len(dropped) + 1):
            late, back = dropped[: len(dropped) - early], dropped[len(dropped) - early :]
            self.early_bytes.append(sum(blocks[at].freed_bytes for at in back))
            self.early_seconds.append(sum(blocks[at].recompute_seconds for at in back))
            self.late_seconds.append(sum(blocks[at].recompute_seconds for at in late))
            self.use_bytes.append(use_bytes(stage, late))

    def reserved_bytes(self, blocks: int) -> float:
        """The peak bytes of the backward if ``blocks`` are in memory when it starts, kept or early."""
        return self.use_bytes[min(len(self.dropped), max(0, blocks - self.kept))]


class Holdings:
    """The holdings of one stage, each made when it is first asked for."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.blocks = len(stage.blocks)
        self.full_bytes = stage.saved_bytes
        self.forward_seconds = stage.forward_seconds
        self.input_grad_seconds = stage.input_grad_seconds
        self.weight_grad_seconds = stage.weight_grad_seconds
        self.backward_seconds = stage.input_grad_seconds + stage.weight_grad_seconds
        self.orders = _drop_orders(stage)
        self._by_dropped: dict[tuple[int, ...], Holding] = {}
        self.levels = {
            name: [self.without(order[:count]) for count in range(len(order) + 1)]
            for name, order in self.orders.items()
        }
        """The holding after each number of drops, by drop order."""
        self.droppable = len(self.orders[DROP_ORDERS[0]])
        """The number of blocks that free bytes if they are dropped."""
        self.densities = {
            name: [density(stage.blocks[place]) for place in order] for name, order in self.orders.items()
        }

    def without(self, dropped: Sequence[int]) -> Holding:
        key = tuple(sorted(dropped))
        if key not in self._by_dropped:
            self._by_dropped[key] = Holding(self.stage, key)
        return self._by_dropped[key]


def density(block: Block) -> float:
    """The recompute seconds that a byte of memory saves if the block is kept."""
    return block.recompute_seconds / block.freed_bytes if block.freed_bytes else float("inf")


def _drop_orders(stage: Stage) -> dict[str, tuple[int, ...]]:
    blocks = stage.blocks
    places = [place for place, block in enumerate(blocks) if block.freed_bytes]
    return {
        "first": tuple(places),
        "cheap": tuple(sorted(places, key=lambda place: density(blocks[place]))),
        "small": tuple(sorted(places, key=lambda place: blocks[place].freed_bytes)),
        "large": tuple(sorted(places, key=lambda place: -blocks[place].freed_bytes)),
    }
