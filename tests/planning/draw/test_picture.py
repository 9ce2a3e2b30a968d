"""In no picture does a text or a box overlap another one, and nothing is outside of the frame."""
from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from tests.planning.draw.picture import Picture, faults
from tests.planning.draw.test_svg import STEPS
from tests.planning.remat.test_frontier_svg import OTHERS, OURS
from tests.planning.remat.test_plan_svg import FLOWS, drawn
from tests.slow import few
from torchckpt.planning.draw.svg import svg
from torchckpt.planning.remat.flow.memory import simulate
from torchckpt.planning.remat.frontier_svg import draw_frontier
from torchckpt.planning.step.timeline import Timeline

STRANGE = "<b>&\x00\"'" * 20
MOMENTS = [{"no recomputation": 37.0, "bound": 39.0}, {"early": 1.0, "at the end": 60.0}]
WAYS: dict[str, Callable[[Timeline], str]] = {
    "alone": svg,
    "compared": lambda t: svg(t, t, names=("before", "after"), budget_bytes=3),
    "far below the budget": lambda t: svg(t, budget_bytes=123456),
    "a budget a rank": lambda t: svg(t, budget_bytes=[1 + rank % 3 for rank in range(len(t.schedule.ranks))]),
    "copies": lambda t: svg(t, t, copies=True),
    "titles": lambda t: svg(t, t, title=STRANGE, subtitle=STRANGE, names=[STRANGE] * 2, lines=MOMENTS),
}


@few(4)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("timeline", STEPS.values(), ids=STEPS)
def test_steps(timeline: Timeline, way: Callable[[Timeline], str]) -> None:
    assert faults(Picture(way(timeline))) == []


@few(9)
@pytest.mark.parametrize("budget_share", [None, 0.0, 0.01, 0.5, 0.99, 1.3])
@pytest.mark.parametrize("name", FLOWS)
def test_plans(name: str, budget_share: float | None) -> None:
    flow, _ = FLOWS[name]
    budget = None if budget_share is None else int(budget_share * simulate(flow, flow.eager).peak_bytes)
    assert faults(drawn(name, budget_bytes=budget, title=STRANGE)) == []


@pytest.mark.parametrize("title", ["GPT", STRANGE])
@pytest.mark.parametrize("eager", [100, 41, 10**12])
def test_frontiers(title: str, eager: int) -> None:
    others = {**OTHERS, STRANGE: [(3, 0.001)], "&": [], **{f"tool {i}": [(10 * i, 0.1 * i)] for i in range(7)}}
    crowded = [(60 + index, 0.1) for index in range(6)]
    budgets = {point: f"0.{index}" for index, point in enumerate((*crowded, (3, 0.001), (80, 0.3), *OURS))}
    for points in (others, {"torch": crowded}):
        assert faults(Picture(draw_frontier(OURS, points, eager_peak_bytes=eager, title=title, budgets=budgets))) == []


@pytest.mark.parametrize(("points", "eager"), [*product([[], [(0, 0.0)], [(7, 0.0)]], [0, 7])])
def test_frontiers_of_few_points_and_none(points: list[tuple[int, float]], eager: int) -> None:
    picture = Picture(draw_frontier(points, eager_peak_bytes=eager))
    assert faults(picture) == []
    assert len(picture.of("path", "frontier")) == bool(points)
