"""Machinery: what a pipeline costs per micro-batch and stage, beside torchgpipe's design; all stages on one CPU."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from turns import Spread, in_turn, ratios, spread
from twin import Twin

from torchckpt import Pipe

__all__ = ["CELLS", "REQUIRED", "Cell", "gradients_equal", "measure", "show"]

REQUIRED = 0.5
"""At most, of the twin's, with one stage of two layers."""
MODES = ("never", "except_last", "always")
CHUNKS = 8
WIDTH = 16
_SIDES = ("plain", "twin", "ours")


class Cell(NamedTuple):
    """Stages, layers in each, and which micro-batches are regions."""

    stages: int
    layers: int
    mode: str

    def __str__(self) -> str:
        return f"{self.stages} x {self.layers} layers, {self.mode}"


CELLS = [Cell(stages, layers, mode) for stages, layers in ((1, 2), (1, 8), (2, 2), (4, 2)) for mode in MODES]


class Sides(NamedTuple):
    """Three models with the same weights: plain, in the twin, and in ours."""

    models: list[nn.Sequential]
    calls: list[Callable[[Tensor], Tensor]]
    close: Callable[[], None]

    @classmethod
    def of(cls, cell: Cell) -> Sides:
        models = [_layers(cell.stages * cell.layers) for _ in _SIDES]
        balance = [cell.layers] * cell.stages
        twin = Twin(models[1], balance, CHUNKS, cell.mode)
        ours = Pipe(models[2], balance, chunks=CHUNKS, checkpoint=cell.mode)  # type: ignore[arg-type]  # one of three
        return cls(models, [partial(_plain, models[0]), twin, ours], twin.close)

    def runs(self) -> dict[str, Callable[[], None]]:
        x = torch.randn(2 * CHUNKS, WIDTH)
        return {name: partial(_step, call, x) for name, call in zip(_SIDES, self.calls)}


def measure(rounds: int, calls: int = 20) -> list[dict[str, Any]]:
    """Per cell the microseconds that the twin and ours add, per micro-batch and stage; and ours over the twin's."""
    return [_measured(cell, rounds, calls) for cell in CELLS]


def _measured(cell: Cell, rounds: int, calls: int) -> dict[str, Any]:
    sides = Sides.of(cell)
    seconds = in_turn(sides.runs(), rounds, calls)
    sides.close()
    count = CHUNKS * cell.stages
    plain = seconds["plain"]
    adds = {
        name: [(all_of_it - base) / count * 1e6 for all_of_it, base in zip(seconds[name], plain)]
        for name in ("twin", "ours")
    }
    return {
        **cell._asdict(),
        "plain": spread([base / count * 1e6 for base in plain]),
        **{name: spread(values) for name, values in adds.items()},
        "ours / twin": ratios(adds["ours"], adds["twin"]),
    }


def gradients_equal(cell: Cell) -> bool:
    """Of the twin and of ours, to those of the plain layers, to the bit."""
    sides = Sides.of(cell)
    for run in sides.runs().values():
        run()
    sides.close()
    plain, *others = ([parameter.grad for parameter in model.parameters()] for model in sides.models)
    return all(torch.equal(a, b) for other in others for a, b in zip(plain, other))


def show(rows: list[dict[str, Any]]) -> None:
    print(f"what is added per micro-batch and stage, µs; {CHUNKS} micro-batches; Linear({WIDTH}, {WIDTH}) and ReLU")
    print(f"{'stages x layers, regions':32}{'plain':>10}{'twin adds':>26}{'ours adds':>26}{'ours / twin':>26}")
    print("\n".join(_lines(rows)), end="\n\n")


def _lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        cell = Cell(row["stages"], row["layers"], row["mode"])
        required = f"   at most {REQUIRED}" if cell[:2] == (1, 2) else ""
        cells = "".join(f"{_spread(row[name]):>26}" for name in ("twin", "ours", "ours / twin"))
        yield f"{cell!s:32}{row['plain'][1]:10.1f}{cells}{required}"


def _spread(values: Spread) -> str:
    return str(Spread(*values))


def _layers(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.ReLU() if layer % 2 else nn.Linear(WIDTH, WIDTH) for layer in range(count)))


def _plain(model: nn.Sequential, x: Tensor) -> Tensor:
    return torch.cat([model(micro_batch) for micro_batch in x.chunk(CHUNKS)])


def _step(call: Callable[[Tensor], Tensor], x: Tensor) -> None:
    call(x).sum().backward()
