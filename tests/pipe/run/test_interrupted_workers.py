"""Workers whose caller is interrupted while they run."""
from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pipe.run.test_worker import threads_of
from tests.slow import few
from torchckpt.pipe.run.worker import workers

ROOT = Path(__file__).parents[3]

INTERRUPTED = """
import os, signal, sys, threading, time
import torch
from torch import nn
from tests.pipe.stages import run, stages_of

signal.signal(signal.SIGINT, signal.default_int_handler)  # under nohup it is ignored, and that is inherited
released = threading.Event()

class Waits(nn.Module):
    def forward(self, x):
        print("in the stage", flush=True)
        if not released.wait(20):
            print("the call waited for the stage", flush=True)
        return x

before = threading.active_count()
try:
    run(stages_of([nn.Identity(), Waits()]), torch.ones(4, 2), 4, 0, 1, threads=sys.argv[1] == "threads")
except KeyboardInterrupt:
    print("interrupted", "released" if released.is_set() else "not released", flush=True)
released.set()  # the stage that was left behind ends now, and its thread with it
for thread in threading.enumerate():
    if thread is not threading.current_thread():
        thread.join(30)
print(threading.active_count() - before, "threads more", flush=True)
"""


@pytest.mark.slow
@few(1)
@pytest.mark.parametrize("threads", ["caller", "threads"])
def test_ctrl_c_ends_the_call_while_a_stage_runs_and_in_threads_the_second_one(threads: str) -> None:
    program = [sys.executable, "-c", INTERRUPTED, threads]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in the stage\n"
        process.send_signal(signal.SIGINT)
        if threads == "threads":
            time.sleep(0.5)  # by then it waits for the stage
            process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=120)
    # The stage waits until the call has ended: had the call waited for it, it would say "in the stage" four times.
    assert rest.splitlines() == ["interrupted not released", "0 threads more"]
    assert process.returncode == 0


@contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Yields what interrupts this thread, until the end of the block."""
    here, is_inside = threading.get_ident(), threading.Event()
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    is_inside.set()
    try:
        yield lambda: signal.pthread_kill(here, signal.SIGALRM) if is_inside.is_set() else None
    finally:
        is_inside.clear()
        signal.signal(signal.SIGALRM, before)


def test_workers_that_two_interrupts_left_at_work_are_not_used_again() -> None:
    output = torch.ones(2, requires_grad=True).sin()
    goes_on, left = threading.Event(), threads_of(1, output)

    def waits() -> None:
        interrupt()
        for _ in range(100):  # two at once are one
            if goes_on.wait(0.3):  # by then the caller waits for this
                break
            interrupt()

    with pytest.raises(KeyboardInterrupt), interruptible() as interrupt, workers(1) as start:
        start([(0, waits)])
    assert not threads_of(1) & left
    goes_on.set()


def test_an_interrupt_comes_when_no_task_runs_any_more() -> None:
    ran: list[str] = []

    def goes_on() -> None:
        interrupt()
        time.sleep(0.3)  # an exception that does not wait comes in this time
        ran.append("the task that ran")

    with pytest.raises(KeyboardInterrupt), interruptible() as interrupt, workers(2) as start:
        start([(0, goes_on), (0, lambda: ran.append("one that had not begun"))])
    assert ran == ["the task that ran"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("torchckpt worker")]


def test_tasks_end_before_an_error_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where no other thread can start."""
    ran, begun, submit = [], threading.Event(), ThreadPoolExecutor.submit

    def goes_on() -> None:
        begun.set()
        time.sleep(0.3)
        ran.append("the task that ran")

    def submit_one(self: Any, *args: Any) -> Any:
        if args[2] == 1:
            begun.wait(60)
            raise RuntimeError("can't start new thread")
        return submit(self, *args)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit_one)
    with pytest.raises(RuntimeError, match="can't start new thread"), workers(2) as start:
        start([(0, goes_on), (1, goes_on)])
    assert ran == ["the task that ran"]
