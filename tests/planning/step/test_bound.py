"""The bound: its closed forms, what supplies free recomputation, and a brute-force twin that never beats it."""
from __future__ import annotations

import pytest

from tests.planning.brute_force import fastest
from tests.planning.closed_forms import CELLS, Cell
from tests.planning.policies import early
from tests.slow import few
from torchckpt.errors import ArgumentError
from torchckpt.planning import (
    Block,
    Stage,
    Supply,
    ahead,
    bound,
    exempt,
    gpipe,
    interleaved_one_f_one_b,
    none,
    one_f_one_b,
    simulate,
    zero_bubble,
)

every_cell = pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"p{cell.p}-m{cell.m}-tc{cell.tc}")


@few(8)
@every_cell
@pytest.mark.parametrize("kept", [(), ("last_stage",)], ids=["all", "but_last"])
def test_in_any_order(cell, kept):
    p, m = cell.p, cell.m
    found = bound(early(one_f_one_b(p, m), *kept), cell.costs, cell.link, any_order=True)
    hop = cell.tf + cell.tb + 2 * cell.tc
    recomputed = [0 if kept and j == p - 1 else m for j in range(p)]
    assert found.plain_seconds == cell.gpipe
    assert found.overhead_seconds == max(max(0, recomputed[j] * cell.tr - (p - 1 - j) * hop) for j in range(p))


@few(4)
@every_cell
def test_of_gpipe_is_reached(cell):
    schedule = early(gpipe(cell.p, cell.m))
    timeline = simulate(schedule, cell.costs, cell.link, exposed=False)
    assert bound(schedule, cell.costs, cell.link).step_seconds == timeline.step_seconds


@few(6)
@every_cell
def test_what_supplies_free_recomputation(cell):
    p, m = cell.p, cell.m
    schedule = early(one_f_one_b(p, m))
    in_order = bound(schedule, cell.costs, cell.link)
    for j, supply in enumerate(in_order.supplies):
        bubbles = (p - 1 - j) * (cell.tf + cell.tb)
        stalls = in_order.plain_seconds - (m * (cell.tf + cell.tb) + j * (cell.tf + cell.tb + 2 * cell.tc)) - bubbles
        assert supply.recompute_seconds == m * cell.tr
        assert supply.bubble_seconds == min(m * cell.tr, bubbles)
        assert supply.stall_seconds == min(m * cell.tr - supply.bubble_seconds, stalls)
        assert supply.collective_seconds == 0


@few(1)
@pytest.mark.parametrize(("p", "tr"), [(4, 1.5), (8, 1.75), (4, 1.25), (8, 2.0)])
def test_in_the_steady_state_it_is_free_if_and_only_if_it_fits_the_stalls_of_a_round(p, tr):
    cell = Cell(p, 0, 1.0, tr=tr)

    def overhead(m):
        schedule = early(one_f_one_b(p, m), "last_stage")
        return bound(schedule, cell.costs, cell.link).overhead_seconds

    is_free = tr <= 2 * cell.tc * (p - 1) / p
    assert (overhead(64 * p) == 0) is is_free
    assert (overhead(128 * p) > overhead(64 * p)) is not is_free


def test_collectives_are_the_third_source():
    costs = Stage((Block(),), collective_seconds=0.25)
    found = bound(early(gpipe(2, 8)), costs, 0.5)
    assert found.supplies == (Supply(0, 8.0, 3.0, 1.0, 2.0, 2.0), Supply(1, 8.0, 0.0, 0.0, 2.0, 6.0))
    assert found.overhead_seconds == 6.0
    assert found.step_seconds == found.plain_seconds + 6.0 == 34.0


def test_heterogeneous_stages():
    # Stage 1 is the slow one: it sets the step, and the others recompute beside it. 1F1B lets it idle once, for 1.
    costs = [Block(1, 1, 1, 1), Block(2, 2, 2, 2), Block(1, 1, 1, 1)]
    found = bound(early(one_f_one_b(3, 9)), costs)
    assert [supply.exposed_seconds for supply in found.supplies] == [0, 18 - 1, 0]
    assert found.plain_seconds == 1 + 9 * 6 + 1 + 2


def test_zero_bubble_uses_up_the_bubbles():
    in_turn, split = (bound(early(make(4, 16))) for make in (one_f_one_b, zero_bubble))
    assert [supply.bubble_seconds for supply in in_turn.supplies] == [9, 6, 3, 0]
    assert [supply.bubble_seconds for supply in split.supplies] == [3, 2, 1, 0]


def test_several_stages_a_rank():
    schedule = early(interleaved_one_f_one_b(2, 2, 4), "last_stage")
    found = bound(schedule, any_order=True)
    assert [supply.recompute_seconds for supply in found.supplies] == [8, 4]
    assert simulate(schedule).step_seconds >= found.step_seconds


def test_nothing_recomputed_nothing_exposed():
    found = bound(one_f_one_b(4, 8), Block(), 0.5, none(one_f_one_b(4, 8)))
    assert found.overhead_seconds == 0
    assert found.supplies == tuple(Supply(rank, 0, 0, 0, 0, 0) for rank in range(4))


COSTS = {
    "usual": ([Block()] * 2, 0.0),
    "messages": ([Block()] * 2, 1.0),
    "dear recompute": ([Block(1, 1, 1, 3)] * 2, 0.25),
    "slow first": ([Block(3, 2, 2, 2), Block(1, 1, 1, 1)], 0.5),
    "slow last": ([Block(1, 1, 1, 1), Block(3, 2, 4, 2)], 0.5),
}


@few(6)
@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("kept", [(), ("last_stage",)], ids=["all", "but_last"])
@pytest.mark.parametrize("m", [1, 2, 3])
def test_no_order_of_two_stages_beats_the_bound(name, split, kept, m):
    costs, tc = COSTS[name]
    make = zero_bubble if split else gpipe
    schedule = early(make(2, m), *kept)
    found = bound(schedule, costs, tc, any_order=True)
    recomputing = (True, not kept)
    best, best_plain = fastest(costs, tc, m, split, recomputing), fastest(costs, tc, m, split, (False, False))
    assert found.step_seconds <= best
    assert found.plain_seconds <= best_plain
    assert best <= simulate(schedule, costs, tc).step_seconds


def test_an_order_of_two_stages_reaches_the_bound():
    costs = [Block()] * 2
    schedule = early(gpipe(2, 3))
    assert fastest(costs, 0.0, 3, False, (True, True)) == bound(schedule, costs, any_order=True).step_seconds == 15


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: bound(gpipe(2, 2), [Block()]), r"bound\(\): stages is not a Stage .* the schedule's 2\n.*1 of 2"),
        (lambda: bound(gpipe(2, 2), Block(-1.0), -1), r"bound\(\): 2 faults"),
        (lambda: bound(gpipe(2, 2), Stage((), collective_seconds=-1.0)), r"stages\.collective_seconds=-1\.0"),
        (lambda: bound(gpipe(2, 2), choices=exempt(gpipe(1, 1), ahead(gpipe(3, 2)))), r"stages are 0 to 1"),
    ],
)
def test_errors(call, text):
    with pytest.raises(ArgumentError, match=text):
        call()
