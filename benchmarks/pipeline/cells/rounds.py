"""Rounds: run the variants of a cell in turn on ``p`` processes, and record their times."""
from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.pipeline.cells.cell import NAMED, Cell, Prediction, predict
from benchmarks.pipeline.cells.variants import MORE, VARIANTS, Variant, model_costs
from benchmarks.pipeline.processes import on_processes
from benchmarks.pipeline.sleeping.block import Costs
from benchmarks.pipeline.sleeping.link import new_table

__all__ = ["Measured", "Settings", "run_cells"]

Span: TypeAlias = "tuple[float, float]"


@dataclass(frozen=True)
class Settings:
    """The settings of all cells."""

    rounds: int
    warm_up: int
    forward_seconds: float
    names: tuple[str, ...] = ()
    """The variants to run; they include none, stock and ours. Empty: these three, and all in the named cells."""

    def names_in(self, cell: Cell) -> tuple[str, ...]:
        return self.names or (MORE if cell in NAMED else VARIANTS)

    def costs(self, cell: Cell) -> Costs:
        return Costs(self.forward_seconds, 2 * self.forward_seconds, cell.tc * self.forward_seconds)


@dataclass(frozen=True)
class Measured:
    """The measurements of one cell."""

    cell: Cell
    seconds: dict[str, list[float]]
    """By variant, the seconds of each round."""
    equal: bool
    """Whether losses and gradients of all variants were bit-equal, on every rank, in every round."""
    nominal: Prediction
    """The simulation with the nominal costs."""
    measured: Prediction
    """The simulation with the costs that ``report()`` measured."""
    recompute_seconds: float
    """The longest measured recompute of all stages."""
    early: list[list[float]]
    """By rank, for each recompute of the last step: the seconds from its start to the arrival of its gradient."""
    order: list[list[str]]
    """By rank, the actions that ours runs."""


def run_cells(cells: Sequence[Cell], settings: Settings, done: Callable[[Measured], None]) -> None:
    """Measure ``cells``; cells with equally many stages share processes. ``done`` is called with each result."""
    for p in sorted({cell.p for cell in cells}):
        mine = [cell for cell in cells if cell.p == p]
        tables = [new_table(p, cell.m) for cell in mine]
        for measured in on_processes(p, _measure_all, mine, settings, tables):
            done(measured)


def _measure_all(
    rank: int, tell: Callable[[Measured], None], cells: list[Cell], settings: Settings, tables: list[Tensor]
) -> None:
    for cell, table in zip(cells, tables):
        measured = _measure(rank, cell, settings, table)
        if rank == 0:
            tell(measured)


def _measure(rank: int, cell: Cell, settings: Settings, table: Tensor) -> Measured:
    variants = {name: Variant(name, cell, rank, settings.costs(cell), table) for name in settings.names_in(cell)}
    spans: dict[str, list[Span]] = {name: [] for name in variants}
    early: list[float] = []
    equal = True
    for turn in range(settings.warm_up + settings.rounds):
        made: list[list[Tensor]] = []
        for name, variant in variants.items():
            span, tensors = _step(variant, seed=100 * turn + rank)
            spans[name].append(span)
            made.append(tensors)
            early = variant.early() if name == "ours" else early
        equal &= all(len(one) == len(made[0]) and all(map(torch.equal, one, made[0])) for one in made)
    said: list[Any] = [None] * cell.p
    dist.all_gather_object(said, (spans, equal, early))
    seconds = {name: _seconds([spans[name] for spans, _, _ in said])[settings.warm_up :] for name in variants}
    return _measured(cell, settings, variants["ours"], seconds, said)


def _measured(
    cell: Cell, settings: Settings, ours: Variant, seconds: dict[str, list[float]], said: list[Any]
) -> Measured:
    step = ours.schedule.report().step  # of all ranks
    order = ours.schedule.schedule
    costs, link = model_costs(settings.costs(cell))
    return Measured(
        cell,
        seconds,
        all(equal for _, equal, _ in said),
        predict(cell, order, [costs] * cell.p, [link] * (cell.p - 1)),
        predict(cell, order, step.stages, step.links),
        max(sum(block.recompute_seconds for block in stage.blocks) for stage in step.stages),
        [early for _, _, early in said],
        [[str(action) for action in actions] for actions in order.ranks],
    )


def _step(variant: Variant, seed: int) -> tuple[Span, list[Tensor]]:
    gc.collect()
    dist.barrier()
    begin = time.perf_counter()
    losses = variant.step(seed)
    end = time.perf_counter()
    return (begin, end), [*losses, *(grad.clone() for grad in variant.gradients())]


def _seconds(ranks: list[list[Span]]) -> list[float]:
    """For each step, the seconds from its start on rank 0, the first stage, until the last rank is done."""
    return [max(end for _, end in step) - step[0][0] for step in zip(*ranks)]
