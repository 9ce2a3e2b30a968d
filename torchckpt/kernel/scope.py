"""Scope: what a schedule wants of the regions that one forward of a stage enters."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torchckpt.kernel.flags import thread
from torchckpt.kernel.frame import Around, Frame
from torchckpt.kernel.options import Options
from torchckpt.typing import Function

__all__ = ["Scope"]


class Scope:
    """Gathers the frames of the outermost regions, in the order of their forwards; or has regions keep what they save.

    >>> scope = Scope()
    >>> with scope.entered():
    ...     y = stage(x)
    >>> for frame in reversed(scope.frames):
    ...     frame.recompute()
    """

    def __init__(self, keep: bool = False, around: Around | None = None) -> None:
        self.keep = keep
        """Whether regions are plain calls."""
        self.around = around
        """Entered around each replay of a frame that is gathered, with the deque that it fills."""
        self.frames: list[Frame] = []

    def run(
        self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
    ) -> tuple[Any, Frame | None]:
        """``function(*args, **kwargs)``, as a region unless it is to keep what it saves."""
        if self.keep:
            return function(*args, **kwargs), None
        is_outermost = not any(thread.flags[:2])
        frame = Frame(options)
        outputs = frame.forward(function, args, kwargs)
        if is_outermost:
            frame.around = self.around
            self.frames.append(frame)
        return outputs, frame

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within, on this thread, regions are in this scope."""
        before, thread.scope = thread.scope, self
        try:
            yield
        finally:
            thread.scope = before
