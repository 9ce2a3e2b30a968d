"""An interrupt, at whatever line of ``pipe/`` it comes, leaves gradients and statistics as before the call."""
from __future__ import annotations

import functools
import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import torchckpt
from tests.pipe.skips import Pop, Stash
from tests.slow import few, slow
from torchckpt.pipe import batchnorm
from torchckpt.regions.flags import local
from torchckpt.regions.private import hooks_in_force

PACKAGE = str(Path(torchckpt.__file__).parent)


@functools.cache
def signals_come(path: str, line: int) -> bool:
    """Not at the line of a "with": at its end Python would leave it without __exit__, as a signal does not. Not at
    the first line of a "finally": Python looks for signals at calls, of which there is none right before it."""
    above, here = (linecache.getline(path, line - n).strip() for n in (1, 0))
    return not here.startswith("with ") and above != "finally:"


class Interrupts:
    """Counts the lines of ``pipe/`` that run, and raises ``KeyboardInterrupt`` at one of them."""

    def __init__(self, line: int = -1) -> None:
        self.at, self.lines = line, 0
        self.where = ""

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(PACKAGE + "/pipe/") else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and signals_come(frame.f_code.co_filename, frame.f_lineno):
            self.lines += 1
            if self.lines == self.at:
                self.where = f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._line

    @contextmanager
    def on(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)


def a_pipe() -> torchckpt.Pipe:
    torch.manual_seed(0)
    layers = [nn.BatchNorm1d(3), Stash(), nn.Dropout(0.5), nn.BatchNorm1d(3, momentum=None), Pop(), nn.Linear(3, 3)]
    return torchckpt.Pipe(nn.Sequential(*layers), [3, 3], chunks=2, deferred_batch_norm=True)


def state(pipe: nn.Module) -> list[Any]:
    return [*(p.grad for p in pipe.parameters()), *(buffer.clone() for buffer in pipe.buffers())]


def assert_same(ours: list[Any], theirs: list[Any], where: str) -> None:
    assert all(mine is other or torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True)), where


def step(pipe: torchckpt.Pipe, x: torch.Tensor) -> None:
    torch.manual_seed(1)
    pipe.step(x, x, loss_fn=mse_loss)


def forward(pipe: torchckpt.Pipe, x: torch.Tensor) -> None:
    torch.manual_seed(1)
    pipe(x)


@few(1)
@pytest.mark.parametrize("run", [step, forward])
@pytest.mark.parametrize("every", [33, *slow([11])])
def test_an_interrupt_at_any_line_leaves_all_as_before(run: Any, every: int) -> None:
    x, pipe, counted = torch.randn(4, 3), a_pipe(), Interrupts()
    run(a_pipe(), x)  # what torch does once
    with counted.on():
        run(pipe, x)
    after, skips = state(pipe), local.thread.skips  # those that earlier tests have stashed outside of a pipe
    end = range(counted.lines - 60, counted.lines + 1, every // 11)  # the update
    for line in [*range(every, counted.lines, every), *end]:
        pipe, interrupts = a_pipe(), Interrupts(line)
        before = state(pipe)
        with pytest.raises(KeyboardInterrupt), interrupts.on():
            run(pipe, x)
        assert_same(state(pipe), before, interrupts.where)
        assert not batchnorm._under_way, interrupts.where
        assert local.thread.skips is skips, interrupts.where
        assert hooks_in_force(False) is None, interrupts.where
        assert local.thread.flags == (False, False, None), interrupts.where
        run(pipe, x)
        assert_same(state(pipe), after, interrupts.where)
