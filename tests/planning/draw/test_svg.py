"""The pictures, read back: what is drawn, in which colour, and that nothing overlaps or leaves the frame."""
from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from tests.planning.steps import EMPTY, measured, several_stages_a_rank, step
from torchckpt.planning.draw.svg import compare, svg
from torchckpt.planning.draw.units import Units
from torchckpt.planning.order.schedule import Kind
from torchckpt.planning.step.timeline import Timeline

SPACE = "{http://www.w3.org/2000/svg}"
STEPS = {
    "p=2": step(2, 4, 0.25),
    "p=4": step(4, 8, 0.25),
    "p=16": step(16, 64, 0.25),
    "measured": measured(),
    **several_stages_a_rank(),
}
KINDS = "FBIWR"


WIRES = ("there", "back")


class Box(NamedTuple):
    kind: str
    x: float
    y: float
    width: float
    height: float


class Picture:
    def __init__(self, text: str) -> None:
        self.root = ElementTree.fromstring(text)
        self.width, self.height = float(self.root.attrib["width"]), float(self.root.attrib["height"])
        self.words = list(self.root.iter(f"{SPACE}text"))

    def boxes(self, kinds: Container[str] = KINDS) -> list[Box]:
        return [
            Box(path.attrib["class"], *map(float, numbers))
            for path in self.root.iter(f"{SPACE}path")
            if path.attrib["class"] in kinds
            for numbers in re.findall(r"M([\d.]+),([\d.]+)h([\d.]+)v([\d.]+)h-[\d.]+z", path.attrib["d"])
        ]

    def rows(self) -> dict[float, list[Box]]:
        found: dict[float, list[Box]] = {}
        for box in sorted(self.boxes(), key=lambda box: box.x):
            found.setdefault(box.y, []).append(box)
        return found

    def arrivals(self) -> list[tuple[float, float]]:
        paths = [path.attrib["d"] for path in self.root.iter(f"{SPACE}path") if path.attrib["class"] == "arrival"]
        return [(float(x), float(y)) for x, y in re.findall(r"M([\d.]+),([\d.]+)v", "".join(paths))]

    def lines(self, kind: str) -> list[ElementTree.Element]:
        return [line for line in self.root.iter(f"{SPACE}line") if line.attrib["class"] == kind]

    def texts(self, kind: str = "") -> list[str]:
        return [str(word.text) for word in self.words if kind in word.attrib.get("class", "").split() or not kind]

    def colour(self, kind: str) -> str:
        style = next(self.root.iter(f"{SPACE}style")).text or ""
        found = re.search(rf"\.{kind}{{fill:(#\w+)}}", style)
        assert found
        return found[1]


@pytest.fixture(params=STEPS.values(), ids=STEPS)
def timeline(request: pytest.FixtureRequest) -> Timeline:
    found: Timeline = request.param
    return found


def test_every_action_has_its_box_in_its_row(timeline: Timeline) -> None:
    rows = Picture(svg(timeline)).rows()
    assert [[box.kind for box in rows[y]] for y in sorted(rows)] == [
        [event.action.kind.value for event in timeline.events if event.rank == rank]
        for rank in range(len(timeline.schedule.ranks))
    ]


def test_no_two_boxes_of_a_row_overlap(timeline: Timeline) -> None:
    for row in Picture(compare(timeline, timeline)).rows().values():
        assert all(one.x + one.width <= other.x + 0.011 for one, other in pairwise(row))
    rows = sorted(Picture(compare(timeline, timeline)).rows().items())
    assert all(y + row[0].height < next_y for (y, row), (next_y, _) in pairwise(rows))


