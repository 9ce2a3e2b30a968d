"""The picture of a plan, read back: where peaks, budget and recomputed spans stand, and each of its words."""
from __future__ import annotations

import re
from itertools import accumulate, pairwise

import pytest

from tests.planning.draw.picture import Picture, corners
from tests.planning.remat.flows import chain, mlp, random_step, transformer
from torchckpt.errors import ArgumentError
from torchckpt.planning.remat.flow.dataflow import Dataflow, Operation, Schedule
from torchckpt.planning.remat.flow.late import late
from torchckpt.planning.remat.flow.memory import simulate
from torchckpt.planning.remat.plan_svg import Run, Span, draw_plan, kinds, runs, thinned

LEFT, END, TOP, BOTTOM = 92.0, 802.0, 78.0, 338.0
REPEATING = [0, 1, 2, 1, 3, 4, 5]


def every(flow: Dataflow, k: int) -> Schedule:
    """Keep the output of every ``k``-th operation of the forward."""
    return late(flow, {storage for operation in flow.operations[: flow.forward : k] for storage in operation.writes})


def uneven() -> Dataflow:
    """Three layers; a repeat of the second is twice as fast as its first run."""
    substitute = Operation("f1 again", (1,), (2,), 1.0)
    operations = (
        Operation("f0", (0,), (1,), 1.0),
        Operation("f1", (1,), (2,), 2.0, substitute=substitute),
        Operation("f2", (2,), (3,), 1.0),
        Operation("b2", (2, 3), (4,), 2.0),
        Operation("b1", (1, 2, 4), (5,), 3.0),
        Operation("b0", (1, 5), (6,), 1.0),
    )
    return Dataflow(operations, (0, 40, 80, 10, 10, 10, 10), 3, frozenset({0}), frozenset({6}))


FLOWS = {
    "chain": (chain(24), every(chain(24), 5)),
    "mlp": (mlp(6), every(mlp(6), 4)),
    "transformer": (transformer(4, dropout=True), every(transformer(4, dropout=True), 3)),
    "long": (chain(700), every(chain(700), 26)),
    "random": (random_step(60, 3), every(random_step(60, 3), 4)),
    "eager": (mlp(6), mlp(6).eager),
    "uneven": (uneven(), REPEATING),
    "empty": (Dataflow((), (), 0), []),
}
every_flow = pytest.mark.parametrize("name", FLOWS)


def drawn(
    name: str | tuple[Dataflow, Schedule], title: str = "A step", budget_bytes: int | None = None
) -> Picture:
    """The picture of one of ``FLOWS``, or of another."""
    flow, schedule = FLOWS[name] if isinstance(name, str) else name
    return Picture(draw_plan(flow, schedule, title=title, budget_bytes=budget_bytes))


def repeated(picture: Picture) -> list[tuple[float, float]]:
    """Where the boxes of the recomputed begin and end."""
    return [(box.x, box.x + box.width) for box in picture.boxes(("R repeated",))]


def peak_of(picture: Picture, kind: str) -> float:
    """The y of a dot."""
    (dot,) = picture.of("rect", f"dot {kind}")
    return float(dot["y"]) + 3


def level(bytes_: float, most_bytes: float) -> float:
    """The y of so many bytes."""
    return pytest.approx(BOTTOM - bytes_ / (most_bytes * 1.08) * (BOTTOM - TOP), abs=0.01)  # type: ignore[no-any-return]


# the curve ------------------------------------------------------------------------------------------------------------


@every_flow
def test_the_curve_is_as_high_as_the_peak(name: str) -> None:
    flow, schedule = FLOWS[name]
    peak, eager = simulate(flow, schedule).peak_bytes, simulate(flow, flow.eager).peak_bytes
    picture, most = drawn(name), max(peak, eager)
    levels = [("outline", "after", peak)] if flow.operations else []
    if list(schedule) != list(flow.eager):
        levels.append(("eager", "grey", eager))
    for curve, dot, bytes_ in levels:
        assert min(y for _, y in picture.corners(curve)) == level(bytes_, most)
        assert peak_of(picture, dot) == level(bytes_, most)


