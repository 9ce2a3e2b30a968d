"""The picture of a frontier, read back."""
from __future__ import annotations

import pytest

from tests.planning.draw.picture import Picture
from torchckpt.planning.remat.frontier_svg import draw_frontier

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
    places: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for mark in (rect.attrib for rect in drawn.root.findall("{*}rect") if "fill" in rect.attrib):
        look = (mark["stroke"], "round" if "rx" in mark else "square", "turned" if "transform" in mark else "level")
        places.setdefault(look, []).append((float(mark["x"]) + 4, float(mark["y"]) + 4))
    return places


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


def test_what_takes_less_than_eager_stands_below_zero_and_inside() -> None:
    drawn = Picture(draw_frontier([(60, 0.1)], {"compiled": [(50, -0.1), (80, -0.02)]}, eager_peak_bytes=100))
    places = marks(drawn)
    above, (low, high) = places["#0072b2", "round", "level"][0], places["#d55e00", "square", "level"][:2]
    zero = BOTTOM - (BOTTOM - TOP) / 2  # as far from 10 % as from -10 %
    assert TOP < above[1] < zero < high[1] < low[1] < BOTTOM


def test_the_eager_peak_is_a_line_at_100_percent() -> None:
    drawn = picture()
    line = drawn.of("line", "eager")[0]
    assert (float(line["x1"]), BOTTOM) == (float(line["x2"]), float(line["y2"])) == place(100, 0)
    assert drawn.word("100 %")[0] == float(line["x1"])


def test_every_word() -> None:
    shares, memory = (f"{share} %" for share in range(0, 50, 10)), map(str, range(0, 140, 20))
    assert picture(title="GPT", name="late").texts() == [
        "GPT", "eager peak 100 B; the least here 40 B (40.0 % of it) for +25.0 %",
        *shares, "extra compute", *memory, "peak memory, B", "peak memory, % of eager",
        *(f"{share} %" for share in range(0, 140, 20)), "↙ better", "late", *OTHERS, "eager",
    ]
    assert picture(title="GPT").title == "GPT: eager peak 100 B; the least here 40 B (40.0 % of it) for +25.0 %"
    drawn = Picture(draw_frontier([(5 * 10**9, 0.1)], eager_peak_bytes=8 * 10**9, cost="extra FLOPs"))
    assert {"peak memory, GB", "extra FLOPs"} <= set(drawn.texts())


def test_more_tools_than_marks_use_marks_again_and_long_names_are_clipped() -> None:
    others = {f"tool {index}": [(10 * index, 0.1 * index)] for index in range(7)} | {"<" * 100: []}
    drawn = Picture(draw_frontier(OURS, others, eager_peak_bytes=100))
    assert drawn.texts()[-10:] == ["torchckpt", *list(others)[:-1], "<" * 37 + "...", "eager"]
    assert len(marks(drawn)["#d55e00", "square", "level"]) == 2 + 2


def test_the_same_picture_whatever_the_order() -> None:
    text = draw_frontier(OURS, OTHERS, eager_peak_bytes=100)
    assert text == draw_frontier(OURS[::-1], OTHERS, eager_peak_bytes=100)


def test_budgets_stand_beside_their_points() -> None:
    budgets = {(60, 0.1): "0.6", (80, 0.3): "0.3", (100, 0.0): "1.0"}
    drawn = picture(budgets=budgets)
    assert set(drawn.texts("budgeted")) == {"0.6", "0.3", "1.0"}
    for (peak, share), text in budgets.items():
        assert drawn.word(text) == pytest.approx(place(peak, share).expected, abs=30)  # type: ignore[attr-defined]


def test_of_budgets_that_would_touch_one_is_left_out() -> None:
    points = [(60 + index, 0.1) for index in range(6)]
    budgets = {point: f"0.{index}" for index, point in enumerate(points)}
    drawn = Picture(draw_frontier(OURS, {"torch": points}, eager_peak_bytes=100, budgets=budgets))
    assert 1 <= len(drawn.texts("budgeted")) < 6
