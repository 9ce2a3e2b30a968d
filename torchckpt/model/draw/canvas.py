"""Canvas: the few elements of SVG that the charts need, as text."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape, quoteattr

__all__ = ["Canvas"]


class Canvas:
    """Collects SVG elements; ``text()`` returns the finished document. Keyword arguments become attributes:
    ``stroke_width`` becomes ``stroke-width``, and ``class_`` becomes ``class``."""

    def __init__(self, width: float) -> None:
        self.width = width
        self._parts: list[str] = []

    def rectangle(self, x: float, y: float, width: float, height: float, **attributes: object) -> None:
        self._add("rect", x=x, y=y, width=width, height=height, **attributes)

    def line(self, x1: float, y1: float, x2: float, y2: float, **attributes: object) -> None:
        self._add("line", x1=x1, y1=y1, x2=x2, y2=y2, **attributes)

    def steps(self, points: Sequence[tuple[float, float]], **attributes: object) -> None:
        """A staircase line through all points: first horizontal, then vertical."""
        x, y = points[0]
        drawn = [f"M{_short(x)},{_short(y)}"]
        for next_x, next_y in points[1:]:
            drawn += [f"H{_short(next_x)}"] * (next_x != x) + [f"V{_short(next_y)}"] * (next_y != y)
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
    return "".join(f" {name.rstrip('_').replace('_', '-')}={quoteattr(_value(at))}" for name, at in attributes.items())


def _value(value: object) -> str:
    return _short(value) if isinstance(value, (int, float)) else _allowed(str(value))


def _short(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _clean(content: str) -> str:
    return escape(_allowed(content))


def _allowed(content: str) -> str:
    """``content`` without control characters, which XML does not allow."""
    return "".join(character for character in content if character.isprintable() or character in "\t\n")
