from __future__ import annotations

from itertools import pairwise

from tests.planning.remat.flows import chain
from tests.planning.remat.test_plan_svg import REPEATING, every, uneven
from torchckpt.planning.remat.curve import Run, Span, kinds, runs, thinned
from torchckpt.planning.remat.flow.memory import simulate


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
