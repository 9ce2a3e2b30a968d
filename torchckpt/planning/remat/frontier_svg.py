"""Draw the frontier as SVG: of each plan, its peak memory and its extra compute, beside those of other tools."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain, cycle, islice
from typing import NamedTuple, TypeAlias

from torchckpt.planning.draw.canvas import CHARACTER, STYLE, Axis, Canvas, clipped
from torchckpt.planning.draw.units import percent, units_of_bytes

__all__ = ["draw_frontier"]

Point: TypeAlias = tuple[int, float]
"""The peak in bytes, and the recompute as a share of the eager step."""


class _Look(NamedTuple):
    """How the points of one tool look."""

    colour: str
    is_round: bool
    is_turned: bool
    is_hollow: bool


# The rest of Okabe and Ito's palette; shapes differ too, for print without colours.
_OURS = _Look("#0072b2", True, False, False)
_OTHERS = (
    _Look("#d55e00", False, False, False),
    _Look("#009e73", False, True, False),
    _Look("#cc79a7", True, False, True),
    _Look("#e69f00", False, False, True),
    _Look("#6b7280", False, True, True),
)
_STYLE = STYLE + """
.budgeted{font-size:11px;paint-order:stroke;stroke:#fff;stroke-width:3px}
.frontier{fill:none;stroke:#0072b2;stroke-width:1.8} .eager{stroke:#6b7280;stroke-width:1.2;stroke-dasharray:2 3}
"""
_WIDTH, _LEFT, _RIGHT = 720.0, 76.0, 24.0
_END = _WIDTH - _RIGHT
_BUDGET = 11.0  # the size of a budget's font
_TOP, _BOTTOM = 116.0, 396.0  # of the chart
_LONGEST_NAME = 40


def draw_frontier(
    points: Sequence[Point],
    others: Mapping[str, Sequence[Point]] | None = None,
    *,
    eager_peak_bytes: int,
    title: str = "Memory against recompute",
    name: str = "torchckpt",
    cost: str = "extra compute",
    budgets: Mapping[Point, str] | None = None,
) -> str:
    """Peak memory across, extra compute up, as a document for a file: down and to the left is better.

    Args:
        points: of each plan, its peak in bytes and what it recomputes, as a share of the eager step; in any order. The
            line is the least recompute of all plans that fit into a memory.
        others: points of other tools by their names, drawn without a line.
        eager_peak_bytes: the peak of the step that recomputes nothing.
        title: above the picture; clipped if long.
        name: of the tool that made ``points``.
        cost: what the shares are of, such as ``extra FLOPs`` or ``extra time``.
        budgets: of any point, what its budget was; written beside it where there is room.
    """
    picture = _Frontier(points, others or {}, eager_peak_bytes)
    canvas = Canvas(_WIDTH)
    canvas.headed(_LEFT, title, picture.facts)
    _axes(canvas, picture, cost)
    if picture.line:
        canvas.steps([*map(picture.place, picture.line)], class_="frontier")
    looks = [_OURS, *islice(cycle(_OTHERS), len(picture.others))]
    for look, of_tool in reversed([*zip(looks, (picture.points, *picture.others.values()))]):
        for point in of_tool:
            _mark(canvas, *picture.place(point), look)
    _budgets(canvas, picture, budgets or {})

    def key(tool: str, x: float, y: float) -> None:
        if tool == "0":
            canvas.line(x - 6, y - 4, x + 14, y - 4, class_="frontier")
        if tool == "eager":
            canvas.line(x + 4, y - 10, x + 4, y + 2, class_=tool)
        else:
            _mark(canvas, x + 4, y - 4, looks[int(tool)])

    tools = [(str(index), clipped(tool, _LONGEST_NAME)) for index, tool in enumerate((name, *picture.others))]
    bottom = canvas.legend([*tools, ("eager", "eager")], _LEFT, _BOTTOM + 60, key)
    return canvas.text(bottom, f"{title}: {picture.facts}", _STYLE)


class _Frontier:
    """A frontier as it is drawn, with its scales. ``line`` is the least share up to each peak."""

    def __init__(self, points: Sequence[Point], others: Mapping[str, Sequence[Point]], eager_peak_bytes: int) -> None:
        self.points, self.others, self.eager_peak_bytes = sorted(points), others, eager_peak_bytes
        self.all = [*self.points, *chain.from_iterable(others.values())]
        peaks = [peak for peak, _ in self.points]
        self.line = list(zip(peaks, accumulate((share for _, share in self.points), min)))
        self.memory = Axis(max((eager_peak_bytes, *(peak for peak, _ in self.all))) * 1.04, _LEFT, _END)
        shares = [0.0, *(share for _, share in self.all)]  # compiled code may take less than none
        most, least = 1.1 * max(shares) or 0.1, 1.1 * min(shares)
        self.cost = Axis(most, _BOTTOM + (_BOTTOM - _TOP) * least / (most - least), _TOP)
        self.units = replace(units_of_bytes(self.memory.extent), digits=3)

    def place(self, point: Point) -> tuple[float, float]:
        return self.memory(point[0]), self.cost(point[1])

    @property
    def facts(self) -> str:
        facts = f"eager peak {self.units.of_memory(self.eager_peak_bytes)}"
        if not self.points:
            return facts
        peak, share = self.points[0]
        of_eager = f" ({percent(peak / self.eager_peak_bytes)} of it)" if self.eager_peak_bytes else ""
        return f"{facts}; the least here {self.units.of_memory(peak)}{of_eager} for +{percent(share)}"


def _axes(canvas: Canvas, picture: _Frontier, cost: str) -> None:
    memory, units, eager, across = picture.memory, picture.units, picture.eager_peak_bytes, (_LEFT + _END) / 2
    canvas.grid(picture.cost, _LEFT, _END, 0.01, 6, " %")
    canvas.upright(20, (_TOP + _BOTTOM) / 2, cost, "middle")
    canvas.scale(memory, _BOTTOM, units.bytes, 8)
    canvas.words(across, _BOTTOM + 34, f"peak memory, {units.memory}", class_="middle")
    canvas.words(across, _TOP - 26, "peak memory, % of eager", class_="middle")
    if eager:
        canvas.scale(Axis(memory.extent / eager, _LEFT, _END), _TOP, 0.01, 8, above=True)
    canvas.words(_LEFT + 8, _BOTTOM - 8, "↙ better")
    canvas.line(memory(eager), _TOP, memory(eager), _BOTTOM, class_="eager")


def _mark(canvas: Canvas, x: float, y: float, look: _Look) -> None:
    attributes: dict[str, object] = {"fill": "#fff" if look.is_hollow else look.colour, "stroke": look.colour}
    if look.is_round:
        attributes["rx"] = 4
    if look.is_turned:
        attributes["transform"] = f"rotate(45 {x:.2f} {y:.2f})"
    canvas.rectangle(x - 4, y - 4, 8, 8, stroke_width=1.5, **attributes)


def _budgets(canvas: Canvas, picture: _Frontier, budgets: Mapping[Point, str]) -> None:
    """Write each budget beside its point: left of ours, right of the others'; nothing where no place is free."""
    marks = [picture.place(point) for point in picture.all]
    taken: list[tuple[float, float, float]] = []  # the middle, the line, and half the length
    for point, text in sorted(budgets.items()):
        (x, y), half = picture.place(point), len(text) * _BUDGET * CHARACTER / 2
        places = [(x + half + 7, y + 4), (x, y - 8)]
        if point in picture.points:
            places = [(x - half - 6, y + 12), (x, y - 8)] if y < _BOTTOM - 12 else [(x, y - 8)]
        for middle, line in places:
            apart = all(abs(middle - x) > half + long + 2 or abs(line - low) >= _BUDGET for x, low, long in taken)
            hits = any(abs(middle - x) < half + 5 and line - _BUDGET - 4 < y < line + 4 for x, y in marks)
            if apart and not hits and middle - half > _LEFT:
                taken.append((middle, line, half))
                canvas.words(middle, line, text, class_="middle budgeted")
                break
