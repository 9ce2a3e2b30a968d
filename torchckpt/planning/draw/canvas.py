"""Canvas: the few elements of SVG that the pictures need, as text, and the axes, titles and legends that they share."""
from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

from torchckpt.planning.draw.units import number

__all__ = ["CHARACTER", "COLOURS", "STYLE", "TEXT", "Axis", "Canvas", "clipped"]


class Canvas:
    """Collects SVG elements; ``text()`` returns the finished document. Keyword arguments become attributes:
    ``stroke_width`` becomes ``stroke-width``, and ``class_`` becomes ``class``."""

    def __init__(self, width: float) -> None:
        self.width = width
        self._parts: list[str] = []

    def rectangle(self, x: float, y: float, width: float, height: float, **attributes: object) -> None:
        self._add("rect", x=x, y=y, width=width, height=height, **attributes)

    def bar(self, x: float, y: float, width: float, height: float, tooltip: str, kind: str) -> None:
        """A rectangle of the class ``kind``, which says its ``tooltip`` to a pointer that rests on it."""
        box = _written({"x": x, "y": y, "width": width, "height": height, "class": kind})
        self._parts.append(f"<rect{box}><title>{_clean(tooltip)}</title></rect>")

    def line(self, x1: float, y1: float, x2: float, y2: float, **attributes: object) -> None:
        self._add("line", x1=x1, y1=y1, x2=x2, y2=y2, **attributes)

    def steps(self, points: Sequence[tuple[float, float]], **attributes: object) -> None:
        """A staircase line through all points: first horizontal, then vertical."""
        x, y = points[0]
        drawn = [f"M{_short(x)},{_short(y)}"]
        for next_x, next_y in points[1:]:
            drawn += [f"H{_short(next_x)}"] * bool(next_x != x) + [f"V{_short(next_y)}"] * bool(next_y != y)
            x, y = next_x, next_y
        self._add("path", d="".join(drawn), **attributes)

    def boxes(self, boxes: Iterable[tuple[float, float, float, float]], **attributes: object) -> None:
        """Many rectangles as one path; each is (x, y, width, height)."""
        drawn = (f"M{_short(x)},{_short(y)}h{_short(w)}v{_short(h)}h{_short(-w)}z" for x, y, w, h in boxes)
        self._add("path", d="".join(drawn), **attributes)

    def ticks(self, places: Iterable[tuple[float, float]], height: float, **attributes: object) -> None:
        """Many vertical lines as one path, each from its (x, y) down."""
        self._add("path", d="".join(f"M{_short(x)},{_short(y)}v{_short(height)}" for x, y in places), **attributes)

    def words(self, x: float, y: float, content: str, **attributes: object) -> None:
        self._parts.append(f"<text{_written({'x': x, 'y': y, **attributes})}>{_clean(content)}</text>")

    def headed(self, x: float, title: str, subtitle: str) -> float:
        """Write what a picture shows, and below it of what, from ``x`` on. Returns where the picture begins."""
        if not title:
            return 0.0
        self.words(x, 28, clipped(title, int((self.width - x) / (18 * CHARACTER))), class_="title")
        if not subtitle:
            return 34.0
        self.words(x, 50, clipped(subtitle, int((self.width - x) / (14 * 0.56))), class_="facts")
        return 58.0

    def scale(self, axis: Axis, y: float, unit: float, most: int = 10, *, above: bool = False) -> None:
        """Draw a horizontal ``axis`` at ``y``, with ticks and numbers below it; ``above`` it, they are in per cent."""
        self.line(axis.start, y, axis.end, y, class_="axis")
        for tick in axis.ticks(most, unit):
            self.line(axis(tick), y, axis(tick), y - 4 if above else y + 4, class_="axis")
            text = number(tick / unit)
            self.words(axis(tick), y - 9 if above else y + 17, f"{text} %" if above else text, class_="middle")

    def grid(self, axis: Axis, left: float, right: float, unit: float, most: int, after: str = "") -> None:
        """Draw a line from ``left`` to ``right`` at each tick of a vertical ``axis``, with its number before it."""
        for tick in axis.ticks(most, unit):
            self.line(left, axis(tick), right, axis(tick), class_="grid")
            self.words(left - 8, axis(tick) + 4, f"{number(tick / unit)}{after}", class_="end")

    def upright(self, x: float, y: float, text: str, kind: str) -> None:
        """Write ``text`` from below to above."""
        self.words(x, y, text, class_=kind, transform=f"rotate(-90 {x:.2f} {y:g})")

    def key(self, style: str, x: float, y: float) -> None:
        """Draw what stands before a name in a legend: a line of the style ``budget``, else a box."""
        if style == "budget":
            self.line(x - 2, y - 4, x + 14, y - 4, class_=style)
        else:
            self.rectangle(x, y - 9, 12, 10, class_=f"{style} key")

    def legend(
        self, entries: Iterable[tuple[str, str]], left: float, y: float,
        key: Callable[[str, float, float], None] | None = None
    ) -> float:
        """Draw the ``key`` of each style with its name, in lines from ``left`` on. Returns where the picture ends."""
        x = left
        for style, name in entries:
            width = 34 + len(name) * TEXT * 0.6
            if x + width > self.width and x > left:
                x, y = left, y + 18
            (key or self.key)(style, x, y)
            self.words(x + 18, y, name)
            x += width
        return y + 16

    def insert(self, picture: str, y: float) -> float:
        """Put another canvas's ``picture`` below ``y``. Returns where it ends."""
        self._parts.append(picture.replace("<svg", f'<svg y="{_short(y)}"', 1).rstrip())
        height = re.search(r' height="([\d.]+)"', picture)
        return y + (float(height[1]) if height else 0.0)

    def text(self, height: float, title: str, style: str) -> str:
        """The SVG document, ``height`` high, on a white background. ``title`` is read by screen readers."""
        size = {"width": self.width, "height": height, "viewBox": f"0 0 {_short(self.width)} {_short(height)}"}
        head = _written({"xmlns": "http://www.w3.org/2000/svg", **size, "role": "img"})
        white = f"<rect{_written({'class': 'paper', 'width': self.width, 'height': height})}/>"
        lines = (f"<svg{head}>", f"<title>{_clean(title)}</title>", f"<style>{style}</style>", white)
        return "\n".join((*lines, *self._parts, "</svg>")) + "\n"

    def _add(self, element: str, **attributes: object) -> None:
        self._parts.append(f"<{element}{_written(attributes)}/>")


