"""Scope: how a schedule controls the regions that one forward of a stage enters."""
from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeAlias

from torchckpt.regions.core.frame import Frame
from torchckpt.regions.core.options import Options
from torchckpt.regions.flags import local
from torchckpt.typing import Function

__all__ = ["AroundRegion", "Keep", "Scope", "is_outermost"]

Keep: TypeAlias = "bool | Collection[int]"
"""Which regions run as plain calls and keep their activations: all (True), none (False), or the outermost regions with
these numbers. Regions nested inside a numbered one stay regions, and are recomputed in the backward."""

AroundRegion: TypeAlias = Callable[[int, Frame], AbstractContextManager[None]]


class Scope:
    """Collects the frames of the outermost regions, or lets regions keep their activations (``keep``).

    Outermost regions are numbered from 0, in the order of their forwards.

    >>> scope = Scope()
    >>> with scope.entered():
    ...     y = stage(x)
    >>> for frame in reversed(scope.frames):
    ...     frame.recompute()
    """

    def __init__(self, keep: Keep = False, around: AroundRegion | None = None) -> None:
        self.keep = keep
        self.around = around
        """A context entered around each replay of a collected frame. Gets the region number and the frame."""
        self.frame: Callable[[Options], Frame] = Frame
        """Makes the frame of an outermost region."""
        self.frames: list[Frame] = []
        self.numbers: list[int] = []
        """The region numbers of ``frames``, in the same order."""
        self.regions = 0
        """How many outermost regions were entered so far."""
        self.ended: list[Callable[[int, Any], None]] = []
        """Called when the forward of an outermost region has ended, with its number and its outputs."""
        self._is_inside_kept = False

    @property
    def is_outermost(self) -> bool:
        """Whether a region that is entered now is inside of no other."""
        return not self._is_inside_kept and not any(local.thread.flags[:2])

    def run(
        self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
    ) -> tuple[Any, Frame | None]:
        """Run ``function(*args, **kwargs)`` as a region, or as a plain call if ``keep`` selects it."""
        if self._is_inside_kept and self.keep is True:
            return function(*args, **kwargs), None
        if not self.is_outermost:
            frame = Frame(options)
            return frame.forward(function, args, kwargs), frame
        number, collected = self.regions, None
        self.regions += 1
        function = self.wrapped(number, function)
        if self.keep if isinstance(self.keep, bool) else number in self.keep:
            self._is_inside_kept = True
            try:
                outputs = function(*args, **kwargs)
            finally:
                self._is_inside_kept = False
        else:
            collected = self.frame(options)
            outputs = collected.forward(function, args, kwargs)
            collected.around = None if self.around is None else partial(self.around, number)
            self.frames.append(collected)
            self.numbers.append(number)
        for note in self.ended:
            note(number, outputs)
        return outputs, collected

    def wrapped(self, number: int, function: Function) -> Function:
        """What the outermost region ``number`` calls in place of ``function``."""
        return function

    def keep_result(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run what ``torchckpt.keep`` is called with, outside of regions that drop anything."""
        return function(*args, **kwargs)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside the block, the regions that this thread enters belong to this scope."""
        before, local.thread.scope = local.thread.scope, self
        try:
            yield
        finally:
            local.thread.scope = before


def is_outermost() -> bool:
    """Whether a region that this thread enters now is inside of no other, be it kept."""
    scope: Scope | None = local.thread.scope
    return not local.thread.flags[0] if scope is None else scope.is_outermost
