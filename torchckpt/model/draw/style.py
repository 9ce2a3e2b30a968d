"""Style: the colours and the lettering that pictures share."""
from __future__ import annotations

from torchckpt.model.draw.canvas import Canvas

__all__ = ["CHARACTER", "COLOURS", "STYLE", "TEXT", "clipped", "headed"]

# Okabe and Ito's palette, which the colour-blind can tell apart: https://jfly.uni-koeln.de/color
COLOURS = {"F": "#56b4e9", "B": "#0072b2", "I": "#0072b2", "W": "#009e73", "R": "#e69f00"}
"""Of a forward, a backward, its two halves, a recompute."""

STYLE = """
text{font:13px system-ui,-apple-system,"Segoe UI","DejaVu Sans",sans-serif;fill:#374151}
.title{font-size:18px;font-weight:700;fill:#111827}
.name{font-size:15px;font-weight:600;fill:#111827} .facts{font-size:14px}
.end{text-anchor:end} .middle{text-anchor:middle} .light{fill:#fff} .dark{fill:#111827}
.paper{fill:#fff} .grid{stroke:#d5d9e0;stroke-width:1} .axis{stroke:#6b7280;stroke-width:1}
.budget{stroke:#c0392b;stroke-width:1.6;stroke-dasharray:6 4}
""" + " ".join(f".{kind}{{fill:{colour}}}" for kind, colour in COLOURS.items())
"""Of a :class:`~torchckpt.model.draw.canvas.Canvas`; a picture adds its own."""

TEXT = 13.0
"""The size of the font, where nothing else is said: at 700 pixels, a picture of 960 is still legible."""

CHARACTER = 0.62
"""The width of a character, in font sizes."""


def clipped(name: str, longest: int, *, tail: bool = False) -> str:
    """``name`` in at most ``longest`` characters: its beginning and ``...``, or ``...`` and its ``tail``."""
    if len(name) <= longest:
        return name
    return "..." + name[3 - longest:] if tail else name[: longest - 3] + "..."


def headed(canvas: Canvas, x: float, title: str, subtitle: str) -> float:
    """What a picture shows, in words, from ``x`` on, and of what, if it is said; where the picture begins."""
    if not title:
        return 0.0
    canvas.words(x, 28, clipped(title, int((canvas.width - x) / (18 * CHARACTER))), class_="title")
    if not subtitle:
        return 34.0
    canvas.words(x, 50, clipped(subtitle, int((canvas.width - x) / (14 * 0.56))), class_="facts")
    return 58.0
