"""Script: a script is run as Python runs it, and what autograd keeps is counted for each of its backward passes."""
from __future__ import annotations

import functools
import runpy
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from torchckpt.testing.kept import KeptStorages
from torchckpt.testing.lines import SavedByLine, lines_of

__all__ = ["BackwardPasses", "run_script"]


class _Enough(BaseException):
    """Ends the script. No ``Exception``, which a script may catch."""


class BackwardPasses:
    """While it is entered, it records what autograd keeps for each backward pass of this thread, in ``passes``.

    A pass begins where the one before ended. Passes inside of a pass, and those that make a graph of gradients
    (``create_graph``), belong to the pass around them or after them.

    Args:
        most: the number of passes after which the script is ended.
    """

    def __init__(self, most: int) -> None:
        self.passes: list[SavedByLine] = []
        self.elsewhere = 0
        """How many backward passes other threads ran. They are not seen."""
        self._most, self._is_inside, self._thread = most, False, threading.get_ident()
        self._kept = KeptStorages()

    @contextmanager
    def entered(self) -> Iterator[None]:
        functions = {name: getattr(torch.autograd, name) for name in ("backward", "grad")}
        for name, function in functions.items():
            setattr(torch.autograd, name, self._watched(function))
        try:
            with self._kept.entered():
                yield
        finally:
            for name, function in functions.items():
                setattr(torch.autograd, name, function)

    def rest(self) -> SavedByLine:
        """What autograd has kept since the last pass."""
        return lines_of(self._kept)

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                self.elsewhere += 1
                return function(*args, **kwargs)
            if self._is_inside or kwargs.get("create_graph"):
                return function(*args, **kwargs)
            self._is_inside = True
            try:
                results = function(*args, **kwargs)
            finally:
                self._is_inside = False
            self._end()
            return results

        return watched

    def _end(self) -> None:
        self.passes.append(self.rest())
        self._kept.restart()
        if len(self.passes) >= self._most:
            raise _Enough


def run_script(path: str, arguments: Sequence[str], passes: BackwardPasses) -> BaseException | None:
    """Run the script at ``path`` as ``python path arguments`` does, until it ends or there are enough ``passes``.

    Returns:
        What the script raised, ``SystemExit`` included; its traceback begins in the script.
    """
    before = sys.argv[:], sys.path[:]
    sys.argv[:], sys.path[0] = [path, *arguments], str(Path(path).resolve().parent)
    try:
        with passes.entered():
            runpy.run_path(path, run_name="__main__")
    except _Enough:
        return None
    except (Exception, SystemExit) as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != path:
            trace = trace.tb_next
        return error.with_traceback(trace)
    finally:
        sys.argv[:], sys.path[:] = before
    return None
