"""Guards: buffers that a forward updates under ``if not is_recomputing()``, and may use behind that.

A replay finds buffers as the forward found them, and updates copies. Under a guard it updates nothing: from a question
on, it has to find what the forward left behind that one. So a forward notes what changes behind each question. Which of
these buffers stand under a guard shows a trial: a replay to the end, whose results are dropped, before the first one.
"""
from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import TypeAlias

from torch import Tensor

from torchckpt.regions.flags import local
from torchckpt.regions.state.layout import Copy, Key, Layout
from torchckpt.tensors import version_of

__all__ = ["Guards"]

_Mark: TypeAlias = "dict[Key, tuple[Tensor, int]]"
"""Buffers, and their versions."""


class Guards:
    """The questions of one forward, and the buffers that it changes behind each."""

    def __init__(self, layout: Layout, keys: Collection[Key]) -> None:
        self._layout, self._keys = layout, keys
        self._before: _Mark | None = None
        """The buffers at the last question."""
        self._left: list[dict[Key, Copy]] = []
        """By question, what changed until the next one, as it was then. Left out is what surely has no guard."""
        self.is_trial = False

    def ask(self) -> None:
        """Code of the forward asks whether it is a replay."""
        self.end()
        self._before = self._mark()

    def end(self) -> None:
        """What is behind the last question has ended."""
        if self._before is not None:
            changed, unguarded = _changed(self._before, self._mark()), self._layout.unguarded
            plain = ((key, tensor) for key, tensor in changed.items() if type(tensor) is Tensor and tensor.is_leaf)
            self._left.append({key: Copy(tensor) for key, tensor in plain if key not in unguarded})
        self._before = None

    @property
    def is_untried(self) -> bool:
        """Whether a trial has to show what stands under a guard."""
        known = self._layout.guarded | self._layout.unguarded
        return any(key not in known for left in self._left for key in left)

    def tensors(self) -> list[Tensor]:
        """Those that a replay may read."""
        copies = chain.from_iterable(left.values() for left in self._left)
        return [copy.values for copy in copies if copy.values is not None]

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Inside the block, which is a replay, modules hold from each question on what the forward left behind it. A
        trial goes on with what it has, and shows what it changes itself."""
        thread, trial, left = local.thread, Guards(self._layout, self._keys), iter(self._left)
        asked = thread.asked
        thread.asked = (trial.ask if self.is_trial else lambda: self._hold(next(left, {})),)
        try:
            yield
        finally:
            thread.asked = asked
        if self.is_trial:
            trial.end()
            self._learn(trial)

    def _learn(self, trial: Guards) -> None:
        """Note what ``trial`` did not change behind a question, though the forward did."""
        layout, known = self._layout, self._layout.guarded | self._layout.unguarded
        for then, now in zip(self._left, trial._left):
            layout.guarded |= then.keys() - now.keys() - known
            layout.unguarded |= then.keys() & now.keys() - known
        layout.unguarded -= layout.guarded

    def _hold(self, left: dict[Key, Copy]) -> None:
        for key in left.keys() & self._layout.guarded:
            self._layout.dict_of(key)[key[1]] = left[key].clone()

    def _mark(self) -> _Mark:
        values = ((key, self._layout.dict_of(key).get(key[1])) for key in self._keys)
        return {key: (value, version_of(value)) for key, value in values if isinstance(value, Tensor)}


def _changed(before: _Mark, after: _Mark) -> dict[Key, Tensor]:
    def is_same(key: Key, tensor: Tensor, version: int) -> bool:
        return key not in before or (before[key][0] is tensor and before[key][1] == version)

    return {key: tensor for key, (tensor, version) in after.items() if not is_same(key, tensor, version)}
