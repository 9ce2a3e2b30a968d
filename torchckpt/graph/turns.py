"""Turns: one thread traces at a time, and no other calls a model meanwhile: its modules hold tensors of the trace."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition, get_ident

__all__ = ["TURNS", "Turns"]


class Turns:
    """Whoever is calling may call, and trace, again inside; whoever is tracing may do both."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._callers: Counter[int] = Counter()  # by thread, how many calls it is in
        self._waiting: set[int] = set()
        self._tracer, self._depth = 0, 0

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Wait until no other thread traces. What modules hold inside is theirs."""
        me = get_ident()
        with self._changed:
            self._changed.wait_for(lambda: self._tracer in (0, me))
            self._callers[me] += 1
        try:
            yield
        finally:
            with self._changed:
                self._callers[me] -= 1
                self._callers += Counter()  # who is in no call leaves
                self._changed.notify_all()

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Wait until no other thread traces, or calls a model. A caller that waits to trace, too, stands still."""
        me = get_ident()
        with self._changed:
            self._waiting.add(me)
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._tracer in (0, me) and set(self._callers) <= self._waiting)
            finally:
                self._waiting.discard(me)
            self._tracer, self._depth = me, self._depth + 1
        try:
            yield
        finally:
            with self._changed:
                self._depth -= 1
                self._tracer = me if self._depth else 0
                self._changed.notify_all()


TURNS = Turns()
"""Of all models: what torch keeps while it traces, its tracer and its notes, is not by thread either."""
