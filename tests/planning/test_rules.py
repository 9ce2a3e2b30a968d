"""The rules to build on, as the simulator shows them."""
from __future__ import annotations

import pytest

from tests.planning.closed_forms import BOUNDARY, CELLS, Cell, greedy
from tests.planning.policies import early, late
from tests.slow import few, slow
from torchckpt.planning import (
    Block,
    Choice,
    Stage,
    dualpipe_v,
    eager_one_f_one_b,
    gpipe,
    interleaved_one_f_one_b,
    looped_bfs,
    one_f_one_b,
    quickest,
    simulate,
    zbv,
    zero_bubble,
)

SMALL = [cell for cell in CELLS if cell.p <= 8]
small_cells = pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=() if cell.p <= 4 else pytest.mark.slow) for cell in SMALL],
    ids=lambda cell: f"p{cell.p}-m{cell.m}-tc{cell.tc}",
)


def run(schedule, cell, choices=None):
    return simulate(schedule, cell.costs, cell.link, choices, exposed=False)


def gain(schedule, cell, k, *kept):
    """What k ahead gains over one ahead."""
    one, more = (run(greedy(schedule, cell, *kept, k=by), cell).step_seconds for by in (1, k))
    return one - more


@few(2)
@small_cells
def test_more_than_one_ahead_gains_at_most_one_recompute_a_step(cell):
    for schedule in [gpipe(cell.p, cell.m), one_f_one_b(cell.p, cell.m), eager_one_f_one_b(cell.p, cell.m)]:
        assert gain(schedule, cell, k=cell.m) == 0
    for k in [2, cell.m]:
        assert 0 <= gain(one_f_one_b(cell.p, cell.m), cell, k, "last_stage") <= cell.tr


@few(5)
@small_cells
def test_the_exception_is_gpipe_with_its_last_stage_exempt(cell):
    # The last stage but one idles once, for tf + tb + 2 tc: one ahead recomputes one micro-batch there, unlimited
    # look-ahead as many as fit. 1F1B spreads the same time over the step.
    once = cell.tf + cell.tb + 2 * cell.tc
    expected = min(once, (cell.m - 1) * cell.tr) - cell.tr
    assert gain(gpipe(cell.p, cell.m), cell, cell.m, "last_stage") <= max(0, once - cell.tr)
    if cell.m > 4:
        assert gain(gpipe(cell.p, cell.m), cell, cell.m, "last_stage") == expected


@few(1)
@pytest.mark.parametrize("tc", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("p", [2, 3, *slow([4])])
def test_one_ahead_costs_no_memory_over_arrival(p, tc):
    m = 3 * p
    cell = Cell(p, m, tc)
    flushed = [gpipe(p, m), gpipe(p, m, last_first=True), looped_bfs(p, 2, m)]
    in_turn = [one_f_one_b(p, m), eager_one_f_one_b(p, m), interleaved_one_f_one_b(p, 2, m)]
    split = [zero_bubble(p, m), zero_bubble(p, m, chunks=2), zbv(p, m), dualpipe_v(p, m)]
    for schedule in [*flushed, *in_turn, *split]:
        for kept in [(), ("last_stage",), ("last_micro_batch",), ("first_backward",)]:
            at_arrival = run(schedule, cell, late(schedule, *kept))
            for recomputing in [early(schedule, *kept), greedy(schedule, cell, *kept)]:
                one_ahead = run(recomputing, cell)
                assert all(ours <= theirs for ours, theirs in zip(one_ahead.peak_bytes, at_arrival.peak_bytes))
                assert one_ahead.step_seconds <= at_arrival.step_seconds


def test_exempting_the_last_stage_takes_two_micro_batches_on_two_stages_from_22_percent_to_none():
    cell = Cell(2, 2, 0.0)
    schedule = one_f_one_b(2, 2)
    plain = run(schedule, cell)
    every_stage = run(greedy(schedule, cell), cell)
    but_the_last = run(greedy(schedule, cell, "last_stage"), cell)
    assert f"{every_stage.step_seconds / plain.step_seconds - 1:.0%}" == "22%"
    assert but_the_last.step_seconds == plain.step_seconds
    assert but_the_last.peak_bytes[-1] == plain.peak_bytes[-1] == cell.costs.saved_bytes  # one micro-batch either way


def test_eager_1f1b_with_recompute_beats_1f1b_without():
    costs, link = Block(1.0, 1.0, 1.0, 1.0, saved_bytes=20, boundary_bytes=1), 1.0  # A = 20 c
    plain = simulate(one_f_one_b(8, 32), costs, link)
    eager = simulate(early(eager_one_f_one_b(8, 32), "last_stage"), costs, link)
    assert (plain.step_seconds, max(plain.peak_bytes)) == (185.0, 8 * 20)
    assert (eager.step_seconds, max(eager.peak_bytes)) == (160.0, 1.7 * 20)
    assert f"{eager.step_seconds / plain.step_seconds:.3f}" == "0.865"


def test_early_blocks_hide_and_late_ones_save_memory():
    quarter = Block(0.25, 0.25, 0.25, 0.25, saved_bytes=0.25, boundary_bytes=BOUNDARY / 4)
    plain = one_f_one_b(4, 16)

    def timeline(count):
        choice = Choice((), tuple(range(4 - count, 4)), tuple(range(4 - count)))
        choices = {(stage, i): choice for stage in range(4) for i in range(16)}
        stages = Stage((quarter,) * 4)
        return simulate(quickest(plain, choices, stages), stages, 0.0, choices, exposed=False)

    steps, peaks = zip(*((step.step_seconds, step.peak_bytes[0]) for step in map(timeline, (1, 2, 3, 4))))
    assert list(steps) == sorted(steps, reverse=True)
    assert peaks == tuple(4 * BOUNDARY + (1 - BOUNDARY) * early / 4 for early in (1, 2, 3, 4))
    cell = Cell(4, 16, 0.0)
    assert steps[-1] == run(greedy(plain, cell), cell).step_seconds
