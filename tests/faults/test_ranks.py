"""A rank that is killed, stopped or raises, in every phase of a schedule with a budget: the others end, or go on.

Who ends says in which phase or at which action, within the timeout of the group; no process is left.
"""
from __future__ import annotations

import datetime
import itertools
import logging
import os
import re
import signal
import time
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from tests.distributed.ranks import started
from tests.settings import with_gloo
from torchckpt import checkpoint_module
from torchckpt.distributed import phases, recompute_ahead
from torchckpt.distributed.phases import FIRST_STEPS
from torchckpt.errors import ScheduleError

pytestmark = with_gloo

STEPS, MICRO_BATCHES, FAULTY = FIRST_STEPS + 3, 8, 1
PHASES = {"measuring": 1, "planning": FIRST_STEPS - 1, "planned": FIRST_STEPS + 1}
"""By phase, the step in which the fault is."""


class Case(NamedTuple):
    fault: str
    """"killed", "stopped" or "raises"."""
    phase: str
    ranks: int = 2
    timeout: float = 10.0
    """Seconds, of the group."""
    stop: float = 0.0
    """Seconds that a stopped rank is stopped."""

    @property
    def goes_on(self) -> bool:
        return self.fault == "stopped" and self.stop < self.timeout


class Block(nn.Module):
    due: list[Case] = []  # noqa: RUF012  # of the process: what its next forward does

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 64), nn.Linear(64, 4)

    def forward(self, x):
        if self.due:
            fault(self.due.pop())
        return nn.functional.dropout(self.down(self.up(x).tanh()), 0.1)


def fault(case: Case) -> None:
    if case.fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif case.fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        raise ValueError("the pump is off")


def faulty_gather(case: Case, gather, *args):
    phases.all_gather = gather
    fault(case)
    return gather(*args)


def schedule_of(rank: int, ranks: int):
    module = nn.Sequential(Block(), Block())
    for block in module:
        checkpoint_module(block)
    static = torch.zeros(2, 4, requires_grad=True)
    stage = PipelineStage(module, rank, ranks, torch.device("cpu"), input_args=static, output_args=static)
    return recompute_ahead(Schedule1F1B(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss), budget="95%")


def work(rank: int, case: Case, folder: str) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    seconds = datetime.timedelta(seconds=case.timeout)
    where = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=case.ranks, timeout=seconds)
    schedule, x = schedule_of(rank, case.ranks), torch.ones(2 * MICRO_BATCHES, 4)
    said, cause, began, losses = "done", "", time.monotonic(), []
    try:
        for step in range(STEPS):
            if rank == FAULTY and step == PHASES[case.phase]:
                Path(f"{folder}/due").write_text(str(os.getpid()))
                if case.phase == "planning":
                    phases.all_gather = partial(faulty_gather, case, phases.all_gather)
                else:
                    Block.due.append(case)
            began = time.monotonic()
            schedule.step(
                *((x,) if rank == 0 else ()), losses=losses, **({"target": x} if rank == case.ranks - 1 else {})
            )
    except ScheduleError as error:
        said, cause = str(error), repr(error.__cause__)
    except BaseException as error:
        said, cause = f"{type(error).__name__}: {error}", "not named"
    torch.save((said, cause, time.monotonic() - began, schedule.plan is not None), f"{folder}/{rank}.pt")
    os._exit(0)  # a group of which a rank is lost may not end


# the processes --------------------------------------------------------------------------------------------------------


class Report(NamedTuple):
    said: str
    cause: str
    seconds: float
    """Of the last step."""
    is_planned: bool


def reports(cases: Sequence[Case], folder: Path) -> dict[Case, dict[int, Report]]:
    """What the ranks of all cases said, which run at once. None is left."""
    folders = {case: folder / str(number) for number, case in enumerate(cases)}
    for path in folders.values():
        path.mkdir()
    running = {case: started(work, (case, str(folders[case])), case.ranks).processes for case in cases}
    try:
        for case in cases:
            if case.fault == "stopped":
                _continue(folders[case] / "due", case.stop)
        for case, processes in running.items():
            for rank, process in enumerate(processes):
                process.join(timeout=120 + 3 * case.timeout)
                assert not process.is_alive(), f"rank {rank} of {case} is stuck"
                assert process.exitcode == (-signal.SIGKILL if (case.fault, rank) == ("killed", FAULTY) else 0)
    finally:
        for process in itertools.chain(*running.values()):
            if process.is_alive():
                os.kill(process.pid, signal.SIGCONT)
                process.kill()
            process.join()
    return {case: dict(_read(folders[case], case)) for case in cases}


def _continue(path: Path, seconds: float) -> None:
    """Let the process go on whose number is written to ``path`` before it stops, after so many seconds."""
    began = time.monotonic()
    while not (path.exists() and path.read_text() and _is_stopped(int(path.read_text()))):
        assert time.monotonic() - began < 120, "it has not stopped"
        time.sleep(0.05)
    time.sleep(seconds)
    os.kill(int(path.read_text()), signal.SIGCONT)


def _is_stopped(process: int) -> bool:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def _read(folder: Path, case: Case) -> Iterator[tuple[int, Report]]:
    for rank in range(case.ranks):
        if (case.fault, rank) != ("killed", FAULTY):
            yield rank, Report(*torch.load(folder / f"{rank}.pt", weights_only=False))


# what they say --------------------------------------------------------------------------------------------------------


def wrong(case: Case, said: dict[int, Report]) -> list[str]:
    """What is not as it should be."""
    found = []
    for rank, report in said.items():
        if case.goes_on:
            if report.said != "done" or not report.is_planned:
                found.append(f"{case}, rank {rank}: {report}")
            continue
        is_own = (case.fault, rank) == ("raises", FAULTY) and case.phase == "planning"
        pattern = "ValueError: the pump is off" if is_own else _named(case, rank)
        if not re.match(pattern, report.said) or report.seconds > case.stop + 2 * case.timeout:
            found.append(f"{case}, rank {rank}: {report}")
    return found


def _named(case: Case, rank: int) -> str:
    """The beginning of what a rank says that ends."""
    if case.phase == "planning":
        return f"the ranks could not make a plan of the measured steps: rank {rank} did not hear from all others\n"
    return rf"a step of the pipeline failed on rank {rank} of {case.ranks}: stage {rank}, micro-batch \d, "


def test_some_faults(tmp_path: Path) -> None:
    cases = [
        Case("killed", "measuring"),
        Case("raises", "planning"),
        Case("killed", "planning"),
        Case("raises", "planned"),
        Case("stopped", "planned", timeout=60.0, stop=2.0),
    ]
    assert [text for case, said in reports(cases, tmp_path).items() for text in wrong(case, said)] == []


@pytest.mark.faults
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("what", ["killed", "raises", "goes on", "stopped"])
def test_all_faults(what: str, ranks: int, tmp_path: Path) -> None:
    """A rank is stopped for 20 s: for less than the timeout of its group, or for longer."""
    kind, timeout, stop = {
        "killed": ("killed", 60.0, 0.0),
        "raises": ("raises", 15.0, 0.0),
        "goes on": ("stopped", 120.0, 20.0),
        "stopped": ("stopped", 10.0, 20.0),
    }[what]
    cases = [Case(kind, phase, ranks, timeout, stop) for phase in PHASES]
    found = {}
    for number, case in enumerate(cases):
        (tmp_path / str(number)).mkdir()
        found.update(reports([case], tmp_path / str(number)))
    assert [text for case, said in found.items() for text in wrong(case, said)] == []
