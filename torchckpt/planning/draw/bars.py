"""Bars: bytes as horizontal bars, a row each, with a name before each bar and its bytes behind it."""
from __future__ import annotations

from collections.abc import Sequence

from torchckpt.planning.draw.canvas import CHARACTER, STYLE, TEXT, Axis, Canvas, clipped, headed
from torchckpt.planning.draw.units import Units

__all__ = ["draw_bars"]

_WIDTH, _LEFT, _RIGHT = 960.0, 16.0, 96.0
_ROW, _BAR = 24.0, 16.0
_LONGEST_NAME = 64


def draw_bars(bars: Sequence[tuple[str, float]], units: Units, title: str, subtitle: str = "") -> str:
    """The bars in the order given, on one scale from 0, as SVG text.

    Args:
        bars: the name and the bytes of each. A long name is clipped.
        units: of the numbers behind the bars.
    """
    names = [clipped(name, _LONGEST_NAME) for name, _ in bars]
    start = 2 * _LEFT + max(map(len, names), default=0) * TEXT * CHARACTER
    axis = Axis(max((amount for _, amount in bars), default=0.0), start, _WIDTH - _RIGHT)
    canvas = Canvas(_WIDTH)
    y = headed(canvas, _LEFT, title, subtitle) + 12
    for name, (_, amount) in zip(names, bars):
        canvas.words(start - 8, y + 12, name, class_="end")
        canvas.rectangle(start, y, axis(amount) - start, _BAR, class_="F")
        canvas.words(axis(amount) + 8, y + 12, units.of_memory(amount))
        y += _ROW
    return canvas.text(y + 8, f"{title}; {subtitle}", STYLE)
