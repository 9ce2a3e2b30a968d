"""Picture: predicted against measured, on logarithmic axes."""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["drawn"]

_SIDE, _EDGE = 420, 60
_COLOURS = ("#0b6e99", "#c7511f", "#3d7d3d", "#8450a6", "#9a7800", "#b0305c", "#4a5a6a", "#007f73", "#6b4a2b",
            "#d98cb3", "#1f3fbf", "#8fb339", "#111111")
_NAMES = {"sc": "Megatron 2021", "zb": "Zero Bubble", "vocabpp": "VocabParallelism", "korth": "Korthikanti 2022",
          "foundry": "llm-foundry", "titan": "torchtitan", "fms": "fms-fsdp", "vtrain": "vTrain"}  # fmt: skip


def drawn(times: Sequence[Any], memories: Sequence[Any]) -> str:
    """Two panels, times and memories, a point for each row, with lines at 10 % more and less."""
    sources = sorted({error.run.source_name for error in [*times, *memories]})
    colours = {source: _COLOURS[place % len(_COLOURS)] for place, source in enumerate(sources)}
    wide = 2 * (_SIDE + _EDGE) + 190
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{_SIDE + 2 * _EDGE}" role="img" '
        f'viewBox="0 0 {wide} {_SIDE + 2 * _EDGE}" aria-label="predicted against measured step time and peak memory">',
        '<style>text{font:14px system-ui,-apple-system,"Segoe UI","DejaVu Sans",sans-serif;fill:#374151}</style>',
        f'<rect width="{wide}" height="{_SIDE + 2 * _EDGE}" fill="#ffffff"/>',
        *_panel(_EDGE, "step time, seconds", times, colours),
        *_panel(2 * _EDGE + _SIDE, "peak memory, GiB", memories, colours),
    ]
    for place, source in enumerate(sources):
        x, y = 2 * (_SIDE + _EDGE) + 30, _EDGE + 20 * place
        lines.append(f'<circle cx="{x}" cy="{y}" r="5" fill="{colours[source]}"/>')
        lines.append(f'<text x="{x + 12}" y="{y + 4}">{_NAMES.get(source, source)}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _panel(left: float, title: str, errors: Sequence[Any], colours: dict[str, str]) -> Iterator[str]:
    values = [value for error in errors for value in (error.measured, error.predicted)] or [1.0, 10.0]
    low, high = (math.log10(value) for value in (min(values) / 1.2, max(values) * 1.2))

    def place(value: float) -> float:
        return (math.log10(value) - low) / (high - low) * _SIDE

    yield f'<text x="{left + _SIDE / 2}" y="{_EDGE - 20}" text-anchor="middle">{title}</text>'
    yield f'<rect x="{left}" y="{_EDGE}" width="{_SIDE}" height="{_SIDE}" fill="none" stroke="#888"/>'
    for share in (1 / 1.1, 1.0, 1.1):
        shift = math.log10(share) / (high - low) * _SIDE
        ends = max(0.0, -shift), min(_SIDE, _SIDE - shift)
        (x1, y1), (x2, y2) = ((left + end, _EDGE + _SIDE - end - shift) for end in ends)
        dash = "" if share == 1 else ' stroke-dasharray="4 4"'
        yield f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#bbb"{dash}/>'
    for value in _ticks(low, high):
        spot = place(value)
        yield f'<text x="{left + spot:.1f}" y="{_EDGE + _SIDE + 16}" text-anchor="middle">{value:g}</text>'
        yield f'<text x="{left - 5}" y="{_EDGE + _SIDE - spot + 4:.1f}" text-anchor="end">{value:g}</text>'
    yield f'<text x="{left + _SIDE / 2}" y="{_EDGE + _SIDE + 36}" text-anchor="middle">measured</text>'
    yield f'<text x="{left + 8}" y="{_EDGE + 18}">predicted</text>'
    for error in errors:
        x, y = left + place(error.measured), _EDGE + _SIDE - place(error.predicted)
        title = f"{error.run.id}: {error.measured:.3g} measured, {error.predicted:.3g} predicted"
        yield (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{colours[error.run.source_name]}" fill-opacity="0.65">'
            f"<title>{title}</title></circle>"
        )


def _ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(low), math.ceil(high) + 1)
    ticks = [factor * 10.0**decade for decade in decades for factor in ((1, 2, 5) if high - low < 2.5 else (1,))]
    return [tick for tick in ticks if low <= math.log10(tick) <= high]
