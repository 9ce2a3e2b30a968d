"""Rounds: the variants of a cell in turn, on ``p`` processes; what each of them took."""
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
    """What all cells have in common."""

    rounds: int
    warm_up: int
    forward_seconds: float
    names: tuple[str, ...] = ()
    """The variants, with none, stock and ours among them. Empty: these, and in the named cells all."""

    def names_in(self, cell: Cell) -> tuple[str, ...]:
        return self.names or (MORE if cell in NAMED else VARIANTS)

    def costs(self, cell: Cell) -> Costs:
        return Costs(self.forward_seconds, 2 * self.forward_seconds, cell.tc * self.forward_seconds)


@dataclass(frozen=True)
class Measured:
    """A cell."""

    cell: Cell
    seconds: dict[str, list[float]]
    """Per variant, of every round."""
    equal: bool
    """Whether losses and gradients of all variants were equal to the bit, on every rank, in every round."""
    nominal: Prediction
    """With the costs that were asked for."""
    measured: Prediction
    """With those that ``report()`` measured."""
    recompute_seconds: float
    """As measured, the longest of all stages."""
    early: list[list[float]]
    """Per rank and recompute of the last step, by how many seconds it began before its gradient arrived."""
    order: list[list[str]]
    """What ours runs, per rank."""


def run_cells(cells: Sequence[Cell], settings: Settings, done: Callable[[Measured], None]) -> None:
    """Measure ``cells``, those of as many stages on the same processes; ``done`` is told of each when it is ready."""
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
    report = ours.schedule.report()  # of all ranks
    order = ours.schedule.schedule
    costs, link = model_costs(settings.costs(cell))
    return Measured(
        cell,
        seconds,
        all(equal for _, equal, _ in said),
        predict(cell, order, [costs] * cell.p, [link] * (cell.p - 1)),
        predict(cell, order, report.costs, report.links),
        max(stage.recompute_seconds for stage in report.costs),
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
    """Per step: from when rank 0, which has the first stage, begins it, to when the last rank is done."""
    return [max(end for _, end in step) - step[0][0] for step in zip(*ranks)]
