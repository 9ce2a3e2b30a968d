"""A rank that raises, stays or dies: every other rank raises in time, and says where it was."""
from __future__ import annotations

import datetime
import logging
import os
import re
import time
import warnings
from functools import partial
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from tests.distributed.ranks import started
from tests.distributed.stages import OLD
from tests.helpers import Probe, doing
from tests.settings import with_gloo
from torchckpt import checkpoint_module, is_recomputing
from torchckpt.distributed import recompute_ahead
from torchckpt.errors import ScheduleError

RANKS, MICRO_BATCHES, FAULTY = 3, 6, 1
TIMEOUT_SECONDS = 4.0
CASES = ("forward", "recompute", "backward", "stays", "shapes", "dies")  # the last one ends its process

pytestmark = with_gloo


def fail():
    raise ValueError("in the backward")


class Block(nn.Module):
    """Fails, as ``case`` says, in the fourth micro-batch of the second step; with "shapes" where torch looks for them.
    """

    def __init__(self, case: str) -> None:
        super().__init__()
        self.linear, self.case, self.forwards = nn.Linear(4, 4), case, 0

    def forward(self, x):
        self.forwards += not is_recomputing()
        due = self.forwards >= MICRO_BATCHES + 4 or self.case == "shapes"
        if due and self.case == "dies":
            os._exit(17)
        if due and self.case in ("forward", "stays", "shapes"):
            raise ValueError("in the forward")
        if due and self.case == "recompute" and is_recomputing():
            raise ValueError("in the recompute")
        return Probe.apply(self.linear(x).tanh(), fail if due and self.case == "backward" else doing)


def schedule_of_one_block(rank: int, case: str):
    module = nn.Sequential(Block(case if rank == FAULTY else ""))
    checkpoint_module(module[0])
    static = None if case == "shapes" else torch.zeros(2, 4, requires_grad=True)
    stage = PipelineStage(module, rank, RANKS, torch.device("cpu"), input_args=static, output_args=static)
    plain = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    return recompute_ahead(plain, exempt="none")


def failure(rank: int, case: str) -> tuple[str, str, str]:
    """What this rank raises, the cause of that, and what it raises if it steps on."""
    schedule, x = schedule_of_one_block(rank, case), torch.ones(2 * MICRO_BATCHES, 4)
    step = partial(schedule.step, *((x,) if rank == 0 else ()), **({"target": x} if rank == RANKS - 1 else {}))
    try:
        for _ in range(3):
            step()
    except ScheduleError as error:
        try:
            step()
        except ScheduleError as again:
            return str(error), repr(error.__cause__), str(again)
    return "nothing", "", ""


def work(rank: int, case: str, folder: str) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)  # torch prints the whole schedule
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=TIMEOUT_SECONDS)
    where = f"file://{folder}/{case}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=RANKS, timeout=timeout)
    began = time.monotonic()
    raised = failure(rank, case)
    torch.save((*raised, time.monotonic() - began), f"{folder}/{case}{rank}.pt")
    while case == "stays" and not all(os.path.exists(f"{folder}/{case}{other}.pt") for other in range(RANKS)):
        time.sleep(0.05)  # the faulty rank is alive, and silent
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """By case and rank. No process outlives this. A case is mostly a wait, so all run at the same time."""
    folder = str(tmp_path_factory.mktemp("faults"))
    processes = {case: started(work, (case, folder), RANKS).processes for case in CASES}
    try:
        for process in chain(*processes.values()):
            process.join(timeout=300)
        for case, ranks in processes.items():
            died = [17 if case == "dies" and rank == FAULTY else 0 for rank in range(RANKS)]
            assert [process.exitcode for process in ranks] == died
    finally:
        for process in chain(*processes.values()):
            if process.is_alive():
                process.kill()
            process.join()
    return {
        (case, rank): torch.load(f"{folder}/{case}{rank}.pt", weights_only=False)
        for case in CASES
        for rank in range(RANKS)
        if (case, rank) != ("dies", FAULTY)
    }


HEAD = "a step of the pipeline failed on rank {rank} of 3: "


@pytest.mark.parametrize(
    ("case", "where", "received"),
    [
        ("forward", "stage 1, micro-batch 3, forward (1F3)", "ValueError: in the forward"),
        ("recompute", "stage 1, micro-batch 2, recompute (1R2)", "ValueError: in the recompute"),
        ("backward", "stage 1, micro-batch 3, backward (1B3)", "ValueError: in the backward"),
        ("stays", "stage 1, micro-batch 3, forward (1F3)", "ValueError: in the forward"),
        ("shapes", "preparing its stages, before the first action", "ValueError: in the forward"),
    ],
)
def test_rank_that_raises_says_at_what(reported, case, where, received):
    text, *_ = reported[case, FAULTY]
    assert text.startswith(f"{HEAD.format(rank=FAULTY)}{where}\n  received: {received}\n  works:    ")


@pytest.mark.parametrize("rank", [rank for rank in range(RANKS) if rank != FAULTY])
@pytest.mark.parametrize("case", CASES)
def test_every_other_rank_raises_and_says_what_it_waited_for(reported, case, rank):
    text, cause, *_ = reported[case, rank]
    action = rf"stage {rank}, micro-batch \d, (forward|backward|receive|send)[a-z ]* \({rank}[A-Z_]+\d\)\n"
    # In torch 2.11, the first rank tells the others its shapes without an answer.
    where = "preparing its stages, " if case == "shapes" and not (OLD and rank == 0) else action
    assert re.match(re.escape(HEAD.format(rank=rank)) + where, text)
    assert "gloo" in cause


def test_no_rank_steps_on_beside_others_that_are_in_the_step_before(reported):
    for (_, rank), (*_, again, _) in reported.items():
        text = rf"after a failed step .*\n  received: another step on rank {rank} of 3, after a failure at"
        assert re.match(text, again)


def test_none_waits_longer_than_the_timeout_of_the_group(reported):
    # Twice, since what goes before the fault may wait for a slow start, too.
    assert all(seconds < 2 * TIMEOUT_SECONDS for *_, seconds in reported.values())
