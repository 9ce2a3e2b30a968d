"""Order: when the regions of a thread that no schedule drives go to the host, and when they are fetched.

A region is sent when the next one begins, so the last is never sent, and it is let go of when the next but one begins.
In the backward it is fetched when the backward of the one after it begins. So two regions are here at a time.

A schedule has an order of its own, with the same methods, in ``local.thread.order``.
"""
from __future__ import annotations

import threading
from itertools import count
from typing import Protocol
from weakref import WeakValueDictionary

__all__ = ["Order", "Ordered"]


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
