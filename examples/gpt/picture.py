"""Picture: the bytes alive over one training step, drawn with matplotlib."""
from __future__ import annotations

from pathlib import Path
from typing import Any

from .memory import Curve
from .table import MIB

__all__ = ["draw_memory"]

_BLACK, _ORANGE, _BLUE = "#333333", "#d55e00", "#0072b2"  # also distinct for the colour-blind
_BACKWARD = 2.0  # width of the backward; the forward has 1


def draw_memory(plain: Curve, stock: Curve, ours: Curve, subtitle: str, path: Path) -> None:
    """Draw the three curves. Each phase has the same width in all of them, however many operations it has."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    _frame(axes, f"Same loss, {plain.peak / ours.peak:.1f}x less memory", subtitle, plain.peak / MIB)
    _curve(axes, ours, "torchckpt", _BLUE, (0.37, 0.35))
    _curve(axes, stock, "torch.utils.checkpoint", _ORANGE, (0.37, 0.25))
    _curve(axes, plain, "no checkpointing", _BLACK, (0.37, 0.95))
    note = "torchckpt: in each stage one micro-batch\nis recomputed ahead of its gradient"
    font: dict[str, Any] = {"fontsize": 11, "color": "#555555", "horizontalalignment": "right"}
    axes.text(0.99, 0.74, note, transform=axes.transAxes, **font)
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": "torchckpt"}):  # equal pictures give equal files
        figure.savefig(path, metadata={"Date": None})


def _frame(axes: Any, title: str, subtitle: str, top: float) -> None:
    axes.set_title(title, loc="left", fontsize=17, fontweight="bold", pad=26)
    axes.text(0, 1.04, subtitle, transform=axes.transAxes, fontsize=11.5, color="#555555")
    axes.set(xlim=(0, 1 + _BACKWARD), ylim=(0, 1.05 * top))
    axes.set_ylabel("MiB alive", fontsize=12)
    axes.set_xticks([0.5, 1 + _BACKWARD / 2], ["forward", "backward"], fontsize=13)
    axes.tick_params(axis="x", length=0)
    axes.axvline(1, color="#999999", linestyle=":", linewidth=1.2)
    axes.grid(axis="y", color="#e6e6e6")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _curve(axes: Any, curve: Curve, name: str, color: str, label: tuple[float, float]) -> None:
    """The curve, a dot at its peak, and a label at a place given in fractions of the axes."""
    points = [*_spread(curve.forward, 0, 1), *_spread(curve.backward, 1, _BACKWARD)]
    x, y = max(points, key=lambda point: point[1])
    axes.plot(*zip(*points), color=color, linewidth=1.8)
    axes.plot(x, y, "o", color=color, markersize=6)
    font: dict[str, Any] = {"fontsize": 13, "fontweight": "bold", "color": color, "verticalalignment": "center"}
    axes.text(*label, f"{name}: {y:.0f} MiB", transform=axes.transAxes, **font)


def _spread(alive: list[int], start: float, width: float) -> list[tuple[float, float]]:
    """Points of a curve: the peak MiB alive in each part of a phase."""
    parts = min(len(alive), round(300 * width))
    ends = [len(alive) * i // parts for i in range(parts + 1)]
    return [(start + width * i / parts, max(alive[ends[i] : ends[i + 1]]) / MIB) for i in range(parts)]
