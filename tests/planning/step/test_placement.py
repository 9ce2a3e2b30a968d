"""Where recomputes stand."""
from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planning.policies import early, placed
from torchckpt.errors import ArgumentError
from torchckpt.planning import (
    Action,
    Block,
    Choice,
    Kind,
    Stage,
    State,
    ahead,
    arrival,
    dualpipe_v,
    exempt,
    first_blocks,
    fixed,
    gpipe,
    none,
    one_f_one_b,
    quickest,
    simulate,
    with_recompute,
    zbv,
    zero_bubble,
)
from torchckpt.planning.step.placement import without


def orders(schedule):
    return [" ".join(map(str, order)) for order in schedule.ranks]


def test_a_stage_without_blocks_may_have_an_r():
    """All of its no blocks are early. The step is that without the R."""
    plain, stages = one_f_one_b(2, 2), [Stage((Block(),) * 2), Stage((), after=fixed(1.0, 2.0))]
    choices = {(stage, i): State.EARLY for stage in (0, 1) for i in (0, 1)}
    schedule = with_recompute(plain, choices)
    assert orders(schedule)[1] == "1F0 1R0 1B0 1F1 1R1 1B1"
    expected = simulate(plain, stages, choices={(0, i): State.EARLY for i in (0, 1)})
    for given in (simulate(schedule, stages, choices=choices), simulate(schedule, stages)):
        assert (given.step_seconds, given.peak_bytes) == (expected.step_seconds, expected.peak_bytes)


def test_none():
    plain = one_f_one_b(2, 2)
    assert with_recompute(plain, none(plain)) is plain


def test_right_before_the_backward():
    plain = one_f_one_b(2, 2)
    assert orders(with_recompute(plain, ahead(plain))) == ["0F0 0F1 0R0 0B0 0R1 0B1", "1F0 1R0 1B0 1F1 1R1 1B1"]


def test_what_is_recomputed_at_arrival_has_no_place_in_the_order():
    plain = one_f_one_b(2, 2)
    assert with_recompute(plain, arrival(plain)) is plain
    at_arrival = simulate(plain, choices=arrival(plain))
    first = [str(event.action) for event in at_arrival.events if not event.rank]
    assert first == ["0F0", "0F1", "0R0", "0B0", "0R1", "0B1"]


def test_k_ahead_as_far_as_forwards_are_done():
    assert orders(early(one_f_one_b(2, 4), k=2)) == [
        "0F0 0F1 0R0 0R1 0B0 0F2 0R2 0B1 0F3 0R3 0B2 0B3",
        "1F0 1R0 1B0 1F1 1R1 1B1 1F2 1R2 1B2 1F3 1R3 1B3",
    ]


def test_split_backwards_recompute_before_the_input_gradients():
    assert orders(early(zero_bubble(1, 2))) == ["0F0 0R0 0I0 0W0 0F1 0R1 0I1 0W1"]


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        ((), ["0F0 0F1 0R0 0B0 0R1 0B1", "1F0 1F1 1R0 1B0 1R1 1B1"]),
        (["last_stage"], ["0F0 0F1 0R0 0B0 0R1 0B1", "1F0 1F1 1B0 1B1"]),
        (["last_micro_batch"], ["0F0 0F1 0R0 0B0 0B1", "1F0 1F1 1R0 1B0 1B1"]),
        (["first_backward"], ["0F0 0F1 0B0 0R1 0B1", "1F0 1F1 1B0 1R1 1B1"]),
        ([(1, 1), "first_backward"], ["0F0 0F1 0B0 0R1 0B1", "1F0 1F1 1B0 1B1"]),
        ({(0, 0), (1, 1)}, ["0F0 0F1 0B0 0R1 0B1", "1F0 1F1 1R0 1B0 1B1"]),
    ],
)
def test_what_is_exempt(kept, expected):
    assert orders(early(gpipe(2, 2), *kept)) == expected


def test_policies_are_choices():
    schedule = gpipe(2, 1)
    assert none(schedule) == {}
    assert arrival(schedule) == {(0, 0): State.LATE, (1, 0): State.LATE}
    assert ahead(schedule) == {(0, 0): State.EARLY, (1, 0): State.EARLY}
    assert exempt(schedule, ahead(schedule), "last_stage") == {(0, 0): State.EARLY}
    three = [Stage((Block(),) * 3)] * 2
    assert first_blocks(schedule, three, 2) == {(stage, 0): Choice((2,), (), (0, 1)) for stage in (0, 1)}


