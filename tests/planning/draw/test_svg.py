"""The picture of steps, read back: what is drawn where, in which colour, and each of its words."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.numpy_numbers import np
from tests.planning.draw.picture import Box, Picture, extent
from tests.planning.steps import EMPTY, measured, several_stages_a_rank, step
from torchckpt.planning.draw.canvas import COLOURS
from torchckpt.planning.draw.svg import svg
from torchckpt.planning.draw.units import Units
from torchckpt.planning.order.schedule import Kind
from torchckpt.planning.order.schedules import one_f_one_b
from torchckpt.planning.step.simulated import simulate
from torchckpt.planning.step.timeline import Timeline
from torchckpt.planning.work.block import Block

STEPS = {
    "p=2": step(2, 4, 0.25),
    "p=4": step(4, 8, 0.25),
    "p=16": step(16, 64, 0.25),
    "measured": measured(),
    **several_stages_a_rank(),
}
KINDS, WIRES = "FBIWR", ("there", "back")
LEFT, END = 84.0, 936.0


def rows(picture: Picture) -> list[list[Box]]:
    by_height: dict[float, list[Box]] = {}
    for box in sorted(picture.boxes(KINDS), key=lambda box: (box.y, box.x)):
        by_height.setdefault(box.y, []).append(box)
    return list(by_height.values())


def x_of(seconds: float, step_seconds: float) -> float:
    return pytest.approx(LEFT + seconds / step_seconds * (END - LEFT), abs=0.01)  # type: ignore[no-any-return]


@pytest.mark.parametrize("timeline", STEPS.values(), ids=STEPS)
def test_every_action_has_its_box_in_its_row_on_one_scale_of_time(timeline: Timeline) -> None:
    longest = 1.25 * timeline.step_seconds
    assert [[(box.kind, box.x) for box in row] for row in rows(Picture(svg(timeline, lines=[{"": longest}])))] == [
        [(event.action.kind.value, x_of(event.start_seconds, longest)) for event in timeline.events if event.rank == r]
        for r in range(len(timeline.schedule.ranks))
    ]


def test_both_of_a_comparison_are_on_one_time_scale() -> None:
    before, after = step(4, 8, 1.0), step(4, 8, 0.0, recompute=False)
    drawn = rows(Picture(svg(before, after)))
    ends = [max(box.x + box.width for row in part for box in row) for part in (drawn[:4], drawn[4:])]
    assert ends == [pytest.approx(x_of(t.step_seconds, before.step_seconds).expected, abs=1.01)  # type: ignore[attr-defined]
                    for t in (before, after)]


def test_every_word() -> None:
    before, after = step(2, 2, 0.25), step(2, 2, recompute=False)
    named, moments = ["arrival", "<none> & more"], [{}, {"no recomputation": 9.0, "bound": 8.5}]
    picture = Picture(svg(before, after, names=named, title="A", subtitle="B", budget_bytes=1.5, lines=moments))
    memory = ["0", "1", "2", "memory, A"]
    times = ["time", *map(str, range(10))]
    assert picture.texts() == [
        "A", "B",
        "arrival", "step 9.5, idle 26.3 %, peak 1 A",
        "stage 0", "F0", "F1", "R0", "B0", "R1", "B1", "stage 1", "F0", "B0", "F1", "B1", *memory, *times,
        "<none> & more", "step 9 (-5.3 %), idle 33.3 %, peak 2 A",
        "stage 0", "F0", "F1", "B0", "B1", "stage 1", "F0", "B0", "F1", "B1", *memory,
        "bound 8.5", "no recomputation 9", *times,
        "forward", "backward", "recompute", "a gradient arrives", "memory where it peaks", "on other ranks",
        "budget 1.5 A",
    ]
    assert picture.title == (
        "A; arrival: step 9.5, idle 26.3 %, peak 1 A; <none> & more: step 9 (-5.3 %), idle 33.3 %, peak 2 A"
    )
    assert Picture(svg(before)).title == "1f1b, 2 stages, 2 micro-batches: step 9.5, idle 26.3 %, peak 1 A"


def test_labels_are_left_out_where_they_do_not_fit() -> None:
    picture = Picture(svg(STEPS["p=16"]))
    assert picture.texts("light") == picture.texts("dark") == []
    assert [text for text in picture.texts("end") if text.startswith("stage")] == [f"stage {j}" for j in range(16)]


def test_labels_stand_inside_their_boxes() -> None:
    picture = Picture(svg(STEPS["p=4"]))
    labels = [word for word in picture.words if {"light", "dark"} & set(word.attrib.get("class", "").split())]
    assert len(labels) == len(STEPS["p=4"].events)
    for left, top, right, bottom in map(extent, labels):
        assert any(
            b.x <= left and right <= b.x + b.width and b.y <= top and bottom <= b.y + b.height
            for b in picture.boxes(KINDS)
        )


def test_each_kind_has_a_colour_but_input_gradients_that_of_whole_backwards() -> None:
    picture = Picture(svg(STEPS["dualpipe_v"], budget_bytes=3))
    assert {kind: picture.colour(kind) for kind in KINDS} == COLOURS
    assert len(set(COLOURS.values())) == 4
    assert picture.colour("B") == picture.colour("I")
    assert "backward, input gradient" in picture.texts()
    assert not {"backward", "input gradient"} & set(picture.texts())


def test_the_legend_names_what_there_is() -> None:
    assert Picture(svg(step(2, 2, recompute=False))).texts()[-5:-2] == ["forward", "backward", "a gradient arrives"]
    halves = ["forward", "input gradient", "weight gradient", "a gradient arrives"]
    assert Picture(svg(STEPS["zbv"])).texts()[-6:-2] == halves


def test_gradient_arrivals_are_ticks_above_their_rows() -> None:
    timeline = step(2, 2, 0.25)
    picture = Picture(svg(timeline))
    arrived = [message.arrived_seconds for message in timeline.messages if message.to_stage == 0]
    assert [x for x, _ in picture.corners("arrival")] == [x_of(seconds, timeline.step_seconds) for seconds in arrived]
    assert all(y < rows(picture)[0][0].y for _, y in picture.corners("arrival"))


def test_copies_stand_under_the_row_of_the_rank_that_sends_them() -> None:
    timeline = step(3, 3, 0.25)
    picture = Picture(svg(timeline, copies=True))
    tops = [row[0].y for row in rows(picture)]
    expected = []
    for message in timeline.messages:
        kind, below = ("there", 1) if message.action.kind is Kind.FORWARD else ("back", 10)
        start = x_of(message.sent_seconds, timeline.step_seconds)
        expected.append((kind, tops[message.action.stage] + 24 + below, start))
    drawn = [(box.kind, box.y, box.x) for box in picture.boxes(WIRES)]
    assert len(drawn) == len(expected) == 2 * 2 * 3
    assert all(copy in drawn for copy in expected)
    assert picture.texts("end").count("copies") == 3
    assert {"an activation on its way", "a gradient on its way"} <= set(picture.texts())
    assert Picture(svg(timeline)).boxes(WIRES) == []


@pytest.mark.parametrize("moments", [{"no recomputation": 37.0, "bound": 39.0}, {"early": 1.0, "at the end": 60.0}])
def test_lines_at_moments_have_names_that_nothing_crosses(moments: dict[str, float]) -> None:
    timeline = step(4, 8, 0.25)
    picture = Picture(svg(timeline, timeline, lines=[moments, {}]))
    lines = picture.of("line", "moment")
    longest = max(timeline.step_seconds, *moments.values())
    assert sorted(float(line["x1"]) for line in lines) == [x_of(moment, longest) for moment in sorted(moments.values())]
    expected = {f"{name} {moment:g}" for name, moment in moments.items()}
    names = [word for word in picture.words if word.text in expected]
    assert len(names) == len(lines) == 2
    for left, top, right, bottom in map(extent, names):
        for line in lines:
            is_beside = not left <= float(line["x1"]) <= right
            assert is_beside or float(line["y1"]) >= bottom or float(line["y2"]) <= top


def test_without_memory_there_is_no_room_for_it() -> None:
    timeline = step(2, 2, 0.25)
    picture = Picture(svg(replace(timeline, memory=((), ()))))
    assert picture.height < Picture(svg(timeline, budget_bytes=2)).height - 60
    assert not any("memory" in text or "peak" in text for text in picture.texts())


def test_memory_of_one_amount_is_said_in_words_alone() -> None:
    alike, more = step(2, 2, 0.25), step(2, 2, 0.25, recompute=False)
    words = Picture(svg(alike, alike)).texts()
    assert not any(text.startswith("memory") for text in words)
    assert sum("peak 1 A" in text for text in words) == 2
    assert Picture(svg(alike, more)).texts().count("memory, A") == 2
    assert "memory, A" in Picture(svg(alike, budget_bytes=1)).texts()


def test_the_budget_is_a_line_across_the_memory_of_each_panel() -> None:
    timeline = step(2, 4)
    picture = Picture(svg(timeline, timeline, budget_bytes=1.5))
    ends = [(float(line["x1"]), float(line["x2"])) for line in picture.of("line", "budget")]
    assert ends.count((LEFT, END)) == 2
    assert "budget 1.5 A" in picture.texts()
    assert "budget" not in "".join(Picture(svg(timeline)).texts())


def test_numbers_of_numpy_are_drawn_as_those_of_python() -> None:
    def drawn(number: Callable[[int], float]) -> str:
        block = Block(*map(number, (1, 2, 1, 1, 3, 1)))
        return svg(simulate(one_f_one_b(2, 4), block, number(1)), budget_bytes=number(3))

    assert drawn(np.float64) == drawn(float)
    one = step(2, 4)
    assert svg(one, budget_bytes=np.int64(3)) == svg(one, budget_bytes=3)


def test_units_of_a_measured_step() -> None:
    picture = Picture(svg(measured(), units=Units("ms", 1e-3, "GB", 1e9), budget_bytes=4e9))
    assert picture.texts("facts") == ["step 202 ms, idle 51.8 %, peak 3 GB"]
    assert {"200", "time, ms", "memory, GB", "budget 4 GB"} <= set(picture.texts())


def test_control_characters_in_a_name_do_not_break_the_document() -> None:
    timeline = step(2, 2)
    strange = replace(timeline, schedule=replace(timeline.schedule, name="a\x00\x1b<b>&\"'"))
    assert Picture(svg(strange)).texts("name") == ["a<b>&\"', 2 stages, 2 micro-batches"]


def test_a_long_name_is_cut() -> None:
    assert Picture(svg(step(2, 2), names=["x" * 99])).texts("name")[0].endswith("x...")


@pytest.mark.parametrize("timelines", [(), (EMPTY,), (EMPTY, EMPTY)])
def test_empty_pictures_are_valid(timelines: tuple[Timeline, ...]) -> None:
    assert Picture(svg(*timelines)).boxes(KINDS) == []


def test_the_picture_of_a_large_step_stays_small() -> None:
    assert len(svg(STEPS["p=16"])) < 150_000
