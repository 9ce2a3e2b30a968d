"""Cores: a real model on two processes with one core each. Does it recompute before the gradient has been sent?"""
from __future__ import annotations

import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.losses import next_token
from benchmarks.pipeline.plain import Plain
from benchmarks.pipeline.processes import on_processes
from benchmarks.stock import Stock
from examples.gpt.model import Size, gpt
from examples.gpt.text import VOCABULARY
from torchckpt import checkpoint_module
from torchckpt.distributed import recompute_ahead, schedule_of
from torchckpt.planning import Kind, Timeline

__all__ = ["on_two_cores", "show_cores"]

_SIZE = Size(blocks=6, width=128, heads=4, length=64, rows=32, chunks=8)
_FIRST = 3
"""Layers of the first stage: the embedding and 2 blocks. The last stage has more work, so the first stage waits for its
gradients; it can recompute only during such a wait."""
_SHARE = 0.95


def on_two_cores(rounds: int) -> dict[str, Any]:
    ((shares, seconds, equal),) = on_processes(2, _measure, rounds)
    middle = median(shares) if shares else 0.0
    wrong = [] if middle >= _SHARE else [f"two cores: {middle:.2f} of a recompute before the gradient was sent"]
    wrong += [] if equal else ["two cores: gradients differ"]
    return {"shares": shares, "share": middle, "seconds": seconds, "failures": wrong}


def _measure(rank: int, tell: Callable[[Any], None], rounds: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    schedules = {variant: _schedule(variant, rank) for variant in ("none", "stock", "ours")}
    shares: list[float] = []
    seconds: dict[str, list[float]] = {variant: [] for variant in schedules}
    equal = True
    for turn in range(rounds + 2):
        made = []
        for variant, (stage, schedule) in schedules.items():
            took, tensors = _step(stage, schedule, turn)
            seconds[variant] += [took] if turn >= 2 else []
            made.append(tensors)
        shares += _shares(schedules["ours"][1].timeline()) if turn >= 2 else []
        equal &= all(all(map(torch.equal, one, made[0])) for one in made)
    said: list[Any] = [None, None]
    dist.all_gather_object(said, (seconds, equal))
    slowest = {name: [max(both) for both in zip(*(own[name] for own, _ in said))] for name in seconds}
    if rank == 0:
        tell((shares, slowest, all(own for _, own in said)))


def _schedule(variant: str, rank: int) -> tuple[PipelineStage, Any]:
    torch.manual_seed(0)
    layers = list(gpt(_SIZE))
    own = layers[:_FIRST] if rank == 0 else layers[_FIRST:]
    blocks = [layer for layer in own if layer not in (layers[0], layers[-1])]
    if variant == "ours":
        for block in blocks:
            checkpoint_module(block)
    elif variant == "stock":
        own = [Stock(layer) if layer in blocks else layer for layer in own]
    stage = PipelineStage(nn.Sequential(*own), rank, 2, torch.device("cpu"))
    schedule: Any = Schedule1F1B(stage, n_microbatches=_SIZE.chunks, loss_fn=next_token)
    return stage, recompute_ahead(schedule) if variant == "ours" else Plain(schedule, schedule_of(schedule))


def _step(stage: PipelineStage, schedule: Any, turn: int) -> tuple[float, list[Tensor]]:
    data = torch.Generator().manual_seed(turn)
    text = torch.randint(VOCABULARY, (_SIZE.rows, _SIZE.length + 1), generator=data)
    stage.submod.zero_grad()
    torch.manual_seed(turn)
    dist.barrier()
    began = time.perf_counter()
    losses: list[Tensor] = []
    if stage.is_first:
        schedule.step(text[:, :-1], return_outputs=False)
    else:
        schedule.step(target=text[:, 1:], losses=losses, return_outputs=False)
    took = time.perf_counter() - began
    grads = [parameter.grad.clone() for parameter in stage.submod.parameters() if parameter.grad is not None]
    return took, losses + grads


def _shares(timeline: Timeline) -> list[float]:
    """The share of each recompute of stage 0 that ran before stage 1 sent the gradient, by one common clock."""
    sent = {
        message.action.micro_batch: message.sent_seconds
        for message in timeline.messages
        if message.action.kind is Kind.BACKWARD
    }
    replays = [event for event in timeline.events if event.rank == 0 and event.action.kind is Kind.RECOMPUTE]
    return [
        min(1.0, max(0.0, (sent[one.action.micro_batch] - one.start_seconds) / (one.end_seconds - one.start_seconds)))
        for one in replays
    ]


def show_cores(results: dict[str, Any]) -> str:
    took = ", ".join(f"{name} {median(values) * 1e3:.0f}" for name, values in results["seconds"].items())
    return (
        f"\na small GPT on two processes with a core each: {results['share']:.3f} of a recompute, in the median of "
        f"{len(results['shares'])}, lies before its gradient was sent; at least {_SHARE}\n"
        f"  a step, ms (not judged): {took}"
    )
