"""Does a step within a budget take the bytes that its plan says? A small GPT with dropout, two processes.

    python benchmarks/pipeline/peaks.py                # about 5 minutes; no seconds count, only bytes
"""
from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that it runs from any folder

from benchmarks.losses import next_token
from benchmarks.pipeline.processes import on_processes
from examples.gpt.model import Block, Size, gpt
from examples.gpt.text import VOCABULARY
from torchckpt import checkpoint_module
from torchckpt.distributed import recompute_ahead

_SIZE = Size(blocks=8, width=64, heads=4, length=64, rows=32, chunks=8)
_SCHEDULES: dict[str, tuple[Any, list[list[int]]]] = {
    "1F1B": (Schedule1F1B, [[0], [1]]),
    "GPipe": (ScheduleGPipe, [[0], [1]]),
    "interleaved": (ScheduleInterleaved1F1B, [[0, 2], [1, 3]]),
    "ZB-V": (ScheduleZBVZeroBubble, [[0, 3], [1, 2]]),
}
_BUDGETS = ("50%", "70%", "90%")
_STEPS = 6  # four that are measured, and two: bytes are counted in the second
_WITHIN = 0.02


def _measure(rank: int, tell: Callable[[Any], None], name: str, budget: str) -> None:
    make, placed = _SCHEDULES[name]
    count = sum(map(len, placed))
    torch.manual_seed(0)
    layers = list(gpt(_SIZE))
    each = _SIZE.blocks // count
    ends = [0, *(1 + each * stage for stage in range(1, count)), len(layers)]
    stages = [_stage(layers[ends[index] : ends[index + 1]], index, count) for index in placed[rank]]
    one_or_all = stages[0] if len(stages) == 1 else stages
    schedule = recompute_ahead(make(one_or_all, n_microbatches=_SIZE.chunks, loss_fn=next_token), budget=budget)
    for turn in range(_STEPS):
        text = torch.randint(VOCABULARY, (_SIZE.rows, _SIZE.length), generator=torch.Generator().manual_seed(turn))
        for stage in stages:
            stage.submod.zero_grad()
        inputs = (text,) if any(stage.is_first for stage in stages) else ()
        target = {"target": text} if any(stage.is_last for stage in stages) else {}
        schedule.step(*inputs, **target, return_outputs=False)
    report = schedule.report()
    if rank == 0:
        tell((report.planned_peak_bytes, report.measured_peak_bytes, report.budget_bytes, report.plan.recomputed_share))


def _stage(layers: list[nn.Module], index: int, count: int) -> PipelineStage:
    for layer in layers:
        if isinstance(layer, Block):
            checkpoint_module(layer)
    return PipelineStage(nn.Sequential(*layers), index, count, torch.device("cpu"))


def main() -> int:
    wrong = []
    for name in _SCHEDULES:
        for budget in _BUDGETS:
            ((planned, measured, limits, share),) = on_processes(2, _measure, name, budget)
            shown = "; ".join(
                f"{own / 1e6:.3f} of {limit / 1e6:.3f} MB ({own / plan - 1:+.1%} of the plan)"
                for plan, own, limit in zip(planned, measured, limits)
            )
            print(f"{name:12} {budget}: {share:.0%} recomputed; peaks by rank {shown}", flush=True)
            off = max(abs(own / plan - 1) for plan, own in zip(planned, measured))
            wrong += [f"{name} {budget}: {off:.1%} from the plan"] if off > _WITHIN else []
            wrong += [f"{name} {budget}: over the budget"] if any(map(float.__gt__, measured, limits)) else []
    print("\n".join(wrong) or "all peaks are within 2 % of the plan, and of the budget")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