def test_nothing_is_outside_the_frame(timeline: Timeline) -> None:
    picture = Picture(compare(timeline, timeline, budget_bytes=3))
    for box in picture.boxes():
        assert 84 <= box.x <= box.x + box.width <= picture.width - 24 + 0.01
        assert 0 <= box.y <= box.y + box.height <= picture.height
    for path in picture.root.iter(f"{SPACE}path"):
        across = [float(x) for x in re.findall(r"[MH]([-\d.]+)", path.attrib["d"])]
        down = [float(y) for y in re.findall(r"(?:V|M[-\d.]+,)([-\d.]+)", path.attrib["d"])]
        assert 0 <= min(across) <= max(across) <= picture.width
        assert 0 <= min(down) <= max(down) <= picture.height


def test_no_two_texts_overlap(timeline: Timeline) -> None:
    boxes = [extent(word) for word in Picture(compare(timeline, timeline, budget_bytes=3)).words]
    for place, (left, top, right, bottom) in enumerate(boxes):
        for other in boxes[place + 1 :]:
            assert right <= other[0] or other[2] <= left or bottom <= other[1] or other[3] <= top


@pytest.mark.parametrize("budget", [None, 3, 123456])
def test_no_text_is_outside_the_frame(timeline: Timeline, budget: float | None) -> None:
    picture = Picture(svg(timeline, budget_bytes=budget))
    for left, top, right, bottom in map(extent, picture.words):
        assert 0 <= left < right <= picture.width
        assert 0 <= top < bottom <= picture.height


