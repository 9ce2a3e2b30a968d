"""The picture of a frontier, read back."""
from __future__ import annotations

import pytest

from tests.planning.remat.draw.test_plan_svg import SPACE, Picture, outside, overlaps
from torchckpt.planning.remat.draw.frontier_svg import draw_frontier

LEFT, END, TOP, BOTTOM = 76.0, 696.0, 116.0, 396.0
OURS = [(100, 0.0), (60, 0.1), (40, 0.25), (70, 0.2)]
OTHERS = {"torch activation_memory_budget": [(100, 0.0), (80, 0.3), (120, 0.4)], "torch min-cut": [(90, 0.05)]}


def place(peak_bytes: float, share: float) -> tuple[float, float]:
    """Where a point stands, with 120 bytes and 40 % at most."""
    x = LEFT + peak_bytes / (120 * 1.04) * (END - LEFT)
    return pytest.approx((x, BOTTOM - share / (0.4 * 1.1) * (BOTTOM - TOP)), abs=0.011)  # type: ignore[no-any-return]


def picture(**options: object) -> Picture:
    return Picture(draw_frontier(OURS, OTHERS, eager_peak_bytes=100, **options))  # type: ignore[arg-type]


def marks(drawn: Picture) -> dict[tuple[str, str, str], list[tuple[float, float]]]:
    """By colour, roundness and turn, the places of the marks; the legend's come last."""
    found: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for mark in (rect.attrib for rect in drawn.root.iter(f"{SPACE}rect") if "fill" in rect.attrib):
        look = (mark["stroke"], "round" if "rx" in mark else "square", "turned" if "transform" in mark else "level")
        found.setdefault(look, []).append((float(mark["x"]) + 4, float(mark["y"]) + 4))
    return found


def test_points_stand_at_their_memory_and_cost() -> None:
    assert {look: places[:-1] for look, places in marks(picture()).items()} == {
        ("#0072b2", "round", "level"): [place(40, 0.25), place(60, 0.1), place(70, 0.2), place(100, 0.0)],
        ("#d55e00", "square", "level"): [place(100, 0.0), place(80, 0.3), place(120, 0.4)],
        ("#009e73", "square", "turned"): [place(90, 0.05)],
    }


def test_the_line_is_the_least_cost_that_fits_into_each_memory() -> None:
    assert picture().corners("frontier") == [
        place(40, 0.25),
        place(60, 0.25),
        place(60, 0.1),
        place(70, 0.1),
        place(100, 0.1),
        place(100, 0.0),
    ]


def test_the_eager_peak_is_a_line_at_100_percent() -> None:
    drawn = picture()
    line = drawn.of("line", "eager")[0]
    assert (float(line["x1"]), BOTTOM) == (float(line["x2"]), float(line["y2"])) == place(100, 0)
    (percent,) = [word for word in drawn.words if word.text == "100 %"]
    assert percent.attrib["x"] == line["x1"]


def test_axes_say_what_they_count() -> None:
    assert {"peak memory, B", "peak memory, % of eager", "extra compute"} <= set(picture().texts)
    drawn = Picture(draw_frontier([(5 * 10**9, 0.1)], eager_peak_bytes=8 * 10**9, cost="extra FLOPs"))
    assert {"peak memory, GB", "extra FLOPs"} <= set(drawn.texts)


def test_the_legend_names_every_tool() -> None:
    assert picture().texts[-4:] == ["torchckpt", *OTHERS, "eager"]
    assert picture(name="late").texts[-4] == "late"


def test_the_title_says_the_least_memory() -> None:
    assert picture(title="GPT").title == "GPT: eager peak 100 B; the least here 40 B (40.0 % of it) for +25.0 %"


def test_more_tools_than_marks_use_marks_again() -> None:
    others = {f"tool {index}": [(10 * index, 0.1 * index)] for index in range(7)}
    drawn = Picture(draw_frontier(OURS, others, eager_peak_bytes=100))
    assert [text for text in drawn.texts if text.startswith("tool")] == list(others)
    assert overlaps(drawn) == outside(drawn) == []


@pytest.mark.parametrize("title", ["GPT", "t" * 200, "<b>&\x00\"'"])
@pytest.mark.parametrize("eager", [100, 41, 10**12])
def test_no_two_texts_overlap_and_none_leaves_the_frame(title: str, eager: int) -> None:
    others = {**OTHERS, "<" * 100: [(3, 0.001)], "&": []}
    drawn = Picture(draw_frontier(OURS, others, eager_peak_bytes=eager, title=title))
    assert overlaps(drawn) == outside(drawn) == []
    assert "<" * 37 + "..." in drawn.texts


@pytest.mark.parametrize("points", [[], [(0, 0.0)], [(7, 0.0)]])
@pytest.mark.parametrize("eager", [0, 7])
def test_few_points_and_none(points: list[tuple[int, float]], eager: int) -> None:
    drawn = Picture(draw_frontier(points, eager_peak_bytes=eager))
    assert overlaps(drawn) == outside(drawn) == []
    assert len(drawn.of("path", "frontier")) == bool(points)


def test_the_same_text_every_time() -> None:
    text = draw_frontier(OURS, OTHERS, eager_peak_bytes=100)
    assert text == draw_frontier(OURS[::-1], OTHERS, eager_peak_bytes=100)


def test_budgets_stand_beside_their_points() -> None:
    budgets = {(60, 0.1): "0.6", (80, 0.3): "0.3", (100, 0.0): "1.0"}
    drawn = picture(budgets=budgets)
    assert overlaps(drawn) == outside(drawn) == []
    words = {str(word.text): word for word in drawn.words if "budgeted" in word.attrib.get("class", "")}
    assert set(words) == {"0.6", "0.3", "1.0"}
    for (peak, share), text in budgets.items():
        x, y = place(peak, share).expected  # type: ignore[attr-defined]
        assert abs(float(words[text].attrib["x"]) - x) < 30
        assert abs(float(words[text].attrib["y"]) - y) < 15


def test_of_budgets_that_would_touch_one_is_left_out() -> None:
    points = [(60 + index, 0.1) for index in range(6)]
    budgets = {point: f"0.{index}" for index, point in enumerate(points)}
    drawn = Picture(draw_frontier(OURS, {"torch": points}, eager_peak_bytes=100, budgets=budgets))
    assert overlaps(drawn) == outside(drawn) == []
    assert 1 <= sum("budgeted" in word.attrib.get("class", "") for word in drawn.words) < 6
