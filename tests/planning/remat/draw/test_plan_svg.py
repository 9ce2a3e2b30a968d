"""The picture of a plan, read back: where peaks, budget and recomputed spans stand, and that no two labels overlap."""
from __future__ import annotations

import re
from itertools import accumulate, pairwise
from xml.etree import ElementTree

import pytest

from tests.planning.remat.flows import chain, mlp, random_step, transformer
from torchckpt.errors import ArgumentError
from torchckpt.planning.draw.units import Units
from torchckpt.planning.remat.draw.plan_svg import draw_plan
from torchckpt.planning.remat.flow.dataflow import Dataflow, Operation, Schedule
from torchckpt.planning.remat.flow.late import late
from torchckpt.planning.remat.flow.memory import simulate

SPACE = "{http://www.w3.org/2000/svg}"
LEFT, END, TOP, BOTTOM = 92.0, 802.0, 78.0, 338.0
EMPTY = Dataflow((), (), 0)


class Picture:
    def __init__(self, text: str) -> None:
        self.root = ElementTree.fromstring(text)
        self.width, self.height = float(self.root.attrib["width"]), float(self.root.attrib["height"])
        self.words = list(self.root.iter(f"{SPACE}text"))
        self.texts = [str(word.text) for word in self.words]

    @property
    def title(self) -> str:
        return str(self.root.findtext(f"{SPACE}title"))

    def of(self, element: str, kind: str) -> list[dict[str, str]]:
        return [found.attrib for found in self.root.iter(SPACE + element) if found.attrib.get("class") == kind]

    def dot(self, kind: str) -> tuple[float, float]:
        (dot,) = self.of("rect", f"dot {kind}")
        return float(dot["x"]) + 3, float(dot["y"]) + 3

    def corners(self, kind: str) -> list[tuple[float, float]]:
        return [corner for path in self.of("path", kind) for corner in corners(path["d"])]

    def repeated(self) -> list[tuple[float, float]]:
        """Where the boxes of the recomputed begin and end."""
        paths = "".join(path["d"] for path in self.of("path", "R repeated"))
        return [(float(x), float(x) + float(w)) for x, w in re.findall(r"M([\d.]+),[\d.]+h([\d.]+)v", paths)]

    def names(self) -> list[str]:
        found = [word for word in self.words if "small" in word.attrib.get("class", "")]
        return [str(word.text) for word in found if float(word.attrib["x"]) > LEFT - 8]


def corners(drawn: str) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for command, values in re.findall(r"([MHV])([-\d.,]+)", drawn):
        numbers = [float(value) for value in values.split(",")]
        x, y = found[-1] if found else (0.0, 0.0)
        found.append({"M": (numbers[0], numbers[-1]), "H": (numbers[0], y), "V": (x, numbers[0])}[command])
    return found