def extent(word: ElementTree.Element) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a text, in a font as wide as they come."""
    kind = word.attrib.get("class", "")
    in_box = "font-size" in word.attrib.get("style", "")
    sizes = {"title": 18.0, "name": 15.0, "facts": 14.0, "": 12.0 if in_box else 13.0}
    size = next(sizes[of] for of in sizes if of in kind)
    width = len(str(word.text)) * size * 0.6
    x, y = float(word.attrib["x"]), float(word.attrib["y"])
    left = x - width if "end" in kind else x - width / 2 if "middle" in kind else x
    if "transform" in word.attrib:
        return x - size, y - width / 2, x, y + width / 2
    return left, y - size * 0.75, left + width, y


def test_labels_stand_inside_their_boxes() -> None:
    picture = Picture(svg(STEPS["p=4"]))
    labels = [word for word in picture.words if {"light", "dark"} & set(word.attrib.get("class", "").split())]
    assert len(labels) == len(STEPS["p=4"].events)
    for word in labels:
        left, top, right, bottom = extent(word)
        assert any(
            b.x <= left and right <= b.x + b.width and b.y <= top and bottom <= b.y + b.height for b in picture.boxes()
        )


def test_labels_are_left_out_where_they_do_not_fit() -> None:
    picture = Picture(svg(STEPS["p=16"]))
    assert picture.texts("light") == picture.texts("dark") == []
    assert [text for text in picture.texts("end") if text.startswith("stage")] == [f"stage {j}" for j in range(16)]


def test_recomputation_has_a_colour_of_its_own() -> None:
    picture = Picture(svg(STEPS["p=2"]))
    assert picture.colour("R") == "#e69f00"
    assert picture.colour("R") not in {picture.colour(kind) for kind in "FBIW"}


def test_gradient_arrivals_are_ticks_above_their_rows() -> None:
    timeline = step(2, 2, 0.25)
    picture = Picture(svg(timeline))
    arrived = [message.arrived_seconds for message in timeline.messages if message.to_stage == 0]
    scale = (picture.width - 24 - 84) / timeline.step_seconds
    assert [x for x, _ in picture.arrivals()] == [pytest.approx(84 + at * scale, abs=0.01) for at in arrived]
    top = min(picture.rows())
    assert all(y < top for _, y in picture.arrivals())


def test_copies_stand_under_the_row_of_the_rank_that_sends_them() -> None:
    timeline = step(3, 3, 0.25)
    picture = Picture(svg(timeline, copies=True))
    scale = (picture.width - 24 - 84) / timeline.step_seconds
    rows = sorted(picture.rows())
    for message in timeline.messages:
        is_activation = message.action.kind is Kind.FORWARD
        top = rows[message.action.stage] + 24 + (1 if is_activation else 10)
        start = pytest.approx(84 + message.sent_seconds * scale, abs=0.01)
        found = [box for box in picture.boxes(WIRES) if (box.x, box.y) == (start, top)]
        assert [box.kind for box in found] == ["there" if is_activation else "back"]
    assert len(picture.boxes(WIRES)) == len(timeline.messages) == 2 * 2 * 3
    assert picture.texts("end").count("copies") == 3
    assert {"an activation on its way", "a gradient on its way"} <= set(picture.texts())


def test_copies_leave_everything_inside_the_frame_and_apart(timeline: Timeline) -> None:
    picture = Picture(svg(timeline, timeline, copies=True))
    assert Picture(svg(timeline)).boxes(WIRES) == []
    for box in picture.boxes((*KINDS, *WIRES)):
        assert 84 <= box.x <= box.x + box.width <= picture.width - 24 + 0.01
    rows = sorted({(box.y, box.height) for box in picture.boxes((*KINDS, *WIRES))})
    assert all(y + height <= next_y for (y, height), (next_y, _) in pairwise(rows))
    words = [extent(word) for word in picture.words]
    for place, (left, top, right, bottom) in enumerate(words):
        for other in words[place + 1 :]:
            assert right <= other[0] or other[2] <= left or bottom <= other[1] or other[3] <= top


def test_without_memory_there_is_no_room_for_it() -> None:
    timeline = step(2, 2, 0.25)
    bare = replace(timeline, memory=((), ()))
    picture = Picture(svg(bare))
    assert picture.height < Picture(svg(timeline, budget_bytes=2)).height - 60
    assert not any("memory" in text or "peak" in text for text in picture.texts())


def test_memory_of_one_amount_is_said_in_words_alone() -> None:
    alike, more = step(2, 2, 0.25), step(2, 2, 0.25, recompute=False)
    words = Picture(svg(alike, alike)).texts()
    assert not any(text.startswith("memory") for text in words)
    assert sum("peak 1 A" in text for text in words) == 2
    assert sum(text == "memory, A" for text in Picture(svg(alike, more)).texts()) == 2
    assert "memory, A" in Picture(svg(alike, budget_bytes=1)).texts()


def test_title_and_subtitle_stand_above_all_panels() -> None:
    timeline = step(2, 2)
    picture = Picture(svg(timeline, title="What it shows", subtitle="of what"))
    ys = [float(word.attrib["y"]) for word in picture.words if word.text in ("What it shows", "of what")]
    assert len(ys) == 2
    assert max(ys) < min(float(word.attrib["y"]) for word in picture.words if word.attrib.get("class") == "name")
    assert next(picture.root.iter(f"{SPACE}title")).text == (
        "What it shows; 1f1b, 2 stages, 2 micro-batches: step 9, idle 22.2 %, peak 1 A"
    )


@pytest.mark.parametrize("moments", [{"no recomputation": 37.0, "bound": 39.0}, {"early": 1.0, "at the end": 60.0}])
def test_lines_at_moments_have_names_that_nothing_crosses(moments: dict[str, float]) -> None:
    timeline = step(4, 8, 0.25)
    picture = Picture(svg(timeline, timeline, lines=[moments, {}]))
    lines = picture.lines("moment")
    scale = (picture.width - 24 - 84) / max(timeline.step_seconds, *moments.values())
    found = sorted(float(line.attrib["x1"]) for line in lines)
    assert found == [pytest.approx(84 + at * scale, abs=0.01) for at in sorted(moments.values())]
    names = [word for word in picture.words if word.text in {f"{name} {at:g}" for name, at in moments.items()}]
    assert len(lines) == len(names) == 2
    for left, top, right, bottom in map(extent, names):
        assert 0 <= left < right <= picture.width
        for line in lines:
            x, start = float(line.attrib["x1"]), float(line.attrib["y1"])
            assert not (left <= x <= right and start < bottom and top < float(line.attrib["y2"]))


def test_the_title_says_step_change_idle_and_peak() -> None:
    before, after = step(4, 8, 0.25), step(4, 8, 0.25, recompute=False)
    picture = Picture(compare(before, after, names=("arrival", "<none> & more")))
    assert picture.texts("name") == ["arrival", "<none> & more"]
    assert picture.texts("facts") == [
        "step 40.5, idle 25.9 %, peak 1 A",
        "step 37 (-8.6 %), idle 35.1 %, peak 4 A",
    ]
    assert next(picture.root.iter(f"{SPACE}title")).text == (
        "arrival: step 40.5, idle 25.9 %, peak 1 A; <none> & more: step 37 (-8.6 %), idle 35.1 %, peak 4 A"
    )


def test_both_of_a_comparison_are_on_one_time_scale() -> None:
    before, after = step(4, 8, 1.0), step(4, 8, 0.0, recompute=False)
    picture = Picture(compare(before, after))
    rows = sorted(picture.rows().items())
    ends = [max(box.x + box.width for _, row in part for box in row) for part in (rows[:4], rows[4:])]
    shares = [(end - 84) / (picture.width - 24 - 84) for end in ends]
    assert shares == [pytest.approx(1, abs=0.01), pytest.approx(after.step_seconds / before.step_seconds, abs=0.01)]


def test_the_budget_is_a_line_across_the_memory_of_each_panel() -> None:
    timeline = step(2, 4)
    picture = Picture(compare(timeline, timeline, budget_bytes=1.5))
    panels = [line for line in picture.lines("budget") if float(line.attrib["x2"]) == picture.width - 24]
    assert len(panels) == 2
    assert "budget 1.5 A" in picture.texts()
    assert "budget" not in "".join(Picture(svg(timeline)).texts())


def test_the_legend_names_what_there_is() -> None:
    assert Picture(svg(step(2, 2, recompute=False))).texts()[-5:-2] == ["forward", "backward", "a gradient arrives"]
    assert Picture(svg(several_stages_a_rank()["zbv"])).texts()[-6:-2] == [
        "forward",
        "input gradient",
        "weight gradient",
        "a gradient arrives",
    ]


def test_whole_backwards_and_input_gradients_share_a_colour_and_an_entry() -> None:
    picture = Picture(svg(STEPS["dualpipe_v"], budget_bytes=3))
    assert picture.colour("B") == picture.colour("I")
    assert "backward, input gradient" in picture.texts()
    assert not {"backward", "input gradient"} & set(picture.texts())


def test_units_of_a_measured_step() -> None:
    picture = Picture(svg(measured(), units=Units("ms", 1e-3, "GB", 1e9), budget_bytes=4e9))
    assert picture.texts("facts") == ["step 202 ms, idle 51.8 %, peak 3 GB"]
    assert {"200", "time, ms", "memory, GB"} <= set(picture.texts())
    assert "budget 4 GB" in picture.texts()


def test_control_characters_in_a_name_do_not_break_the_document() -> None:
    timeline = step(2, 2)
    strange = replace(timeline, schedule=replace(timeline.schedule, name="a\x00\x1b<b>&\"'"))
    assert Picture(svg(strange)).texts("name") == ["a<b>&\"', 2 stages, 2 micro-batches"]


def test_a_long_name_is_cut() -> None:
    picture = Picture(svg(step(2, 2), names=["x" * 99]))
    assert picture.texts("name")[0].endswith("x...")
    name, facts = (extent(word) for word in picture.words if word.get("class") in ("name", "facts end"))
    assert name[2] <= facts[0]


@pytest.mark.parametrize("timelines", [(), (EMPTY,), (EMPTY, EMPTY)])
def test_empty_pictures_are_valid(timelines: tuple[Timeline, ...]) -> None:
    assert Picture(svg(*timelines)).boxes() == []


def test_the_picture_of_a_large_step_stays_small() -> None:
    assert len(svg(STEPS["p=16"])) < 150_000
