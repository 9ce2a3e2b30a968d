from __future__ import annotations

from itertools import pairwise

from tests.planning.remat.draw.test_plan_svg import every, uneven
from tests.planning.remat.flows import chain
from torchckpt.planning.remat.draw.curve import Run, Span, joined, kinds, runs, spans, thinned
from torchckpt.planning.remat.flow.memory import simulate

SCHEDULE = [0, 1, 2, 1, 3, 4, 5]


def test_runs_follow_one_another_and_a_repeat_takes_its_own_time() -> None:
    found = runs(uneven(), SCHEDULE)
    assert [(run.operation, run.start_seconds, run.end_seconds) for run in found] == [
        (0, 0, 1), (1, 1, 3), (2, 3, 4), (1, 4, 5), (3, 5, 7), (4, 7, 10), (5, 10, 11)
    ]
    assert "".join(run.kind for run in found) == "FFFRBBB"
    assert tuple(run.bytes for run in found) == simulate(uneven(), SCHEDULE).bytes_during


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
    assert kinds(runs(uneven(), SCHEDULE), 0.5) == [Span("F", 0, 4, 4), Span("R", 4, 5, 1), Span("B", 5, 11, 6)]


def test_kinds_that_alternate_quickly_keep_their_shares_repeats_first() -> None:
    alternate = [Run(0, i / 8, (i + 1) / 8, 0, False, i % 4 == 3) for i in range(8)]
    assert kinds(alternate, 2.0) == [Span("R", 0.0, 0.25, 0.25), Span("B", 0.25, 1.0, 0.75)]


def test_repeats_of_one_name_are_one_span() -> None:
    order = [("b.1.x", True), ("b.1.y", True), ("", False), ("b.1.x", True), ("b.0.x", True), ("a", True)]
    every_run = [Run(i, float(i), i + 1.0, 0, False, repeat) for i, (_, repeat) in enumerate(order)]
    paths = [path for path, _ in order]
    assert spans(every_run, paths, 2) == [Span("b.1", 0, 4, 3), Span("b.0", 4, 5, 1), Span("a", 5, 6, 1)]
    assert [span.name for span in spans(every_run, paths, 3)] == ["b.1.x", "b.1.y", "b.1.x", "b.0.x", "a"]


def test_neighbours_share_a_name() -> None:
    found = joined([Span("l.3", 0, 1, 1), Span("l.4", 1, 2, 1), Span("l.5", 2, 4, 2), Span("m", 5, 6, 1)])
    assert found == [Span("l.3 - 5", 0, 4, 4), Span("m", 5, 6, 1)]
    assert joined([Span("l.3", 0, 1, 1), Span("l", 1, 2, 1)]) == [Span("l.3", 0, 2, 2)]
    assert joined([]) == []