def _written(attributes: dict[str, object]) -> str:
    names = (name.rstrip("_").replace("_", "-") for name in attributes)
    values = (quoteattr(_allowed(_short(value))) for value in attributes.values())
    return "".join(f" {name}={value}" for name, value in zip(names, values))


def _short(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, (int, float)) else str(value)


def _clean(content: str) -> str:
    return escape(_allowed(content))


def _allowed(content: str) -> str:
    """``content`` without control characters, which XML does not allow."""
    if content.isprintable():
        return content
    return "".join(character for character in content if character.isprintable() or character in "\t\n")


@dataclass(frozen=True)
class Axis:
    """Maps values from 0 to ``extent`` to coordinates from ``start`` to ``end``. ``end < start`` reverses the axis."""

    extent: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = value / self.extent if self.extent > 0 else 0.0
        return self.start + share * (self.end - self.start)

    def ticks(self, most: int, unit: float = 1.0) -> list[float]:
        """At most ``most + 1`` values: 0 and the multiples of 1, 2 or 5 times a power of ten units, up to the extent.

        >>> Axis(33.0, 0.0, 800.0).ticks(4)
        [0.0, 10.0, 20.0, 30.0]
        """
        if not self.extent > 0:
            return [0.0]
        least = self.extent / unit / most
        power = 10.0 ** math.floor(math.log10(least))
        step = next((n * power for n in (1.0, 2.0, 5.0) if least <= n * power * (1 + 1e-9)), 10.0 * power)
        return [index * step * unit for index in range(math.floor(self.extent / unit / step * (1 + 1e-9)) + 1)]


# Okabe and Ito's palette, which the colour-blind can tell apart: https://jfly.uni-koeln.de/color
COLOURS = {"F": "#56b4e9", "B": "#0072b2", "I": "#0072b2", "W": "#009e73", "R": "#e69f00"}
"""The colours of a forward, a backward, its two halves, and a recompute."""

STYLE = """
text{font:13px system-ui,-apple-system,"Segoe UI","DejaVu Sans",sans-serif;fill:#374151}
.title{font-size:18px;font-weight:700;fill:#111827}
.name{font-size:15px;font-weight:600;fill:#111827} .facts{font-size:14px}
.end{text-anchor:end} .middle{text-anchor:middle} .light{fill:#fff} .dark{fill:#111827}
.paper{fill:#fff} .grid{stroke:#d5d9e0;stroke-width:1} .axis{stroke:#6b7280;stroke-width:1}
.budget{stroke:#c0392b;stroke-width:1.6;stroke-dasharray:6 4}
""" + " ".join(f".{kind}{{fill:{colour}}}" for kind, colour in COLOURS.items())
"""The style of all pictures; each adds its own."""

TEXT = 13.0
"""The size of the font, where nothing else is said: at 700 pixels, a picture of 960 is still legible."""

CHARACTER = 0.62
"""The width of a character, in font sizes."""


def clipped(name: str, longest: int, *, tail: bool = False) -> str:
    """``name`` in at most ``longest`` characters: its beginning and ``...``, or ``...`` and its ``tail``."""
    if len(name) <= longest:
        return name
    return "..." + name[3 - longest:] if tail else name[: longest - 3] + "..."
