"""Picture: predicted against measured, on logarithmic axes."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from torchckpt.planning.draw.canvas import STYLE, Axis, Canvas

__all__ = ["drawn"]

_SIDE, _TOP, _LEFT = 400.0, 60.0, 64.0
_COLOURS = ("#0b6e99", "#c7511f", "#3d7d3d", "#8450a6", "#9a7800", "#b0305c", "#4a5a6a", "#007f73", "#6b4a2b",
            "#d98cb3", "#1f3fbf", "#8fb339", "#111111")
_NAMES = {"sc": "Megatron 2021", "zb": "Zero Bubble", "vocabpp": "VocabParallelism", "korth": "Korthikanti 2022",
          "foundry": "llm-foundry", "titan": "torchtitan", "fms": "fms-fsdp", "vtrain": "vTrain"}  # fmt: skip


@dataclass(frozen=True)
class _LogAxis(Axis):
    """From ``low`` to ``extent``; equal factors are equally far apart."""

    low: float = 1.0

    def __call__(self, value: float) -> float:
        return self.start + math.log(value / self.low) / math.log(self.extent / self.low) * (self.end - self.start)

    def ticks(self, most: int, unit: float = 1.0) -> list[float]:
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.extent)) + 1)
        factors = (1, 2, 5) if len(decades) < 5 else (1,)
        ticks = [factor * 10.0**decade for decade in decades for factor in factors]
        return [tick for tick in ticks if self.low <= tick <= self.extent]


def drawn(times: Sequence[Any], memories: Sequence[Any]) -> str:
    """Two panels, times and memories, a point for each row, with lines at 10 % more and less."""
    sources = sorted({error.run.source_name for error in [*times, *memories]})
    colours = (f".{source}{{fill:{colour};fill-opacity:.75}}" for source, colour in zip(sources, cycle(_COLOURS)))
    canvas = Canvas(2 * (_SIDE + _LEFT) + 40)
    _panel(canvas, _LEFT, "step time, seconds", times)
    _panel(canvas, 2 * _LEFT + _SIDE, "peak memory, GiB", memories)
    entries = ((source, _NAMES.get(source, source)) for source in sources)
    height = canvas.legend(entries, _LEFT, _TOP + _SIDE + 62)
    style = "\n".join((STYLE, ".even{stroke:#6b7280}", *colours))
    return canvas.text(height, "predicted against measured step time and peak memory", style)


def _panel(canvas: Canvas, left: float, title: str, errors: Sequence[Any]) -> None:
    values = [value for error in errors for value in (error.measured, error.predicted)] or [1.0, 10.0]
    low, high = min(values) / 1.2, max(values) * 1.2
    across, up = _LogAxis(high, left, left + _SIDE, low), _LogAxis(high, _TOP + _SIDE, _TOP, low)
    canvas.words(left + _SIDE / 2, _TOP - 20, title, class_="middle name")
    canvas.words(left + _SIDE / 2, up.start + 38, "measured", class_="middle")
    canvas.words(left + 8, _TOP + 18, "predicted")
    canvas.scale(across, up.start, 1.0)
    canvas.grid(up, left, across.end, 1.0, 10)
    for share in (1 / 1.1, 1.0, 1.1):
        first, last = max(low, low / share), min(high, high / share)
        kind = "even" if share == 1 else "axis"
        canvas.line(across(first), up(first * share), across(last), up(last * share), class_=kind)
    for error in errors:
        text = f"{error.run.id}: {error.measured:.3g} measured, {error.predicted:.3g} predicted"
        canvas.bar(across(error.measured) - 3, up(error.predicted) - 3, 6, 6, text, error.run.source_name)
