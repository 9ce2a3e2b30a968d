"""Stages: small pipelines on the schedules of torch, with regions or without."""
from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.utils.checkpoint import checkpoint as checkpoint_of_torch

from tests.helpers import doing
from torchckpt import checkpoint_module
from torchckpt.distributed import recompute_ahead
from torchckpt.features import release_of

SIZE, ROWS = 8, 2  # of a row, of a micro-batch

SINGLE = ("ScheduleGPipe", "Schedule1F1B")
LOOPED = ("ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble")
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
SPLIT = ("ScheduleInterleavedZeroBubble", *V_SHAPED)
FROM_CSV = ("compute_only", "compute_comms")
TWO_STAGES = ("ScheduleInterleaved1F1B", *V_SHAPED)
"""On one rank."""
NAMES = (*SINGLE, *LOOPED, *V_SHAPED, *FROM_CSV)

IN_HALVES = {
    1: ["0F0,0F1,1F0,1F1,1B1,1B0,0B1,0B0,0F2,0F3,1F2,1F3,1B3,1B2,0B3,0B2"],
    2: [
        "0F0,0F1,2F0,2F1,2B1,2B0,0B1,0B0,0F2,0F3,2F2,2F3,2B3,2B2,0B3,0B2",
        "1F0,1F1,3F0,3F1,3B1,3B0,1B1,1B0,1F2,1F3,3F2,3F3,3B3,3B2,1B3,1B2",
    ],
}
"""By the number of ranks: a schedule that torch does not have, for four micro-batches, two at a time."""

events: list[str] = []
"""What blocks did, such as ``forward 0.1``: the second block of stage 0."""


OLD = not hasattr(PipelineStage, "_is_same_rank")
"""Stages are those of torch 2.11, which find out their metadata in the first step, with random numbers of that step."""


BEFORE_2_13 = release_of(torch.__version__) < (2, 13)
"""Nothing but the release tells of what only fails while it runs."""


def not_before_2_13(fails: str) -> pytest.MarkDecorator:
    """Skips a test of what torch's own schedules cannot do there."""
    return pytest.mark.skipif(BEFORE_2_13, reason=f"torch before 2.13 alone: {fails}")


def not_on_old_stages(fails: str) -> pytest.MarkDecorator:
    """Skips a test of what torch's own schedules cannot do there."""
    return pytest.mark.skipif(OLD, reason=f"torch 2.11 alone: {fails}")


class Stage(PipelineStage):
    """torch 2.11 tries the connection of neighbours on one rank, too: gloo cannot send to itself, and NCCL can."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != dist.get_rank()]


class Block(nn.Module):
    """Two linear layers with a dropout after them, around which its input skips."""

    def __init__(self, name: str = "") -> None:
        super().__init__()
        self.name = name
        self.first, self.second = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)

    def forward(self, x):
        events.append(f"{doing()} {self.name}")
        return x + nn.functional.dropout(self.second(nn.functional.gelu(self.first(x))), 0.2, self.training)


class Blocks(nn.Module):
    """``count`` blocks. ``regions``: "ours", "torch" (stock checkpointing), "reentrant", or "none"."""

    def __init__(self, stage: int, count: int = 2, regions: str = "ours") -> None:
        super().__init__()
        self.regions = regions
        with torch.random.fork_rng():
            torch.manual_seed(stage)
            self.blocks = nn.ModuleList(Block(f"{stage}.{place}") for place in range(count))
        self.checkpointed()

    def checkpointed(self) -> Blocks:
        for block in self.blocks if self.regions == "ours" else ():
            checkpoint_module(block)
        return self

    def forward(self, x):
        for block in self.blocks:
            if self.regions in ("torch", "reentrant"):
                x = checkpoint_of_torch(block, x, use_reentrant=self.regions == "reentrant")
            else:
                x = block(x)
        return x


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def indices(name: str, rank: int = 0, ranks: int = 1) -> list[int]:
    """The stages of ``rank``."""
    if name in SINGLE:
        return [rank]
    return [rank, 2 * ranks - 1 - rank] if name in V_SHAPED else [rank, rank + ranks]


def stages_of(name: str, make: Callable[[int], nn.Module], **options: Any) -> list[Stage]:
    """Of this rank, for the schedule ``name``."""
    mine = indices(name, dist.get_rank(), dist.get_world_size())
    total = len(mine) * dist.get_world_size()
    return [Stage(make(index), index, total, torch.device("cpu"), **options) for index in mine]


def schedule_on(stages: Sequence[PipelineStage], name: str, m: int, loss: Any = loss_of, folder: Any = None) -> Any:
    """torch's schedule ``name``. One from CSV is written to ``folder``, and is for four micro-batches."""
    if name in SINGLE:
        return getattr(schedules, name)(stages[0], m, loss_fn=loss)
    if name not in FROM_CSV:
        return getattr(schedules, name)(list(stages), m, loss_fn=loss)
    plain = _PipelineScheduleRuntime(list(stages), m, loss_fn=loss)
    path = f"{folder}/{dist.get_rank()}.csv"
    with open(path, "w") as file:
        file.write("\n".join(IN_HALVES[dist.get_world_size()]) + "\n")
    plain._load_csv(path)
    if name == "compute_only":
        return plain
    plain._dump_csv(path)
    loaded = _PipelineScheduleRuntime(list(stages), m, loss_fn=loss)
    loaded._load_csv(path, format="compute_comms")
    return loaded


