"""Picture: the memory of each rank as layers under the line of its device."""
from __future__ import annotations

from collections.abc import Iterator
from html import escape

from torchckpt.jobs.plan import BUFFERS, MARGIN, JobPlan

__all__ = ["drawn"]

_COLOURS = {
    "weights": "#0b6e99", "gradients": "#4f9cb8", "optimizer": "#a3cbdb", "gathered": "#8450a6",
    "activations": "#c7511f", "working": "#e59b72", "buffers": "#8a8a8a",
}  # fmt: skip
_WIDE, _HIGH, _EDGE = 720.0, 300.0, 60.0


def drawn(plan: JobPlan) -> str:
    """An SVG: a bar for each rank of the pipeline, its parts from below, the device's memory and its margin."""
    ranks = [{**memory.parts, "buffers": BUFFERS} for memory in plan.memory]
    most = max(plan.device_bytes, *(sum(parts.values()) for parts in ranks)) * 1.05
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDE:g}" height="{_HIGH + 3 * _EDGE:g}" role="img">',
        f"<title>{escape(plan.summary)}</title>",
        '<style>text{font:13px system-ui,-apple-system,"Segoe UI","DejaVu Sans",sans-serif;fill:#374151}</style>',
        f'<rect width="{_WIDE:g}" height="{_HIGH + 3 * _EDGE:g}" fill="#ffffff"/>',
        f'<text x="{_EDGE:g}" y="24">{escape(plan.job.model.name)}: {plan.step_seconds:.4g} s a step, '
        f"{plan.tokens_per_second:,.0f} tokens a second and GPU</text>",
    ]
    for rank, parts in enumerate(ranks):
        lines.extend(_bar(rank, len(ranks), parts, most))
    for share, words in ((1.0, "device"), (1 - MARGIN, "less the margin")):
        y = _EDGE + _HIGH * (1 - share * plan.device_bytes / most)
        lines.append(f'<line x1="{_EDGE:g}" x2="{_WIDE - _EDGE:g}" y1="{y:.1f}" y2="{y:.1f}" stroke="#222"/>')
        size = f"{words} {share * plan.device_bytes / 1e9:.0f} GB"
        lines.append(f'<text x="{_WIDE - _EDGE:g}" y="{y - 3:.1f}" text-anchor="end">{size}</text>')
    return "\n".join([*lines, *_legend(), "</svg>"]) + "\n"


def _bar(rank: int, ranks: int, parts: dict[str, float], most: float) -> Iterator[str]:
    wide = (_WIDE - 2 * _EDGE) / ranks
    x, y = _EDGE + rank * wide, _EDGE + _HIGH
    for name, size in parts.items():
        high = _HIGH * size / most
        y -= high
        yield (
            f'<rect x="{x + 0.1 * wide:.1f}" y="{y:.1f}" width="{0.8 * wide:.1f}" height="{high:.1f}" '
            f'fill="{_COLOURS[name]}"><title>rank {rank}: {name} {size / 1e9:.1f} GB</title></rect>'
        )
    yield f'<text x="{x + wide / 2:.1f}" y="{_EDGE + _HIGH + 18:g}" text-anchor="middle">{rank}</text>'


def _legend() -> Iterator[str]:
    y = _EDGE + _HIGH + 50
    for place, (name, colour) in enumerate(_COLOURS.items()):
        x = _EDGE + place * 92
        yield f'<rect x="{x:g}" y="{y - 10:g}" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="{x + 16:g}" y="{y:g}">{name}</text>'
