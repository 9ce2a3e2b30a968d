"""Counts: how often blocks run their forward, and how many bytes are alive, without any times."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from benchmarks.losses import mean_square
from benchmarks.pipeline.plain import Plain
from benchmarks.pipeline.processes import on_processes
from torchckpt import checkpoint_module
from torchckpt.distributed import recompute_ahead, schedule_of
from torchckpt.testing import saved_bytes

__all__ = ["count_forwards", "count_peaks", "show_counts"]

_SPLIT = {
    "interleaved zero bubble": (ScheduleInterleavedZeroBubble, False),
    "ZB-V": (ScheduleZBVZeroBubble, True),
    "DualPipeV": (ScheduleDualPipeV, True),
}
_ROWS, _WIDTH = 4, 64


class Counted(nn.Module):
    """A block that counts how often its forward is run."""

    def __init__(self, is_stock: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH), nn.Dropout(0.1)
        )
        self.is_stock = is_stock
        self.forwards = 0

    def _forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        y: Tensor = x + self.layers(x)
        return y

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self._forward, x, use_reentrant=False) if self.is_stock else self._forward(x)


def _blocks(variant: str, count: int, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    blocks = nn.Sequential(*(Counted(variant == "stock") for _ in range(count)))
    if variant == "ours":
        for block in blocks:
            checkpoint_module(block)
    return blocks


def _step(schedule: Any, stages: list[PipelineStage], m: int) -> list[Tensor]:
    """Run one step; return its losses and gradients."""
    torch.manual_seed(stages[0].stage_index)
    x, y = torch.randn(2, m * _ROWS, _WIDTH, generator=torch.Generator().manual_seed(0))
    for stage in stages:
        stage.submod.zero_grad()
    losses: list[Tensor] = []
    inputs = (x,) if any(stage.is_first for stage in stages) else ()
    target = {"target": y} if any(stage.is_last for stage in stages) else {}
    schedule.step(*inputs, **target, losses=losses, return_outputs=False)
    grads = [parameter.grad for stage in stages for parameter in stage.submod.parameters()]
    return losses + [grad for grad in grads if grad is not None]


def _gathered(mine: Any, ranks: int) -> list[Any]:
    said: list[Any] = [None] * ranks
    dist.all_gather_object(said, mine)
    return said


# block forwards -----------------------------------------------------------------------------------------------------


def count_forwards() -> dict[str, Any]:
    """Block forwards of each rank, by schedule and variant; 2 ranks, 4 stages of one block, 4 micro-batches."""
    ((rows, equal),) = on_processes(2, _count_forwards)
    ours = {name: row["ours"] for name, row in rows.items()}
    wrong = [f"{name}: {counts} block forwards, not [16, 16]" for name, counts in ours.items() if counts != [16, 16]]
    return {"rows": rows, "failures": wrong + ([] if equal else ["split schedules: gradients differ"])}


def _count_forwards(rank: int, tell: Callable[[Any], None]) -> None:
    rows: dict[str, dict[str, list[int]]] = {}
    equal = True
    for name, (make, is_folded) in _SPLIT.items():
        rows[name] = {}
        made = []
        for variant in ("none", "stock", "ours"):
            forwards, tensors = _forwards(rank, make, is_folded, variant)
            made.append(tensors)
            rows[name][variant] = _gathered(forwards, 2)
        equal &= all(all(map(torch.equal, one, made[0])) for one in made)
    equal = all(_gathered(equal, 2))
    if rank == 0:
        tell((rows, equal))


def _forwards(rank: int, make: Any, is_folded: bool, variant: str) -> tuple[int, list[Tensor]]:
    own = (rank, 3 - rank if is_folded else rank + 2)
    stages = [PipelineStage(_blocks(variant, 1, index), index, 4, torch.device("cpu")) for index in own]
    schedule = make(stages, n_microbatches=4, loss_fn=mean_square)
    if variant == "ours":
        schedule = recompute_ahead(schedule, exempt="none")
    _step(schedule, stages, 4)  # runs the blocks once more, for their shapes
    blocks = [block for stage in stages for block in stage.submod]
    before = sum(block.forwards for block in blocks)
    tensors = _step(schedule, stages, 4)
    return sum(block.forwards for block in blocks) - before, tensors


# bytes alive --------------------------------------------------------------------------------------------------------


class Alive(TorchDispatchMode):
    """Counts the living bytes of all storages that operators make inside this context, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[StorageWeakRef, int] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, Tensor):
                self._storages[StorageWeakRef(leaf.untyped_storage())] = leaf.untyped_storage().nbytes()
        self._storages = {storage: count for storage, count in self._storages.items() if not storage.expired()}
        self.peak_bytes = max(self.peak_bytes, sum(self._storages.values()))
        return outputs


def count_peaks() -> dict[str, Any]:
    """Peak bytes alive in a 1F1B step, by variant and stage, gradients included; 4 stages, 8 micro-batches."""
    (rows,) = on_processes(4, _count_peaks)
    wrong = []
    for name, row in rows.items():
        most = [stock + row["one segment"] for stock in row["stock"]]
        wrong += [
            f"{name}, stage {stage}: {ours} bytes, not at most {limit}"
            for stage, (ours, limit) in enumerate(zip(row["ours"], most))
            if ours > limit
        ]
    return {"rows": rows, "failures": wrong}


def _count_peaks(rank: int, tell: Callable[[Any], None]) -> None:
    rows: dict[str, dict[str, Any]] = {}
    for name, blocks, segments in (("1 block a stage", 1, None), ("3 blocks a stage, segments=1", 3, 1)):
        block = Counted(False)
        with saved_bytes() as saved:
            block(torch.randn(_ROWS, _WIDTH))
        rows[name] = {"one segment": saved.total}
        for variant in ("none", "stock", "ours"):
            rows[name][variant] = _gathered(_peak(rank, variant, blocks, segments), 4)
    if rank == 0:
        tell(rows)


def _peak(rank: int, variant: str, blocks: int, segments: int | None) -> int:
    stage = PipelineStage(_blocks(variant, blocks, rank), rank, 4, torch.device("cpu"))
    schedule: Any = Schedule1F1B(stage, n_microbatches=8, loss_fn=mean_square)
    if variant == "ours":
        schedule = recompute_ahead(schedule, segments=segments)
    else:
        schedule = Plain(schedule, schedule_of(schedule))  # holds sent tensors as long as ours does
    _step(schedule, [stage], 8)
    with Alive() as alive:
        _step(schedule, [stage], 8)
    return alive.peak_bytes


def show_counts(forwards: dict[str, Any], peaks: dict[str, Any]) -> str:
    lines = ["\nblock forwards per rank, 2 ranks, 4 stages, m=4; ours, with nothing exempt: 16 and 16"]
    for name, row in forwards["rows"].items():
        lines.append(f"  {name:30}" + "; ".join(f"{variant} {counts}" for variant, counts in row.items()))
    lines.append("\npeak of bytes alive per stage, 1F1B, p=4, m=8; ours: at most stock and one segment")
    for name, row in peaks["rows"].items():
        lines.append(f"  {name:30}" + "; ".join(f"{variant} {counts}" for variant, counts in row.items()))
    return "\n".join(lines)
