"""Variants: steps with the same stages, order and runtime that differ in what they recompute, and when."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from benchmarks.losses import mean_square
from benchmarks.pipeline.cells.cell import Cell
from benchmarks.pipeline.plain import Plain
from benchmarks.pipeline.sleeping.block import Block, Costs
from benchmarks.pipeline.sleeping.link import BACK, LinkedStage, Wire
from benchmarks.stock import Stock
from torchckpt import checkpoint_module
from torchckpt.distributed import recompute_ahead, schedule_of
from torchckpt.planning import Block as Work
from torchckpt.planning import Kind, Link

__all__ = ["MORE", "VARIANTS", "Variant"]

VARIANTS = ("none", "stock", "ours")
MORE = (*VARIANTS, "unplaced", "torch")
_CLASSES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_ROWS, _WIDTH = 4, 16


def model_costs(costs: Costs) -> tuple[Work, Link]:
    forward, half = costs.forward_seconds, costs.backward_seconds / 2
    return Work(forward, half, half, forward), Link(costs.link_seconds)


class Variant:
    """One of :data:`MORE`, on this rank. All of them start with the same parameters, and draw the same masks."""

    def __init__(self, name: str, cell: Cell, rank: int, costs: Costs, table: Tensor) -> None:
        torch.manual_seed(rank)
        self.block = Block(costs, _WIDTH)
        module: nn.Module = Stock(self.block) if name in ("stock", "torch") else self.block
        if name in ("ours", "unplaced"):
            checkpoint_module(module)
        self.wire = Wire(table, costs.link_seconds)
        self.stage = LinkedStage(module, rank, cell.p, self.wire)
        live = _CLASSES[cell.schedule](self.stage, n_microbatches=cell.m, loss_fn=mean_square)
        self.schedule = _ON_RUNTIME[name](live, costs)
        data = torch.Generator().manual_seed(cell.p)
        self._x, self._y = torch.randn(2, cell.m * _ROWS, _WIDTH, generator=data)

    def step(self, seed: int) -> list[Tensor]:
        """Run one step; return its losses, on the last stage. For the gradients, see :meth:`gradients`."""
        self.block.zero_grad()
        self.block.recomputes.clear()
        torch.manual_seed(seed)
        losses: list[Tensor] = []
        inputs = (self._x,) if self.stage.is_first else ()
        target = {"target": self._y} if self.stage.is_last else {}
        self.schedule.step(*inputs, **target, losses=losses, return_outputs=False)
        return losses

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.block.parameters() if parameter.grad is not None]

    def early(self) -> list[float]:
        """For ours: the seconds from the start of each recompute of the last step to the arrival of its gradient."""
        stage = self.stage.stage_index
        due = [action.micro_batch for action in self.schedule.schedule.ranks[stage] if action.kind is Kind.RECOMPUTE]
        return [self.wire.arrives(BACK, stage, i) - begin for i, (begin, _) in zip(due, self.block.recomputes)]


def _plain(live: Any, costs: Costs) -> Plain:
    return Plain(live, schedule_of(live))


def _ours(live: Any, costs: Costs) -> Any:
    stage, link = model_costs(costs)
    return recompute_ahead(live, costs=stage, link=link)


_ON_RUNTIME: dict[str, Callable[[Any, Costs], Any]] = {
    "none": _plain,
    "stock": _plain,
    "ours": _ours,
    "unplaced": lambda live, costs: recompute_ahead(live),
    "torch": lambda live, costs: live,
}