def test_only_visits_with_early_blocks_get_a_recompute():
    choices = {(0, 1): State.EARLY, (1, 0): State.LATE, (1, 1): Choice((0,), (1,))}
    assert orders(with_recompute(gpipe(2, 2), choices)) == ["0F0 0F1 0B0 0R1 0B1", "1F0 1F1 1B0 1R1 1B1"]


def test_with_costs_a_recompute_stands_where_its_rank_would_idle():
    assert orders(placed(one_f_one_b(3, 3), Block(), 1.0, "last_stage")) == [
        "0F0 0F1 0F2 0R0 0B0 0R1 0B1 0R2 0B2",
        "1F0 1F1 1R0 1B0 1F2 1R1 1B1 1R2 1B2",
        "2F0 2B0 2F1 2B1 2F2 2B2",
    ]


def test_greedy_does_not_idle_where_it_could_recompute():
    schedule = one_f_one_b(3, 6)
    fixed, greedy = early(schedule, "last_stage"), placed(schedule, Block(), 1.0, "last_stage")
    #                                                     1F3, 1F4 not there yet: 1R2, 1R3 first
    assert orders(fixed)[1] == "1F0 1F1 1R0 1B0 1F2 1R1 1B1 1F3 1R2 1B2 1F4 1R3 1B3 1F5 1R4 1B4 1R5 1B5"
    assert orders(greedy)[1] == "1F0 1F1 1R0 1B0 1F2 1R1 1B1 1R2 1F3 1B2 1R3 1F4 1B3 1F5 1R4 1B4 1R5 1B5"
    assert [simulate(order, link=1.0).step_seconds for order in (fixed, greedy)] == [35, 34]


def test_without_is_the_way_back():
    for schedule in [gpipe(2, 3), one_f_one_b(3, 6), zero_bubble(4, 8, chunks=2), zbv(3, 6), dualpipe_v(2, 4)]:
        for order in [early(schedule, k=3), placed(schedule, Block(), 0.5)]:
            assert without(order) == schedule


def test_a_place_of_your_own():
    order = tuple(from_text("0F0 0R0 0B0"))
    timeline = simulate(replace(gpipe(1, 1), ranks=(order,)))
    assert [event.action for event in timeline.events] == list(order)


def from_text(text):
    return [Action(int(word[0]), Kind(word[1]), int(word[2])) for word in text.split()]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda plain: early(plain, k=0), r"with_recompute\(\): k is not an integer >= 1\n.*k=0"),
        (lambda plain: early(plain, k=1.5), r"k is not an integer >= 1\n.*k=1\.5"),
        (lambda plain: early(plain, "last_stag"), r"one of last_stage, .*\n.*'last_stag'\n.*'last_stage'"),
        (lambda plain: early(plain, (2, 0)), r"exempt\(\): .*stages are 0 to 1, its micro-batches 0 to 2\n.*\(2, 0\)"),
        (lambda plain: early(plain, 7), r"its stages are 0 to 1, its micro-batches 0 to 2\n.*7"),
        (lambda plain: with_recompute(plain, {(0, 3): State.EARLY}), r"micro-batches 0 to 2\n.*\(0, 3\)"),
        (lambda plain: with_recompute(None, {}), r"the schedule is not a Schedule\n.*None"),
        (lambda plain: placed(plain, Block(-1), 0.0), r"not a finite number >= 0\n.*stages\.forward_seconds=-1"),
        (lambda plain: placed(plain, [Block()], 0.0), r"for each of the schedule's 2\n.*1 of 2"),
        (lambda plain: placed(plain, Block(), -2), r"quickest\(\): .*\n.*link\.latency_seconds=-2"),
        (lambda plain: simulate(misplaced(plain, 0)), r"rank 0, action 0: 0R0 stands before its forward"),
        (lambda plain: simulate(misplaced(plain, 6)), r"rank 0, action 6: 0R0 stands after its backward"),
    ],
)
def test_bad_calls(call, text):
    with pytest.raises(ArgumentError, match=text):
        call(gpipe(2, 3))


def misplaced(schedule, to):
    order = list(schedule.ranks[0])
    order.insert(to, Action(0, Kind.RECOMPUTE, 0))
    return replace(schedule, ranks=(tuple(order), *schedule.ranks[1:]))


def test_recomputing_twice():
    once = early(gpipe(2, 2))
    with pytest.raises(ArgumentError, match=r"the schedule has R already, and .* recomputed once\n.*'gpipe'"):
        quickest(once, ahead(once))
