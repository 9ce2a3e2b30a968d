"""Trains the GPT of ``train_gpt.py`` as a pipeline: a stage a process, recomputed ahead of its gradients.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt_distributed.py --checkpoints runs/gpt
    torchrun --standalone --nproc-per-node 2 examples/train_gpt_distributed.py --compare 6 --out demo

Each process has a GPU where there are enough, and a core where not. Started again with the same ``--checkpoints``, it
goes on where it was, with the very losses that it would have had. ``--compare`` makes the same steps without
recomputation, with ``torch.utils.checkpoint`` and with ``recompute_ahead``, and draws where the recomputes went.
``--budget 24MB`` has each process take no more bytes in a step; ``--compare`` with it makes the same steps recomputing
all when gradients arrive, recomputing the same blocks of all stages, and as planned, and draws the last two.

Processes that share a few cores slow each other down, so that what is measured says little of devices. With
``--sleep 10`` a smaller GPT has blocks that sleep 10 ms forward and 20 ms backward, as a device would be busy:

    torchrun --standalone --nproc-per-node 4 examples/train_gpt_distributed.py --sleep 10 --budget 50% --compare 5
"""
from __future__ import annotations

import argparse
import gc
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt.model import Block, Size, cut, gpt
from gpt.paced import Paced
from gpt.side_by_side import show
from gpt.text import VOCABULARY, Text
from gpt.variants import Checkpointed
from gpt.within_budget import show_planned
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.functional import cross_entropy

from torchckpt import checkpoint_module
from torchckpt.distributed import recompute_ahead
from torchckpt.planning.plan import PipelinePlan

FULL = Size(blocks=8, width=128, heads=4, length=128, rows=16, chunks=4)
FIRST_STEPS = 4  # with a budget, these are measured
SLEEPING = Size(blocks=16, width=64, heads=4, length=64, rows=16, chunks=8)
QUICK = Size(blocks=8, width=16, heads=2, length=16, rows=16, chunks=4)

SCHEDULES = {"gpipe": (ScheduleGPipe, 1), "1f1b": (Schedule1F1B, 1), "interleaved": (ScheduleInterleaved1F1B, 2)}
"""And how many stages a process has."""


def main() -> None:
    options, device = parsed_options(), joined()
    chunks = options.micro_batches or 2 * dist.get_world_size()
    size = QUICK if options.quick else SLEEPING if options.sleep else FULL
    size = replace(size, chunks=chunks, block_seconds=options.sleep / 1e3)
    if size.rows % chunks:
        sys.exit(f"--micro-batches {chunks}: a step has {size.rows} rows, of which each gets as many")
    build = partial(Trainer, size=size, device=device, schedule=options.schedule, costs=options.costs)
    if options.compare and options.budget:
        show_planned(build, options.budget, options.compare, options.out / "pipeline-plan.svg")
    elif options.compare:
        show(build, options.compare, options.out / "timeline.svg")
    else:
        train(build(options.recompute, budget=options.budget), options)
    gc.collect()  # what holds the group in a cycle goes before it does: its threads must not outlive Python
    dist.destroy_process_group()


def train(trainer: Trainer, options: argparse.Namespace) -> None:
    if options.checkpoints:
        trainer.restore(options.checkpoints)
    loss, start = None, trainer.done
    while trainer.done < options.steps:
        loss = trainer.step()
        if loss is not None:
            print(f"step {trainer.done:4}   loss {loss:.8f}", flush=True)
        if options.checkpoints and (trainer.done % options.every == 0 or trainer.done == options.steps):
            trainer.save(options.checkpoints)
    if options.recompute == "ahead" and trainer.done > start + (FIRST_STEPS if options.budget else 0):
        report = trainer.schedule.report()  # in all processes, of all
        if loss is not None:
            print(f"\n{report}")