def test_the_curve_is_that_of_the_simulator() -> None:
    picture = drawn("uneven")
    during, most = simulate(uneven(), REPEATING).bytes_during, simulate(uneven(), uneven().eager).peak_bytes
    seconds = [0, *accumulate([1, 2, 1, 1, 2, 3, 1])]
    outline = picture.corners("outline")
    for moment, bytes_ in zip(seconds, during):
        assert any(x == pytest.approx(LEFT + moment / 11 * (END - LEFT), abs=0.01) and y == level(bytes_, most)
                   for x, y in outline)
    assert (outline[0], outline[-1]) == ((LEFT, BOTTOM), (END, BOTTOM))
    assert picture.corners("eager")[-1] == (pytest.approx(LEFT + 10 / 11 * (END - LEFT), abs=0.01), BOTTOM)


def test_what_is_recomputed_has_its_own_colour_under_the_curve_and_a_box_beneath() -> None:
    picture = drawn("uneven")
    start, end = (pytest.approx(LEFT + moment / 11 * (END - LEFT), abs=0.02) for moment in (4, 5))
    assert repeated(picture) == [(start, end)]
    across = [x for x, _ in picture.corners("R fill")]
    assert (min(across), max(across), picture.colour("R")) == (start, end, "#e69f00")


@every_flow
def test_the_colours_under_the_curve_take_turns_from_start_to_end(name: str) -> None:
    picture = drawn(name)
    shapes = [corners(path["d"]) for kind in "FBR" for path in picture.of("path", f"{kind} fill")]
    parts = sorted((min(x for x, _ in part), max(x for x, _ in part)) for part in shapes)
    assert all(end == pytest.approx(start, abs=0.011) for (_, end), (start, _) in pairwise(parts))
    if FLOWS[name][1]:
        assert (parts[0][0], parts[-1][1]) == (LEFT, pytest.approx(picture.corners("outline")[-1][0], abs=0.01))


def test_forward_and_backward_stand_under_the_axis() -> None:
    picture = drawn((uneven(), uneven().eager))
    (forward,), (backward,) = picture.of("rect", "F phase"), picture.of("rect", "B phase")
    border = pytest.approx(LEFT + 4 / 10 * (END - LEFT), abs=0.011)
    assert (float(forward["x"]) + float(forward["width"]), float(backward["x"])) == (border, border)


def test_operations_that_take_no_time_still_show_their_peak() -> None:
    operations = (Operation("f", (0,), (1,), 1.0), Operation("view", (1,), (2,), 0.0), Operation("b", (1,), (3,), 1.0))
    flow = Dataflow(operations, (0, 1, 97, 2), 2, frozenset({0}), frozenset({3}))
    assert (LEFT + (END - LEFT) / 2, level(98, 98)) in drawn((flow, flow.eager)).corners("outline")


def test_where_nothing_takes_time_the_axis_counts_operations() -> None:
    operations = (Operation("f", (0,), (1,), 0.0), Operation("b", (1,), (2,), 0.0))
    flow = Dataflow(operations, (0, 4, 2), 1, frozenset({0}), frozenset({2}))
    picture = drawn((flow, [0, 0, 1]))
    assert "time, operations" in picture.texts()
    assert picture.corners("eager")[-1][0] == pytest.approx(LEFT + 2 / 3 * (END - LEFT), abs=0.01)


# its parts -----------------------------------------------------------------------------------------------------------


def test_runs_follow_one_another_and_a_repeat_takes_its_own_time() -> None:
    steps = runs(uneven(), REPEATING)
    assert [(run.operation, run.start_seconds, run.end_seconds) for run in steps] == [
        (0, 0, 1), (1, 1, 3), (2, 3, 4), (1, 4, 5), (3, 5, 7), (4, 7, 10), (5, 10, 11)
    ]
    assert "".join(run.kind for run in steps) == "FFFRBBB"
    assert tuple(run.bytes for run in steps) == simulate(uneven(), REPEATING).bytes_during


def test_short_runs_are_together_until_they_are_long_enough_and_long_ones_alone() -> None:
    ends = [0.0, 0.25, 0.5, 1.25, 4.0, 4.25, 4.5]
    every_run = [Run(i, start, end, 0, i < 5, False) for i, (start, end) in enumerate(pairwise(ends))]
    assert [[run.operation for run in group] for group in thinned(every_run, 1.0)] == [[0, 1, 2], [3], [4], [5]]
    assert thinned([], 1.0) == []


