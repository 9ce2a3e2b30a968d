"""The rules to build on, as the simulator shows them."""
from __future__ import annotations

import pytest

from tests.model.closed_forms import CELLS, Cell, greedy
from torchckpt.model.place.placement import ahead, arrival, partial, with_recompute
from torchckpt.model.schedule.costs import Link, StageCosts
from torchckpt.model.schedule.schedules import (
    dualpipe_v,
    eager_one_f_one_b,
    gpipe,
    interleaved_one_f_one_b,
    looped_bfs,
    one_f_one_b,
    zbv,
    zero_bubble,
)
from torchckpt.model.simulation.simulator import simulate

SMALL = [cell for cell in CELLS if cell.p <= 8]
small_cells = pytest.mark.parametrize("cell", SMALL, ids=lambda cell: f"p{cell.p}-m{cell.m}-tc{cell.tc}")


def run(schedule, cell, policy=None):
    schedule = schedule if policy is None else with_recompute(schedule, policy)
    return simulate(schedule, cell.costs, cell.link, exposed=False)


def gain(schedule, cell, k, exempt=()):
    """What k ahead gains over one ahead."""
    one, more = (run(schedule, cell, greedy(cell, ahead_by, exempt)).step_seconds for ahead_by in (1, k))
    return one - more


@small_cells
def test_more_than_one_ahead_gains_at_most_one_recompute_a_step(cell):
    for schedule in [gpipe(cell.p, cell.m), one_f_one_b(cell.p, cell.m), eager_one_f_one_b(cell.p, cell.m)]:
        assert gain(schedule, cell, k=cell.m) == 0
    for k in [2, cell.m]:
        assert 0 <= gain(one_f_one_b(cell.p, cell.m), cell, k, "last_stage") <= cell.tr


@small_cells
def test_the_exception_is_gpipe_with_its_last_stage_exempt(cell):
    # The last stage but one idles once, for tf + tb + 2 tc: one ahead recomputes one micro-batch there, unlimited
    # look-ahead as many as fit. 1F1B spreads the same time over the step.
    once = cell.tf + cell.tb + 2 * cell.tc
    expected = min(once, (cell.m - 1) * cell.tr) - cell.tr
    assert gain(gpipe(cell.p, cell.m), cell, cell.m, "last_stage") <= max(0, once - cell.tr)
    if cell.m > 4:
        assert gain(gpipe(cell.p, cell.m), cell, cell.m, "last_stage") == expected


@pytest.mark.parametrize("tc", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("p", [2, 3, 4])
def test_one_ahead_costs_no_memory_over_arrival(p, tc):
    m = 3 * p
    cell = Cell(p, m, tc)
    flushed = [gpipe(p, m), gpipe(p, m, last_first=True), looped_bfs(p, 2, m)]
    in_turn = [one_f_one_b(p, m), eager_one_f_one_b(p, m), interleaved_one_f_one_b(p, 2, m)]
    split = [zero_bubble(p, m), zero_bubble(p, m, chunks=2), zbv(p, m), dualpipe_v(p, m)]
    for schedule in [*flushed, *in_turn, *split]:
        for exempt in [(), "last_stage", "last_micro_batch", "first_backward"]:
            at_arrival = run(schedule, cell, arrival(exempt))
            for policy in [ahead(exempt=exempt), greedy(cell, exempt=exempt)]:
                one_ahead = run(schedule, cell, policy)
                assert all(ours <= theirs for ours, theirs in zip(one_ahead.peak_bytes, at_arrival.peak_bytes))
                assert one_ahead.step_seconds <= at_arrival.step_seconds


def test_exempting_the_last_stage_takes_two_micro_batches_on_two_stages_from_22_percent_to_none():
    cell = Cell(2, 2, 0.0)
    schedule = one_f_one_b(2, 2)
    plain = run(schedule, cell)
    every_stage = run(schedule, cell, greedy(cell))
    but_the_last = run(schedule, cell, greedy(cell, exempt="last_stage"))
    assert f"{every_stage.step_seconds / plain.step_seconds - 1:.0%}" == "22%"
    assert but_the_last.step_seconds == plain.step_seconds
    assert but_the_last.peak_bytes[-1] == plain.peak_bytes[-1] == cell.costs.saved_bytes  # one micro-batch either way


def test_eager_1f1b_with_recompute_beats_1f1b_without():
    costs, link = StageCosts(1.0, 1.0, 1.0, 1.0, saved_bytes=20, boundary_bytes=1), Link(1.0)  # A = 20 c
    plain = simulate(one_f_one_b(8, 32), costs, link)
    eager = simulate(with_recompute(eager_one_f_one_b(8, 32), ahead(exempt="last_stage")), costs, link)
    assert (plain.step_seconds, max(plain.peak_bytes)) == (185.0, 8 * 20)
    assert (eager.step_seconds, max(eager.peak_bytes)) == (160.0, 1.75 * 20)
    assert f"{eager.step_seconds / plain.step_seconds:.3f}" == "0.865"


def test_early_segments_hide_and_late_ones_save_memory():
    cell = Cell(4, 16, 0.0)
    schedule = one_f_one_b(4, 16)
    steps, peaks = zip(
        *(
            (timeline.step_seconds, timeline.peak_bytes[0])
            for timeline in (run(schedule, cell, partial(early, 4, costs=cell.costs)) for early in (1, 2, 3, 4))
        )
    )
    assert list(steps) == sorted(steps, reverse=True)
    assert peaks == (0.5, 0.75, 1.0, 1.25)
    assert steps[-1] == run(schedule, cell, greedy(cell)).step_seconds
