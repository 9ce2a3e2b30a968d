"""Driven: regions that a plan releases and issues, at boundaries of the compute that it names."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

from torchckpt.regions.flags import local
from torchckpt.regions.moved.order import Ordered

__all__ = ["Driven"]


class Driven:
    """The moves of one step, in place of an :class:`~torchckpt.regions.moved.order.Order`.

    Regions and boundaries have names, which are the caller's. Memory and copies follow from the order in which
    boundaries are reached, however long the copies take.

    Args:
        moves: the name of a region, and of the boundaries where it is released and issued. Those that are issued at one
            boundary are issued in this order.
    """

    def __init__(self, moves: Iterable[tuple[Hashable, Hashable, Hashable]]) -> None:
        self._released: defaultdict[Hashable, list[Hashable]] = defaultdict(list)
        self._issued: defaultdict[Hashable, list[Hashable]] = defaultdict(list)
        self._regions: WeakValueDictionary[Hashable, Ordered] = WeakValueDictionary()
        for region, release, issue in moves:
            self._released[release].append(region)
            self._issued[issue].append(region)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside the block, regions that are made follow these moves, and no others."""
        before, local.thread.order = local.thread.order, self
        try:
            yield
        finally:
            local.thread.order = before

    def begins(self, region: Ordered) -> None:
        """The forward of ``region`` begins: nothing follows from it."""

    def returns(self, region: Ordered) -> None:
        """The backward of ``region`` begins: nothing follows from it."""

    def moves(self, name: Hashable, region: Ordered) -> None:
        """``region`` is the one that moves have this name for."""
        self._regions[name] = region

    def happens_at(self, boundary: Hashable) -> bool:
        """Whether something is still to be done at ``boundary``."""
        return boundary in self._released or boundary in self._issued

    def reaches(self, boundary: Hashable) -> None:
        """The compute is at ``boundary``: issue, then release. What was done is not done again."""
        for name in self._issued.pop(boundary, ()):
            if (region := self._regions.get(name)) is not None:
                region.issue()
        for name in self._released.pop(boundary, ()):
            if (region := self._regions.get(name)) is not None:
                region.release()