class Trainer:
    """What one process does: its stages, their schedule, their optimizer."""

    def __init__(
        self,
        recompute: str,
        size: Size,
        device: torch.device,
        schedule: str,
        costs: str | None,
        budget: str | None = None,
        plan: PipelinePlan | None = None,
    ) -> None:
        self.size, self.text, self.device, self.done = size, Text(), device, 0
        make, count = SCHEDULES[schedule]
        self.stages = stages_here(size, count, recompute, device)
        self.modules = nn.ModuleList(stage.submod for stage in self.stages)
        self.optimizer = torch.optim.AdamW(self.modules.parameters(), lr=2e-3, betas=(0.9, 0.95))
        self.schedule = make(self.stages[0] if count == 1 else self.stages, size.chunks, loss_fn=loss_of)
        if recompute == "ahead" and (budget or plan):
            self.schedule = recompute_ahead(self.schedule, budget=budget, plan=plan)
        elif recompute == "ahead":
            self.schedule = recompute_ahead(self.schedule, costs=costs)
        elif recompute == "late":  # the same, block by block inside the backward, to be compared with
            self.schedule = recompute_ahead(self.schedule, segments=0)
        torch.manual_seed(1 + dist.get_rank())  # for dropout

    def step(self) -> float | None:
        """The loss, in the process that has the last stage."""
        x, y = self.text.batch(self.done, self.size.rows, self.size.length, str(self.device))
        inputs = (x,) if self.stages[0].is_first else ()
        target, losses = (y if self.stages[-1].is_last else None), []
        self.optimizer.zero_grad()
        self.schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        self.optimizer.step()
        self.done += 1
        return torch.stack(losses).mean().item() if losses else None

    def save(self, folder: Path) -> None:
        """To a file of each process. Those of the step before go when all processes have written theirs."""
        path = folder / f"rank{dist.get_rank()}-step{self.done}.pt"
        folder.mkdir(parents=True, exist_ok=True)
        states = {"model": self.modules.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**states, "random": random_of(self.device).get_rng_state()}, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)
        dist.barrier()
        for old in checkpoints(folder).values():
            if old != path:
                old.unlink()

    def restore(self, folder: Path) -> None:
        """The last step that all processes have, if there is one."""
        found = checkpoints(folder)
        last = torch.tensor(max(found, default=0), device=self.device)
        dist.all_reduce(last, dist.ReduceOp.MIN)
        self.done = int(last)
        if self.done:
            states = torch.load(found[self.done], map_location="cpu")
            self.modules.load_state_dict(states["model"])
            self.optimizer.load_state_dict(states["optimizer"])
            random_of(self.device).set_rng_state(states["random"])


def stages_here(size: Size, count: int, recompute: str, device: torch.device) -> list[PipelineStage]:
    """The stages of this process, of weights that all processes agree on."""
    torch.manual_seed(0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts = cut(gpt(size), ranks * count)
    shapes = shapes_between(size, len(parts))
    mine = {index: recomputed(parts[index], recompute, size.block_seconds) for index in range(rank, len(parts), ranks)}
    return [
        PipelineStage(part.to(device), index, len(parts), device, *shapes[index : index + 2])
        for index, part in mine.items()
    ]


def shapes_between(size: Size, stages: int) -> list[Tensor]:
    """What the first stage takes and what each gives, of a micro-batch. torch would find out, but needs NumPy for that.
    """
    rows, width = size.rows // size.chunks, size.width
    tokens = torch.empty(rows, size.length, dtype=torch.long, device="meta")
    hidden, logits = (
        torch.empty(rows, size.length, features, device="meta", requires_grad=True) for features in (width, VOCABULARY)
    )
    return [tokens, *[hidden] * (stages - 1), logits]


def recomputed(part: nn.Sequential, recompute: str, sleep_seconds: float) -> nn.Sequential:
    """``part``, with each of its blocks a region, and as long as is said."""
    for place, layer in enumerate(part):
        if isinstance(layer, Block):
            block = Paced(layer, sleep_seconds) if sleep_seconds else layer
            if recompute in ("ahead", "late"):
                checkpoint_module(block)
            part[place] = Checkpointed(block) if recompute == "stock" else block
    return part


def loss_of(logits: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), y.flatten())


def checkpoints(folder: Path) -> dict[int, Path]:
    """Those of this process, by step."""
    return {int(path.stem.rpartition("step")[2]): path for path in folder.glob(f"rank{dist.get_rank()}-step*.pt")}


def random_of(device: torch.device) -> Any:
    """The random numbers that dropout takes."""
    return torch.cuda if device.type == "cuda" else torch.random


def joined() -> torch.device:
    """Join the others that torchrun has started, on this machine and elsewhere. The device of this process."""
    if "LOCAL_RANK" not in os.environ:
        sys.exit(f"torchrun starts this: torchrun --standalone --nproc-per-node 2 {sys.argv[0]}")
    local = int(os.environ["LOCAL_RANK"])
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        return device
    if hasattr(os, "sched_setaffinity"):  # a core of its own
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[local % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return torch.device("cpu")


def parsed_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--recompute", choices=["none", "stock", "ahead"], default="ahead", help="%(default)s; stock is torch's own")
    add("--schedule", choices=SCHEDULES, default="1f1b", help="%(default)s")
    add("--costs", choices=["measured"], help="recompute where the first steps had their ranks idle")
    add("--budget", help="bytes that a step may take in each process, such as 24MB or 50%%: plan what is kept")
    add("--sleep", type=float, default=0.0, metavar="MS", help="a block sleeps so long forward, twice as long backward")
    add("--micro-batches", type=int, help="of a step; as a default two a process")
    add("--steps", type=int, default=100, help="in all, those before a restart included (%(default)s)")
    add("--checkpoints", type=Path, help="folder for them, which all machines share or each has for itself")
    add("--every", type=int, default=10, help="steps from one checkpoint to the next (%(default)s)")
    add("--compare", type=int, default=0, metavar="STEPS", help="make so many, with and without recomputation")
    add("--quick", action="store_true", help="a tiny model, to see that all works")
    add("--out", type=Path, default=Path("demo"), help="folder for the picture of --compare (%(default)s)")
    options = parser.parse_args()
    if options.budget and (options.recompute != "ahead" or options.costs):
        parser.error("--budget goes with --recompute ahead, and measures the costs itself")
    return options


if __name__ == "__main__":
    main()