def ahead(name: str, make: Callable[[int], nn.Module] = Blocks, m: int = 4, **options: Any) -> tuple[Any, Any]:
    """Our schedule on torch's ``name``, and the stages of this rank."""
    stages = stages_of(name, make)
    return recompute_ahead(schedule_on(stages, name, m), **options), stages


def batch(m: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Input and target."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(m * rows, SIZE, generator=generator), torch.randn(m * rows, SIZE, generator=generator)


def step(schedule: Any, stages: Sequence[PipelineStage], x: Tensor, target: Tensor, **kwargs: Any) -> list[Tensor]:
    """One step of this rank: its losses, and its output if it has one."""
    losses: list[Tensor] = []
    inputs = (x,) if any(stage.is_first for stage in stages) else ()
    if any(stage.is_last for stage in stages):
        kwargs["target"] = target
    output = schedule.step(*inputs, losses=losses, **kwargs)
    return [*(loss.detach() for loss in losses), *([] if output is None else [output.detach()])]


def parameters_of(stages: Sequence[PipelineStage]) -> list[nn.Parameter]:
    return [parameter for stage in stages for parameter in stage.submod.parameters()]


def gradients_of(stages: Sequence[PipelineStage]) -> list[Tensor]:
    """Copies; every parameter must have one."""
    found = [parameter.grad for parameter in parameters_of(stages)]
    return [gradient.clone() for gradient in found if gradient is not None]


def noted(schedule: Any) -> Any:
    """``schedule``, which from now on notes each action that it comes to among the events.

    The waits for the end of a send or a reduction are left out: torch lists them from 2.15 on.
    """
    reaches = schedule.reaches

    def noted_reaches(action: str) -> None:
        if "WAIT_" not in action:
            events.append(action)
        reaches(action)

    schedule.reaches = noted_reaches
    return schedule


def events_of_step(schedule: Any, stages: Sequence[PipelineStage], m: int) -> list[str]:
    """What happens in a step that is not the first."""
    step(schedule, stages, *batch(m))
    events.clear()
    step(schedule, stages, *batch(m))
    return list(events)


def train(schedule: Any, stages: Sequence[PipelineStage], m: int, steps: int = 3, rows: int = ROWS) -> list[Tensor]:
    """Losses, outputs, gradients and the next random numbers of each of ``steps``, between which parameters change."""
    seen = []
    for number in range(steps):
        torch.manual_seed(100 * number + dist.get_rank())
        seen += step(schedule, stages, *batch(m, rows))
        seen += [*gradients_of(stages), torch.rand(2)]
        with torch.no_grad():
            for parameter in parameters_of(stages):
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    return seen


def equal(received: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """To the bit."""
    return len(received) == len(expected) > 0 and all(map(torch.equal, received, expected))


def run(name: str, mode: Any, drive: Any = train, make: Any = Blocks, m: int = 4, **options: Any) -> Any:
    """What ``drive`` saw on torch's own schedule without regions, where ``mode`` is None, or on ours."""
    regions = "none" if mode is None else "ours"
    stages = stages_of(name, functools.partial(make, regions=regions), **options)
    with tempfile.TemporaryDirectory() as folder:
        schedule = schedule_on(stages, name, m, folder=folder)
    if mode is not None:
        schedule = recompute_ahead(schedule, **mode)
    torch.manual_seed(4)
    return drive(schedule, stages, m)
