"""What is free to keep, beside a count of its own, by trying."""
from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from tests.planning.policies import early, placed
from tests.planning.random_steps import random_step
from tests.slow import few
from torchckpt.planning import NAMES, Block, Kind, named_schedule, simulate
from torchckpt.planning.order.schedules import (
    dualpipe_v,
    eager_one_f_one_b,
    gpipe,
    interleaved_one_f_one_b,
    looped_bfs,
    one_f_one_b,
    zbv,
    zero_bubble,
)
from torchckpt.planning.step.placement import without
from torchckpt.planning.work.choice import free_to_keep

SIZES = [(1, 1), (1, 4), (2, 2), (2, 4), (2, 6), (3, 3), (3, 6), (3, 9), (4, 8), (4, 12), (5, 10)]
NAMED = [
    *(named_schedule(name, p, m) for name in NAMES for p, m in SIZES if name != "dualpipe_v" or m >= 2 * p),
    *(gpipe(p, m, last_first=True) for p, m in SIZES),
    *(zero_bubble(p, m, chunks=2) for p, m in SIZES),
    *(interleaved_one_f_one_b(p, 3, m) for p, m in SIZES),
    zbv(3, 7),
    zbv(4, 9),
    dualpipe_v(3, 8),
    dualpipe_v(4, 9),
]
RANDOM = [replace(without(random_step(seed)[1]), name=f"random-{seed}") for seed in range(100)]



def of(*schedules):
    def name(schedule):
        return f"{schedule.name}-{len(schedule.ranks)}x{schedule.stages}x{schedule.micro_batches}"

    return pytest.mark.parametrize("schedule", schedules, ids=name)


def visits_of(schedule, rank):
    return [
        (stage, i)
        for stage, home in enumerate(schedule.placement)
        if home == rank
        for i in range(schedule.micro_batches)
    ]


def peak(order, kept):
    """Of one rank: the most micro-batches alive at once, and beside as many, the most boundaries."""
    saved = boundaries = 0
    peaks = [(0, 0)]
    for stage, kind, i in order:
        if kind is Kind.FORWARD and (stage, i) in kept:
            saved += 1
        elif kind is Kind.FORWARD:
            boundaries += 1
        elif kind in (Kind.BACKWARD, Kind.INPUT_GRAD) and (stage, i) not in kept:
            saved, boundaries = saved + 1, boundaries - 1  # what is saved includes the boundary
        peaks.append((saved, boundaries))
        saved -= kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD)
    assert (saved, boundaries) == (0, 0)
    return max(peaks)


def simulated_peaks(schedule, kept, boundary_bytes, link=None):
    recomputing = early(schedule, *kept) if link is None else placed(schedule, Block(), link, *kept)
    costs = Block(saved_bytes=1.0, boundary_bytes=boundary_bytes)
    return simulate(recomputing, costs, exposed=False).peak_bytes


# literally ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "free"),
    [
        (gpipe(1, 1), {(0, 0)}),
        (gpipe(2, 3), {(0, 0), (1, 0)}),  # first forward, first back
        (gpipe(2, 3, last_first=True), {(0, 2), (1, 2)}),  # last forward, first back
        (looped_bfs(2, 2, 2), {(2, 1), (3, 1)}),  # the lower stages go back last
        (one_f_one_b(3, 4), {(0, 0), (1, 0), *((2, i) for i in range(4))}),
        (eager_one_f_one_b(3, 4), {(0, 0), (1, 0), *((2, i) for i in range(4))}),
        (interleaved_one_f_one_b(2, 2, 2), {(2, 0), (3, 0), (3, 1)}),
        (zero_bubble(2, 3), {(0, 0), (1, 0), (1, 1), (1, 2)}),
        (zbv(2, 3), {(1, 0), (2, 0), (2, 2), (3, 0), (3, 1), (3, 2)})  # three at 1I2, and no boundary beside,
    ],
    ids=lambda it: getattr(it, "name", ""),
)
def test_of_small_schedules(schedule, free):
    assert free_to_keep(schedule) == free


def test_boundaries_are_small_but_count():
    schedule = dualpipe_v(2, 4)
    # 1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3
    #  the peak, two micro-batches and no boundary, is at 1I3 ^
    assert peak(schedule.ranks[1], ()) == (2, 0)
    assert peak(schedule.ranks[1], {(2, 0), (2, 2)}) == (2, 3)  # no more micro-batches, and yet higher
    assert free_to_keep(schedule) == {(2, 0), (3, 0), (3, 1)}


def test_recomputes_that_the_schedule_has_already_do_not_matter():
    for schedule in [one_f_one_b(4, 8), zbv(3, 6), interleaved_one_f_one_b(2, 2, 4)]:
        for order in [early(schedule), early(schedule, k=2), placed(schedule, Block(), 0.5)]:
            assert free_to_keep(order) == free_to_keep(schedule)


def test_a_rank_without_stages_keeps_nothing():
    schedule = gpipe(1, 2)
    assert free_to_keep(replace(schedule, ranks=(*schedule.ranks, ()))) == free_to_keep(schedule)


# by trying ------------------------------------------------------------------------------------------------------------


@few(15)
@of(*NAMED, *RANDOM)
def test_the_peak_is_that_of_recomputing_everything(schedule):
    free = free_to_keep(schedule)
    assert simulated_peaks(schedule, free, 0.0) == simulated_peaks(schedule, frozenset(), 0.0)
    pairs = zip(simulated_peaks(schedule, free, 2**-10), simulated_peaks(schedule, frozenset(), 2**-10))
    assert all(kept <= dropped for kept, dropped in pairs)


@few(11)
@of(*NAMED)
def test_the_peak_stays_where_recomputes_fill_what_a_rank_waits(schedule):
    free = free_to_keep(schedule)
    pairs = zip(simulated_peaks(schedule, free, 0.0, 0.5), simulated_peaks(schedule, frozenset(), 0.0))
    assert all(kept <= dropped for kept, dropped in pairs)


@few(29)
@of(*NAMED, *RANDOM)
def test_not_one_more_is_free(schedule):
    free = free_to_keep(schedule)
    for rank, order in enumerate(schedule.ranks):
        most = peak(order, ())
        assert peak(order, free) <= most
        for visit in visits_of(schedule, rank):
            assert visit in free or peak(order, free | {visit}) > most, visit


@few(33)
@of(*NAMED, *RANDOM)
def test_no_other_choice_keeps_more(schedule):
    free = free_to_keep(schedule)
    for rank, order in enumerate(schedule.ranks):
        visits, most = visits_of(schedule, rank), peak(order, ())
        if len(visits) <= 10:
            more = len(free & set(visits)) + 1
            assert not any(peak(order, set(chosen)) <= most for chosen in combinations(visits, more)), rank
