"""Machinery: the overhead of a pipeline per micro-batch and stage, beside torchgpipe's; all stages on one CPU."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.pipe.twin import Twin
from benchmarks.turns import Spread, in_turn, ratios, spread
from torchckpt import Pipe

__all__ = ["CELLS", "REQUIRED", "Cell", "gradients_equal", "measure", "show"]

REQUIRED = 0.5
"""The largest allowed overhead over the twin's, for one stage of two layers."""
MODES = ("never", "except_last", "always")
CHUNKS = 8
WIDTH = 16


class Cell(NamedTuple):
    """The number of stages, the layers in each, and which micro-batches are recomputed."""

    stages: int
    layers: int
    mode: str

    def __str__(self) -> str:
        return f"{self.stages} x {self.layers} layers, {self.mode}"


CELLS = [Cell(stages, layers, mode) for stages, layers in ((1, 2), (1, 8), (2, 2), (4, 2)) for mode in MODES]


class Side(NamedTuple):
    """A model and the function that runs it; all models have the same weights."""

    model: nn.Sequential
    call: Callable[[Tensor], Tensor]


def measure(rounds: int, calls: int = 20) -> list[dict[str, Any]]:
    """For each cell, the microseconds that each side adds per micro-batch and stage, and ours over the twin's."""
    return [_measured(cell, rounds, calls) for cell in CELLS]


def _measured(cell: Cell, rounds: int, calls: int) -> dict[str, Any]:
    seconds = _seconds(cell, rounds, calls)
    count = CHUNKS * cell.stages
    plain = seconds.pop("plain")
    adds = {
        name: [(whole - base) / count * 1e6 for whole, base in zip(values, plain)] for name, values in seconds.items()
    }
    over = {f"ours / {name}": ratios(adds["ours"], values) for name, values in adds.items() if name != "ours"}
    return {
        **cell._asdict(),
        "plain": spread([base / count * 1e6 for base in plain]),
        "adds": {name: spread(values) for name, values in adds.items()},
        **over,
    }


def _seconds(cell: Cell, rounds: int, calls: int) -> dict[str, list[float]]:
    """Seconds in four groups of rounds, each with new threads: the cost of a thread depends on its core."""
    seconds: dict[str, list[float]] = {}
    x = torch.randn(2 * CHUNKS, WIDTH)
    for _ in range(4):
        with _sides(cell) as sides:
            runs = {name: partial(_step, side.call, x) for name, side in sides.items()}
            for name, values in in_turn(runs, -(-rounds // 4), calls).items():
                seconds.setdefault(name, []).extend(values)
    return seconds


@contextmanager
def _sides(cell: Cell) -> Iterator[dict[str, Side]]:
    models = [_layers(cell.stages * cell.layers) for _ in range(4)]
    balance = [cell.layers] * cell.stages
    twin = Twin(models[1], balance, CHUNKS, cell.mode)
    ours = Pipe(models[2], balance, chunks=CHUNKS, checkpoint=cell.mode)  # type: ignore[arg-type]  # one of three
    sides = {"plain": partial(_plain, models[0]), "twin": twin, "ours": ours}
    if find_spec("torchgpipe"):  # torchgpipe itself, if it is installed
        devices = ["cpu"] * cell.stages
        gpipe = import_module("torchgpipe").GPipe
        sides["torchgpipe"] = gpipe(models[3], balance, devices=devices, chunks=CHUNKS, checkpoint=cell.mode)
    try:
        yield {name: Side(model, call) for model, (name, call) in zip(models, sides.items())}
    finally:
        twin.close()


def gradients_equal(cell: Cell) -> bool:
    """Whether the gradients of the twin and of ours are bit-equal to those of the plain layers."""
    x = torch.randn(2 * CHUNKS, WIDTH)
    with _sides(cell) as sides:
        for side in sides.values():
            _step(side.call, x)
    plain, *others = ([parameter.grad for parameter in side.model.parameters()] for side in sides.values())
    return all(torch.equal(a, b) for other in others for a, b in zip(plain, other))


def show(rows: list[dict[str, Any]]) -> None:
    print(f"what is added per micro-batch and stage, µs; {CHUNKS} micro-batches; Linear({WIDTH}, {WIDTH}) and ReLU")
    others = [name for name in rows[0] if name.startswith("ours / ")]
    heads = "".join(f"{head:>26}" for head in (*(f"{name} adds" for name in rows[0]["adds"]), *others))
    print(f"{'stages x layers, regions':32}{'plain':>8}{heads}")
    for row in rows:
        cell = Cell(row["stages"], row["layers"], row["mode"])
        cells = "".join(f"{Spread(*values)!s:>26}" for values in (*row["adds"].values(), *map(row.get, others)))
        required = f"   required: at most {REQUIRED}" if cell[:2] == (1, 2) else ""
        print(f"{cell!s:32}{row['plain'][1]:8.1f}{cells}{required}")
    print()


def _layers(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.ReLU() if layer % 2 else nn.Linear(WIDTH, WIDTH) for layer in range(count)))


def _plain(model: nn.Sequential, x: Tensor) -> Tensor:
    return torch.cat([model(micro_batch) for micro_batch in x.chunk(CHUNKS)])


def _step(call: Callable[[Tensor], Tensor], x: Tensor) -> None:
    call(x).sum().backward()
