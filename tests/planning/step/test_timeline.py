"""What a timeline says of itself."""
from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from tests.planning.step.test_measured import spans_of, step_of
from tests.planning.steps import EMPTY, measured, several_stages_a_rank, step
from torchckpt.errors import ArgumentError
from torchckpt.planning import Block, Timeline
from torchckpt.planning.draw.svg import svg
from torchckpt.planning.draw.units import Units
from torchckpt.planning.figures import TimelineFigures
from torchckpt.planning.step.measured import measured_timeline

MS = Units("ms", 1e-3, "GB", 1e9)


def test_the_table_of_a_step_on_paper() -> None:
    assert str(step(2, 4)).split("\n") == [
        "1f1b, 2 stages, 4 micro-batches: step 17",
        "",
        "         forward  backward  recompute    idle  peak",
        "stage 0        4         8          4   5.9 %   1 A",
        "stage 1        4         8          0  29.4 %   1 A",
    ]


def test_the_table_of_a_step_with_bytes() -> None:
    assert str(measured()).split("\n") == [
        "gpipe, 2 stages, 1 micro-batch: step 201.7 ms",
        "",
        "         forward  backward  recompute    idle  peak",
        "stage 0  31.3 ms   67.8 ms       0 ms  50.9 %  3 GB",
        "stage 1  30.5 ms   64.9 ms       0 ms  52.7 %  3 GB",
    ]


def test_halves_of_a_backward_count_as_one() -> None:
    table = str(several_stages_a_rank()["zbv"])
    assert [line.split()[:3] for line in table.split("\n")[3:]] == [["rank", "0", "8"], ["rank", "1", "8"]]
    assert [line.split()[3] for line in table.split("\n")[3:]] == ["16", "16"]


def test_without_memory_there_is_no_column_for_it() -> None:
    assert "peak" not in str(replace(step(2, 2), memory=((), ())))


def test_an_empty_step() -> None:
    assert str(EMPTY).startswith("empty, 2 stages, 0 micro-batches: step 0\n")
    assert EMPTY.draw()


@pytest.mark.parametrize("timeline", [step(2, 4), measured()])
def test_the_picture_is_that_of_svg(timeline: Timeline) -> None:
    units = timeline.units or (MS if timeline == measured() else Units())
    assert timeline._repr_svg_() == timeline.draw() == svg(timeline, units=units)
    assert timeline.draw(budget_bytes=2, copies=True) == svg(timeline, units=units, budget_bytes=2, copies=True)
    assert replace(timeline, units=Units("s")).draw() == svg(timeline, units=Units("s"))


def test_a_picture_of_another_kind_is_not_written(tmp_path: Path) -> None:
    said = r"draw\(\): the picture is SVG, and the file's name does not end in .svg\n  received: .*x.png\n"
    with pytest.raises(ArgumentError, match=said + r'  works:    draw\("x.svg"\)'):
        EMPTY.draw(tmp_path / "x.png")
    assert not [*tmp_path.iterdir()]


def test_a_measured_step_is_in_milliseconds() -> None:
    paper = step(2, 2)
    spans = spans_of(paper)
    found = measured_timeline(step_of(paper.schedule, Block()), spans)
    assert str(found).startswith("1f1b, 2 stages, 2 micro-batches: step 9000 ms")
    assert "1 A" in str(found)
    assert "2 MB" in str(measured_timeline(step_of(paper.schedule, Block(saved_bytes=2e6)), spans))


@pytest.mark.parametrize(("saved", "peak"), [(704.0, "704 B"), (20480.0, "20.48 kB"), (2e6, "2 MB")])
def test_bytes_are_written_as_bytes_however_few(saved: float, peak: str) -> None:
    paper = step(2, 2)
    step_in_bytes = step_of(paper.schedule, Block(saved_bytes=saved))
    text = str(measured_timeline(step_in_bytes, spans_of(paper), in_bytes=True))
    assert [line.endswith(peak) for line in text.splitlines()[-2:]] == [True, True]


def test_units_are_no_part_of_what_a_step_is() -> None:
    timeline = step(2, 2)
    assert replace(timeline, units=MS) == timeline
    assert isinstance(timeline, TimelineFigures)
    assert pickle.loads(pickle.dumps(timeline)) == timeline
