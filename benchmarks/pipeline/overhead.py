"""What does a plan cost in a step? Regions of tiny operations, in one process, beside recompute_ahead without a plan.

    python benchmarks/pipeline/overhead.py
"""
from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that it runs from any folder

from benchmarks.pipeline.plain import Plain
from benchmarks.turns import in_turn, quartiles
from torchckpt import checkpoint_module
from torchckpt.distributed import recompute_ahead, schedule_of
from torchckpt.planning import Block, Choice, Schedule, Stage, State, with_recompute
from torchckpt.planning.plan import PipelinePlan, plan_pipeline

_BLOCKS, _MICRO_BATCHES, _WIDTH = 32, 8, 8


class Tiny(nn.Module):
    """Two operations."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin().exp()


def schedule_with(name: str) -> Any:
    torch.manual_seed(0)
    blocks = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), *(Tiny() for _ in range(_BLOCKS)))
    for block in list(blocks)[1:] if name != "plain" else ():
        checkpoint_module(block)
    stage = PipelineStage(blocks, 0, 1, torch.device("cpu"))
    live = ScheduleGPipe(stage, n_microbatches=_MICRO_BATCHES, loss_fn=lambda output, target: output.mean())
    if name == "plain":
        return Plain(live, schedule_of(live))
    if name == "recompute_ahead":
        return recompute_ahead(live, exempt="none")
    return recompute_ahead(live, plan=plan_of(schedule_of(live), name))


def plan_of(schedule: Schedule, name: str) -> PipelinePlan:
    problem = plan_pipeline(schedule, [Stage((Block(boundary_bytes=0.5),) * _BLOCKS)], "100%").problem
    states = {"planned, kept": State.KEPT, "planned, early": State.EARLY, "planned, late": State.LATE}
    choices = {(0, i): Choice.all(states[name], _BLOCKS) for i in range(_MICRO_BATCHES)}
    return PipelinePlan.of(problem, with_recompute(schedule, choices), choices)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="with the variants in turn (default: 40)")
    rounds = parser.parse_args().rounds
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    names = ("plain", "recompute_ahead", "planned, early", "planned, late", "planned, kept")
    schedules = {name: schedule_with(name) for name in names}
    x = torch.randn(4 * _MICRO_BATCHES, _WIDTH)
    runs = {name: partial(one.step, x, target=x, return_outputs=False) for name, one in schedules.items()}
    seconds = in_turn(runs, rounds, warm_up=4)
    count = _BLOCKS * _MICRO_BATCHES
    for name, values in seconds.items():
        over = [1e6 * (own - plain) / count for own, plain in zip(values, seconds["plain"])]
        of = [own / today for own, today in zip(values, seconds["recompute_ahead"])]
        print(f"{name:16} {shown(over)} us a region over plain; a step is {shown(of)} of recompute_ahead's")
    dist.destroy_process_group()


def shown(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in quartiles(values))


if __name__ == "__main__":
    main()
