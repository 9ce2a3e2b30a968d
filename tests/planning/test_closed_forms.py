"""The simulator is equal to every closed form, in 48 cells a row, and gives the table of overheads to the digit."""
from __future__ import annotations

import pytest

from tests.planning.closed_forms import BOUNDARY, CELLS, Cell, greedy
from tests.planning.policies import early, late
from tests.slow import few
from torchckpt.planning import bound, gpipe, one_f_one_b, simulate

LARGE = 256  # cells of this size and above take longer than all others together
every_cell = pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=pytest.mark.slow if cell.p * cell.m >= LARGE else ()) for cell in CELLS],
    ids=lambda cell: f"p{cell.p}-m{cell.m}-tc{cell.tc}",
)
A, c = 1.0, BOUNDARY


def run(schedule, cell, choices=None):
    return simulate(schedule, cell.costs, cell.link, choices, exposed=False)


def step(schedule, cell, choices=None):
    return run(schedule, cell, choices).step_seconds


@few(3)
@every_cell
def test_gpipe(cell):
    p, m, tr = cell.p, cell.m, cell.tr
    for schedule in [gpipe(p, m), gpipe(p, m, last_first=True)]:
        plain = run(schedule, cell)
        assert plain.step_seconds == cell.gpipe
        assert plain.peak_bytes == (m * A,) * p

        at_arrival = run(schedule, cell, late(schedule))
        assert at_arrival.step_seconds == cell.gpipe + (m + p - 1) * tr
        assert at_arrival.peak_bytes == ((m - 1) * c + A,) * p

        for recomputing in [early(schedule), greedy(schedule, cell)]:
            one_ahead = run(recomputing, cell)
            assert one_ahead.step_seconds == cell.gpipe + m * tr
            assert one_ahead.peak_bytes == ((m - 1) * c + A,) * p

        unlimited = [run(order, cell) for order in [early(schedule, k=m), greedy(schedule, cell, k=m)]]
        assert [timeline.step_seconds for timeline in unlimited] == [cell.gpipe + m * tr] * 2
        assert unlimited[0].peak_bytes == (m * A,) * p
        assert max(unlimited[1].peak_bytes) <= m * A


@few(4)
@every_cell
def test_gpipe_with_one_micro_batch_exempt(cell):
    p, m, tr = cell.p, cell.m, cell.tr
    for exempt, schedule in [
        ("last_micro_batch", gpipe(p, m, last_first=True)),
        ("first_backward", gpipe(p, m, last_first=True)),
        ("first_backward", gpipe(p, m)),
    ]:
        for recomputing in [early(schedule, exempt), greedy(schedule, cell, exempt)]:
            timeline = run(recomputing, cell)
            assert timeline.step_seconds == cell.gpipe + (m - 1) * tr
            assert max(timeline.peak_bytes) <= (m - 1) * c + A


@few(11)
@every_cell
def test_one_f_one_b(cell):
    p, m, tr = cell.p, cell.m, cell.tr
    schedule = one_f_one_b(p, m)
    plain = run(schedule, cell)
    assert plain.step_seconds == cell.one_f_one_b
    assert plain.peak_bytes == tuple((p - j) * A for j in range(p))

    at_arrival = run(schedule, cell, late(schedule))
    assert at_arrival.step_seconds == cell.one_f_one_b + (m + p - 1) * tr
    assert at_arrival.peak_bytes == tuple((p - j - 1) * c + A for j in range(p))

    one_ahead = run(greedy(schedule, cell), cell)
    assert one_ahead.peak_bytes == at_arrival.peak_bytes
    if cell.tc == 0:
        assert one_ahead.step_seconds == m * (cell.tf + cell.tb + tr) + (p - 1) * (cell.tf + cell.tb)


@every_cell
def test_one_f_one_b_with_the_last_stage_exempt(cell):
    p = cell.p
    schedule = greedy(one_f_one_b(p, cell.m), cell, "last_stage")
    timeline = run(schedule, cell)
    assert bound(schedule, cell.costs, cell.link).step_seconds == cell.one_f_one_b_ahead
    assert cell.one_f_one_b_ahead <= timeline.step_seconds <= cell.one_f_one_b_ahead + 1.5 * cell.tr
    assert timeline.peak_bytes == tuple((p - j - 1) * c + A for j in range(p))


def test_right_before_the_backward_is_not_as_good_in_six_cells():
    far = {}
    for cell in CELLS:
        schedule = early(one_f_one_b(cell.p, cell.m), "last_stage")
        distance = step(schedule, cell) - cell.one_f_one_b_ahead
        if distance > 1.5 * cell.tr:
            far[cell[:3]] = distance
    assert far == {
        (4, 16, 1.0): 2.0,
        (4, 32, 1.0): 5.0,
        (8, 32, 1.0): 2.0,
        (8, 64, 1.0): 6.0,
        (16, 64, 1.0): 2.0,
        (16, 128, 1.0): 6.0,
    }


OVERHEADS = """
 p   m    tc   GPipe b  c'     1F1B b  c     bound   hidden
 2   2    0    33.3     11.1   33.3    0.0   0.0     1.00
 2   8    0    33.3     25.9   33.3    22.2  18.5    0.33
 2   8    1    31.0     24.1   25.7    2.9   0.0     0.89
 4   4    0    33.3     14.3   33.3    9.5   4.8     0.71
 4   4    .25  31.1     13.3   29.8    4.3   0.0     0.86
 4   16   1    30.2     23.8   22.4    0.0   0.0     1.00
 8   8    0    33.3     15.6   33.3    13.3  11.1    0.60
 8   32   .25  32.4     25.7   29.1    12.3  11.2    0.58
 8   32   1    29.8     23.7   21.1    0.0   0.0     1.00
"""
"""In % of the same schedule without recomputation; c: one ahead, last stage exempt; c': last micro-batch exempt."""


@pytest.mark.parametrize("row", OVERHEADS.strip().splitlines()[1:])
def test_table_of_overheads(row):
    p, m, tc, *figures = row.split()
    cell = Cell(int(p), int(m), float(tc))
    flushed, in_turn = gpipe(cell.p, cell.m), one_f_one_b(cell.p, cell.m)
    plain, none = step(flushed, cell), step(in_turn, cell)
    hidden_best = greedy(in_turn, cell, "last_stage")
    at_arrival, best = step(in_turn, cell, late(in_turn)), step(hidden_best, cell)
    overheads = [
        step(flushed, cell, late(flushed)) / plain,
        step(greedy(flushed, cell, "last_micro_batch"), cell) / plain,
        at_arrival / none,
        best / none,
        bound(hidden_best, cell.costs, cell.link).step_seconds / none,
    ]
    hidden = 1 - (best - none) / (at_arrival - none)
    assert [*(f"{100 * (overhead - 1):.1f}" for overhead in overheads), f"{hidden:.2f}"] == figures