def extent(word: ElementTree.Element) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a text."""
    kind = word.attrib.get("class", "").split()
    sizes = {"title": 18.0, "facts": 14.0, "small": 12.0, "budgeted": 11.0}
    size = next((sizes[of] for of in sizes if of in kind), 13.0)
    width = len(str(word.text)) * size * 0.6
    x, y = float(word.attrib["x"]), float(word.attrib["y"])
    before, after = (width, 0.0) if "end" in kind else (width / 2, width / 2) if "middle" in kind else (0.0, width)
    if "transform" in word.attrib:  # up
        return x - size * 0.75, y - after, x, y + before
    return x - before, y - size * 0.75, x + after, y


def overlaps(picture: Picture) -> list[tuple[str | None, str | None]]:
    found, boxes = [], [extent(word) for word in picture.words]
    for place, (left, top, right, bottom) in enumerate(boxes):
        for other, beside in enumerate(boxes[:place]):
            if not (right <= beside[0] or beside[2] <= left or bottom <= beside[1] or beside[3] <= top):
                found.append((picture.words[other].text, picture.words[place].text))
    return found


def outside(picture: Picture) -> list[str | None]:
    boxes = ((word.text, *extent(word)) for word in picture.words)
    return [
        text
        for text, left, top, right, bottom in boxes
        if left < 0 or top < 0 or right > picture.width or bottom > picture.height
    ]


def every(flow: Dataflow, k: int) -> Schedule:
    """Keep the output of every ``k``-th operation of the forward."""
    return late(flow, {storage for operation in flow.operations[: flow.forward : k] for storage in operation.writes})


def paths_of(flow: Dataflow, per_layer: int = 4) -> list[str]:
    """Layers of so many operations; the backward has no names."""
    forward = [f"model.layers.{i // per_layer}.part{i % per_layer}" for i in range(flow.forward)]
    return forward + [""] * (len(flow.operations) - flow.forward)


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
    "uneven": (uneven(), [0, 1, 2, 1, 3, 4, 5]),
    "empty": (EMPTY, []),
}
every_flow = pytest.mark.parametrize(("flow", "schedule"), FLOWS.values(), ids=FLOWS)


# the curve ------------------------------------------------------------------------------------------------------------


def level(bytes_: float, most_bytes: float) -> float:
    """The y of so many bytes."""
    return BOTTOM - bytes_ / (most_bytes * 1.08) * (BOTTOM - TOP)


@every_flow
def test_the_curve_is_as_high_as_the_peak(flow: Dataflow, schedule: Schedule) -> None:
    if not flow.operations:
        return
    after, eager = simulate(flow, schedule), simulate(flow, flow.eager)
    most = max(after.peak_bytes, eager.peak_bytes)
    picture = Picture(draw_plan(flow, schedule))
    top = level(after.peak_bytes, most)
    assert min(y for _, y in picture.corners("outline")) == pytest.approx(top, abs=0.01)
    assert picture.dot("after")[1] == pytest.approx(top, abs=0.01)
    if list(schedule) != list(flow.eager):
        assert min(y for _, y in picture.corners("before")) == pytest.approx(level(eager.peak_bytes, most), abs=0.01)
        assert picture.dot("grey")[1] == pytest.approx(level(eager.peak_bytes, most), abs=0.01)


def test_the_curve_is_that_of_the_simulator() -> None:
    flow = uneven()
    schedule = [0, 1, 2, 1, 3, 4, 5]
    picture = Picture(draw_plan(flow, schedule))
    during, most = simulate(flow, schedule).bytes_during, simulate(flow, flow.eager).peak_bytes
    seconds = [0, *accumulate([1, 2, 1, 1, 2, 3, 1])]
    expected = [(LEFT + at / 11 * (END - LEFT), level(bytes_, most)) for at, bytes_ in zip(seconds, during)]
    drawn = picture.corners("outline")
    assert all(any(corner == pytest.approx(one, abs=0.01) for corner in drawn) for one in expected)
    assert drawn[0] == (LEFT, BOTTOM)
    assert drawn[-1] == (END, BOTTOM)


def test_what_is_recomputed_has_its_own_colour_under_the_curve_and_a_box_beneath() -> None:
    picture = Picture(draw_plan(uneven(), [0, 1, 2, 1, 3, 4, 5]))
    start, end = (LEFT + at / 11 * (END - LEFT) for at in (4, 5))
    assert picture.repeated() == [(pytest.approx(start, abs=0.01), pytest.approx(end, abs=0.02))]
    across = [x for x, _ in picture.corners("R fill")]
    assert (min(across), max(across)) == (pytest.approx(start, abs=0.01), pytest.approx(end, abs=0.01))
    colour = re.search(r"\.R\{fill:(#\w+)\}", picture.root.findtext(f"{SPACE}style") or "")
    assert colour is not None
    assert colour[1] == "#e69f00"


@every_flow
def test_the_colours_under_the_curve_take_turns_from_start_to_end(flow: Dataflow, schedule: Schedule) -> None:
    picture = Picture(draw_plan(flow, schedule))
    drawn = [corners(path["d"]) for kind in "FBR" for path in picture.of("path", f"{kind} fill")]
    parts = sorted((min(x for x, _ in part), max(x for x, _ in part)) for part in drawn)
    assert all(one[1] == pytest.approx(other[0], abs=0.011) for one, other in pairwise(parts))
    if flow.operations:
        assert (parts[0][0], parts[-1][1]) == (LEFT, pytest.approx(picture.corners("outline")[-1][0], abs=0.01))


def test_forward_and_backward_stand_under_the_axis() -> None:
    picture = Picture(draw_plan(uneven(), uneven().eager))
    (forward,), (backward,) = picture.of("rect", "F phase"), picture.of("rect", "B phase")
    border = LEFT + 4 / 10 * (END - LEFT)
    assert float(forward["x"]) + float(forward["width"]) == pytest.approx(border, abs=0.011)
    assert float(backward["x"]) == pytest.approx(border, abs=0.011)
    assert {"forward", "backward"} <= set(picture.texts)


def test_the_eager_step_behind_ends_where_it_is_done() -> None:
    picture = Picture(draw_plan(uneven(), [0, 1, 2, 1, 3, 4, 5]))
    assert picture.corners("before")[-1] == (pytest.approx(LEFT + 10 / 11 * (END - LEFT), abs=0.01), BOTTOM)
    assert "eager: nothing recomputed" in picture.texts


def test_another_schedule_may_stand_behind() -> None:
    flow = uneven()
    picture = Picture(draw_plan(flow, flow.eager, before=[0, 1, 2, 1, 3, 4, 5]))
    peak = simulate(flow, [0, 1, 2, 1, 3, 4, 5]).peak_bytes
    assert f"before peak {peak} B" in picture.texts
    assert picture.corners("before")[-1] == (END, BOTTOM)


def test_operations_that_take_no_time_still_show_their_peak() -> None:
    operations = (Operation("f", (0,), (1,), 1.0), Operation("view", (1,), (2,), 0.0), Operation("b", (1,), (3,), 1.0))
    flow = Dataflow(operations, (0, 1, 97, 2), 2, frozenset({0}), frozenset({3}))
    picture = Picture(draw_plan(flow, flow.eager))
    assert (LEFT + (END - LEFT) / 2, round(level(98, 98), 2)) in picture.corners("outline")


def test_where_nothing_takes_time_the_axis_counts_operations() -> None:
    operations = (Operation("f", (0,), (1,), 0.0), Operation("b", (1,), (2,), 0.0))
    flow = Dataflow(operations, (0, 4, 2), 1, frozenset({0}), frozenset({2}))
    picture = Picture(draw_plan(flow, [0, 0, 1]))
    assert "time, operations" in picture.texts
    assert picture.corners("before")[-1][0] == pytest.approx(LEFT + 2 / 3 * (END - LEFT), abs=0.01)


# labels ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget_share", [None, 0.0, 0.01, 0.5, 0.99, 1.3])
@every_flow
def test_no_two_texts_overlap_and_none_leaves_the_frame(
    flow: Dataflow, schedule: Schedule, budget_share: float | None
) -> None:
    budget = None if budget_share is None else int(budget_share * simulate(flow, flow.eager).peak_bytes)
    for paths in (None, paths_of(flow)):
        picture = Picture(draw_plan(flow, schedule, budget_bytes=budget, paths=paths))
        assert overlaps(picture) == []
        assert outside(picture) == []


def test_the_budget_is_a_dashed_line_with_its_label() -> None:
    flow = uneven()
    picture = Picture(draw_plan(flow, flow.eager, budget_bytes=100))
    line = picture.of("line", "budget")[0]
    peak = simulate(flow, flow.eager).peak_bytes
    assert float(line["y1"]) == float(line["y2"]) == pytest.approx(level(100, peak), abs=0.01)
    assert (float(line["x1"]), float(line["x2"])) == (LEFT, END)
    assert {"budget 100 B", "budget"} <= set(picture.texts)
    assert "stroke-dasharray" in (picture.root.findtext(f"{SPACE}style") or "")
    assert not [text for text in Picture(draw_plan(flow, flow.eager)).texts if "budget" in text]


def test_the_facts_say_peak_budget_and_recompute() -> None:
    flow = uneven()
    schedule = [0, 1, 2, 1, 3, 4, 5]
    assert simulate(flow, flow.eager).peak_bytes == simulate(flow, schedule).peak_bytes == 140
    within = draw_plan(flow, schedule, budget_bytes=150, title="A step")
    assert Picture(within).title == (
        "Peak memory 140 B in place of 140 B (+0.0 %), for 10.0 % more time; "
        "A step: within the budget of 150 B, 1 operation recomputed"
    )
    over = draw_plan(flow, flow.eager, budget_bytes=125, title="A step")
    assert Picture(over).title == "Peak memory 140 B; A step: 15 B over the budget of 125 B, nothing is recomputed"


def test_without_recompute_there_is_one_curve_and_one_peak() -> None:
    picture = Picture(draw_plan(mlp(3), mlp(3).eager))
    assert picture.of("path", "before") == picture.of("path", "R repeated") == []
    assert not {"recomputed", "eager: nothing recomputed"} & set(picture.texts)
    assert len([text for text in picture.texts if "peak" in text.lower()]) == 2  # title and label


def test_units_are_on_the_axes() -> None:
    picture = Picture(draw_plan(chain(4), every(chain(4), 2)))
    assert {"memory, MB", "time, % of the eager step"} <= set(picture.texts)
    picture = Picture(draw_plan(chain(4), every(chain(4), 2), units=Units("ms", 1e-3, "MiB", 2**20)))
    assert {"memory, MiB", "time, ms"} <= set(picture.texts)
    assert Picture(draw_plan(chain(4), every(chain(4), 2), units=Units())).texts.count("time") == 1


# names ----------------------------------------------------------------------------------------------------------------


def test_names_of_modules_lie_where_there_is_room() -> None:
    picture = Picture(draw_plan(uneven(), [0, 1, 2, 1, 3, 4, 5], paths=["a", "layers.0", "b", "", "", ""]))
    (word,) = [word for word in picture.words if word.text == "layers.0"]
    assert float(word.attrib["x"]) == pytest.approx(LEFT + 4.5 / 11 * (END - LEFT), abs=0.01)
    assert "transform" not in word.attrib


def test_without_paths_operations_are_named() -> None:
    assert Picture(draw_plan(uneven(), [0, 1, 2, 1, 3, 4, 5])).names() == ["f1"]


def test_names_stand_on_end_where_they_do_not_fit_beside_one_another() -> None:
    flow = chain(24)
    picture = Picture(draw_plan(flow, every(flow, 2), paths=[f"layers.{i}" for i in range(len(flow.operations))]))
    assert picture.names() == [f"layers.{i}" for i in range(23, 7, -2)]
    assert "8 of 12" in picture.texts
    assert [word.text for word in picture.words if "rotate" in word.attrib.get("transform", "")][1:] == picture.names()


def test_modules_that_are_recomputed_at_one_go_share_a_name_where_it_gets_narrow() -> None:
    flow = chain(40)
    picture = Picture(draw_plan(flow, every(flow, 8), paths=[f"layers.{i}" for i in range(len(flow.operations))]))
    assert picture.names() == [f"layers.{i + 1} - {i + 7}" for i in range(32, -1, -8)]


def test_names_are_as_short_as_room_demands_but_say_the_layer() -> None:
    flow = chain(480)
    paths = [f"model.layers.{i // 12}.part{i % 12}" for i in range(len(flow.operations))]
    names = Picture(draw_plan(flow, every(flow, 2), paths=paths)).names()
    assert len(set(names)) == 8
    assert set(names) <= {f"model.layers.{i}" for i in range(40)}


def test_of_too_many_names_some_are_told_and_the_picture_says_so() -> None:
    flow = chain(480)
    picture = Picture(draw_plan(flow, every(flow, 2), paths=[f"layers.{i}" for i in range(len(flow.operations))]))
    assert len(picture.names()) == 8
    assert "8 of 240" in picture.texts


def test_only_what_takes_a_while_has_a_name() -> None:
    long, short = Operation("long", (0,), (1,), 50.0), Operation("short", (1,), (2,), 0.5)
    last, back = Operation("f2", (2,), (3,), 1.0), Operation("b1", (1, 3), (4,), 1.0)
    operations = (long, short, last, back, Operation("b0", (2, 4), (5,), 1.0))
    flow = Dataflow(operations, (0, 40, 80, 10, 10, 10), 3, frozenset({0}), frozenset({5}))
    picture = Picture(draw_plan(flow, [0, 1, 2, 0, 3, 1, 4], paths=["layers.0", "layers.1", "b", "", ""]))
    assert picture.names() == ["layers.0"]


def test_long_names_and_titles_are_clipped() -> None:
    paths = ["a", "x" * 50 + ".mlp", "b", "", "", ""]
    picture = Picture(draw_plan(uneven(), [0, 1, 2, 1, 3, 4, 5], paths=paths, title="t" * 200))
    assert picture.names() == ["..." + "x" * 17 + ".mlp"]
    assert picture.texts[1].startswith("t" * 57 + "...: ")
    assert overlaps(picture) == outside(picture) == []


def test_special_characters_are_safe() -> None:
    text = draw_plan(uneven(), [0, 1, 2, 1, 3, 4, 5], paths=["", "<a>&\x00\"'", "", "", "", ""], title="<b>&\x1b")
    assert "<a>&\"'" in Picture(text).texts
    assert Picture(text).texts[1].startswith("<b>&: ")
    assert "; <b>&: " in Picture(text).title


# size and errors ------------------------------------------------------------------------------------------------------


def test_a_step_of_thousands_of_operations_stays_small_and_true() -> None:
    flow = chain(2000)
    schedule = every(flow, 2)
    assert len(schedule) > 5000
    text = draw_plan(flow, schedule, paths=[f"layers.{i}" for i in range(len(flow.operations))])
    assert len(text) < 300_000
    picture = Picture(text)
    most = simulate(flow, flow.eager).peak_bytes
    assert min(y for _, y in picture.corners("outline")) == pytest.approx(
        level(simulate(flow, schedule).peak_bytes, most), abs=0.01
    )
    shown = sum(end - start for start, end in picture.repeated()) / (END - LEFT)
    seconds = sum(flow.operations[index].seconds for index in schedule)
    assert shown == pytest.approx(1 - flow.seconds / seconds, abs=0.005)


@every_flow
def test_the_same_text_every_time(flow: Dataflow, schedule: Schedule) -> None:
    assert draw_plan(flow, schedule) == draw_plan(flow, list(schedule))


def test_a_path_for_each_operation() -> None:
    with pytest.raises(ArgumentError, match=r"there is not one path for each of 6 operations\n.*1 paths\n.*paths=None"):
        draw_plan(uneven(), uneven().eager, paths=["a"])


def test_a_schedule_of_another_step_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="a schedule runs every operation"):
        draw_plan(uneven(), [0, 1, 2])
