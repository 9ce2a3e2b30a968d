"""Order: when the regions of a thread go to the host, and when they are fetched.

Without a plan, a region is sent when the next one begins, so the last is never sent, and it is let go of when the next
but one begins. In the backward it is fetched when the backward of the one after it begins. So two regions are here at a
time.

A plan has an order of its own, with the same methods, in ``local.thread.order``.
"""
from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Protocol
from weakref import WeakValueDictionary

from torchckpt.regions.flags import local

__all__ = ["Driven", "Order", "Ordered"]


class Ordered(Protocol):
    """A region, as an order sees it."""

    is_released: bool
    has_begun: bool
    """Whether its backward has begun."""

    def send(self) -> None: ...
    def release(self) -> None: ...
    def issue(self) -> None: ...


class Order:
    """The regions of one thread that wait for their backward, by when their forwards began."""

    def __init__(self) -> None:
        self._numbers = count()
        self._regions: WeakValueDictionary[int, Ordered] = WeakValueDictionary()
        self._lock = threading.Lock()
        """Backwards run in the threads of their devices."""

    def begins(self, region: Ordered) -> None:
        """The forward of ``region`` begins."""
        with self._lock:
            here = [each for each in self._regions.values() if not (each.is_released or each.has_begun)]
            self._regions[next(self._numbers)] = region
        for each in here[-1:]:
            each.send()
        for each in here[:-1]:
            each.release()

    def returns(self, region: Ordered) -> None:
        """The backward of ``region`` begins."""
        before: Ordered | None = None
        with self._lock:
            regions = list(self._regions.values())
        for each in regions:
            if each is region:
                break
            before = before if each.has_begun else each
        if before is not None:
            before.issue()


class Driven:
    """The moves of one step that a plan has, in place of an :class:`Order`.

    Regions and boundaries have names, which are the caller's. Memory and copies follow from the order in which
    boundaries are reached, however long the copies take.

    Args:
        moves: the name of a boundary, and of a region that is issued there, or released. What happens at one boundary
            happens in this order.
    """

    def __init__(self, moves: Iterable[tuple[Hashable, Hashable, bool]]) -> None:
        self._moves: defaultdict[Hashable, list[tuple[Hashable, bool]]] = defaultdict(list)
        self._regions: WeakValueDictionary[Hashable, Ordered] = WeakValueDictionary()
        for boundary, region, is_issued in moves:
            self._moves[boundary].append((region, is_issued))

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
        return boundary in self._moves

    def reaches(self, boundary: Hashable, *_: object) -> None:
        """The compute is at ``boundary``. What was done is not done again. Also a hook of a node."""
        for name, is_issued in self._moves.pop(boundary, ()):
            region = self._regions.get(name)
            if region is not None and is_issued:
                region.issue()
            elif region is not None:
                region.release()