def test_thinned_keeps_every_run_and_is_about_as_long_as_there_is_room() -> None:
    flow = chain(300)
    every_run = runs(flow, every(flow, 7))
    groups = thinned(every_run, flow.seconds / 50)
    assert [run for group in groups for run in group] == every_run
    assert len(groups) <= 2 * 70


def test_kinds_are_exact_where_they_are_long() -> None:
    assert kinds(runs(uneven(), REPEATING), 0.5) == [Span("F", 0, 4), Span("R", 4, 5), Span("B", 5, 11)]


def test_kinds_that_alternate_quickly_keep_their_shares_repeats_first() -> None:
    alternate = [Run(0, i / 8, (i + 1) / 8, 0, False, i % 4 == 3) for i in range(8)]
    assert kinds(alternate, 2.0) == [Span("R", 0.0, 0.25), Span("B", 0.25, 1.0)]


# words ----------------------------------------------------------------------------------------------------------------


def test_every_word() -> None:
    assert simulate(uneven(), REPEATING).peak_bytes == simulate(uneven(), uneven().eager).peak_bytes == 140
    memory = ["0", "50", "100", "150", "memory, B"]
    picture = drawn("uneven", budget_bytes=150)
    assert picture.texts() == [
        "Peak memory 140 B in place of 140 B (+0.0 %), for 10.0 % more time",
        "A step: within the budget of 150 B, 1 operation recomputed",
        *memory, *map(str, range(0, 120, 20)), "time, % of the eager step",
        "budget 150 B", "peak 140 B", "eager peak 140 B",
        "forward", "backward", "recomputed",
        "forward", "backward", "recomputed", "eager: nothing recomputed", "budget",
    ]
    assert picture.title == "; ".join(picture.texts()[:2])
    picture = drawn((uneven(), uneven().eager), budget_bytes=125)
    assert picture.texts() == [
        "Peak memory 140 B", "A step: 15 B over the budget of 125 B, nothing is recomputed",
        *memory, *map(str, range(0, 110, 10)), "time, % of the eager step", "peak 140 B", "budget 125 B",
        "forward", "backward", "forward", "backward", "budget",
    ]
    assert "memory, MB" in drawn("chain").texts()


def test_without_recompute_there_is_one_curve_and_no_box() -> None:
    picture = drawn("eager")
    assert picture.of("path", "eager") == picture.of("path", "R repeated") == picture.of("line", "budget") == []


def test_the_budget_is_a_dashed_line() -> None:
    picture = drawn((uneven(), uneven().eager), budget_bytes=100)
    ((start, end, *heights),) = [[float(line[name]) for name in ("x1", "x2", "y1", "y2")]
                                 for line in picture.of("line", "budget")[:1]]
    assert (start, end, heights) == (LEFT, END, [level(100, 140)] * 2)
    assert re.search(r"\.budget{[^}]*stroke-dasharray", picture.root.findtext(".//{*}style") or "")


def test_long_titles_are_clipped_and_special_characters_are_safe() -> None:
    assert drawn("uneven", title="t" * 200).texts()[1].startswith("t" * 57 + "...: ")
    picture = drawn("uneven", title="<b>&\x1b")
    assert picture.texts()[1].startswith("<b>&: ")
    assert "; <b>&: " in picture.title


# size and errors ------------------------------------------------------------------------------------------------------


def test_a_step_of_thousands_of_operations_stays_small_and_true() -> None:
    flow = chain(2000)
    schedule = every(flow, 2)
    assert len(schedule) > 5000
    text = draw_plan(flow, schedule, title="A step")
    assert len(text) < 300_000
    picture = Picture(text)
    peak, most = simulate(flow, schedule).peak_bytes, simulate(flow, flow.eager).peak_bytes
    assert min(y for _, y in picture.corners("outline")) == level(peak, most)
    shown = sum(end - start for start, end in repeated(picture)) / (END - LEFT)
    seconds = sum(flow.operations[index].seconds for index in schedule)
    assert shown == pytest.approx(1 - flow.seconds / seconds, abs=0.005)


@every_flow
def test_the_same_text_every_time(name: str) -> None:
    flow, schedule = FLOWS[name]
    assert draw_plan(flow, schedule, title="") == draw_plan(flow, list(schedule), title="")


def test_a_schedule_of_this_step() -> None:
    with pytest.raises(ArgumentError, match="the schedule does not run every operation"):
        drawn((uneven(), [0, 1, 2]))
