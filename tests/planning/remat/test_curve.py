from __future__ import annotations

import random
from itertools import pairwise

import pytest

from tests.planning.remat.flows import chain
from tests.planning.remat.test_plan_svg import REPEATING, every, uneven
from torchckpt.planning.remat.curve import (
    Label,
    Run,
    Span,
    beside,
    joined,
    kinds,
    runs,
    spans,
    spread,
    thinned,
)
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
    assert kinds(runs(uneven(), REPEATING), 0.5) == [Span("F", 0, 4, 4), Span("R", 4, 5, 1), Span("B", 5, 11, 6)]


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
    spans = joined([Span("l.3", 0, 1, 1), Span("l.4", 1, 2, 1), Span("l.5", 2, 4, 2), Span("m", 5, 6, 1)])
    assert spans == [Span("l.3 - 5", 0, 4, 4), Span("m", 5, 6, 1)]
    assert joined([Span("l.3", 0, 1, 1), Span("l", 1, 2, 1)]) == [Span("l.3", 0, 2, 2)]
    assert joined([]) == []


def test_of_two_that_touch_the_heavier_stays() -> None:
    light, heavy, far = Label("light", 10, 8, 1), Label("heavy", 15, 8, 2), Label("far", 30, 8, 1)
    assert beside([light, heavy, far], 0, 100) == [heavy, far]


def test_labels_move_into_the_frame() -> None:
    labels = beside([Label("a", 1, 10, 1), Label("b", 99, 10, 1)], 0, 100)
    assert [label.place for label in labels] == [5, 95]


@pytest.mark.parametrize("seed", range(20))
def test_places_keep_their_distance_and_move_as_little_as_they_can(seed: int) -> None:
    rng = random.Random(seed)
    places = sorted(rng.uniform(0, 60) for _ in range(rng.randint(1, 5)))
    lines = spread(places, 10, 100)
    assert all(line + 10 <= other + 1e-9 for line, other in pairwise(lines))
    moved = sum((line - other) ** 2 for line, other in zip(places, lines))
    for _ in range(200):  # no other places that keep the distance move less
        tried = sorted(place + rng.uniform(-15, 15) for place in places)
        if all(line + 10 <= other for line, other in pairwise(tried)):
            assert sum((line - other) ** 2 for line, other in zip(places, tried)) >= moved - 1e-9


def test_no_place_is_beyond_the_end() -> None:
    assert spread([95, 99, 100], 10, 100) == [80, 90, 100]
