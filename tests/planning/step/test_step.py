"""The simulator on steps small enough to follow by hand."""
from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.planning.policies import early, late
from torchckpt.errors import ArgumentError
from torchckpt.planning import (
    Action,
    Block,
    Choice,
    Event,
    Kind,
    Link,
    Stage,
    State,
    Step,
    fixed,
    from_csv,
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
    simulate,
    zero_bubble,
)

COSTS = Block(1.0, 1.0, 1.0, 1.0, saved_bytes=10, boundary_bytes=1)


def events(timeline, rank=0):
    return [f"{e.action} {e.start_seconds:g}-{e.end_seconds:g}" for e in timeline.events if e.rank == rank]


def messages(timeline):
    return [f"{m.action}>{m.to_stage} {m.sent_seconds:g}-{m.arrived_seconds:g}" for m in timeline.messages]


def path(timeline):
    return [
        str(entry.action) if isinstance(entry, Event) else f"{entry.action}>{entry.to_stage}"
        for entry in timeline.critical_path
    ]


def test_two_stages_two_micro_batches():
    timeline = simulate(one_f_one_b(2, 2), COSTS, Link(0.5))
    assert events(timeline, 0) == ["0F0 0-1", "0F1 1-2", "0B0 5-7", "0B1 8-10"]
    assert events(timeline, 1) == ["1F0 1.5-2.5", "1B0 2.5-4.5", "1F1 4.5-5.5", "1B1 5.5-7.5"]
    assert messages(timeline) == ["0F0>1 1-1.5", "0F1>1 2-2.5", "1B0>0 4.5-5", "1B1>0 7.5-8"]
    assert timeline.step_seconds == 10
    assert timeline.idle_share == (0.4, 0.4)
    assert path(timeline) == ["0F0", "0F0>1", "1F0", "1B0", "1F1", "1B1", "1B1>0", "0B1"]


def test_at_arrival_a_recompute_waits_for_the_gradient_and_ahead_it_does_not():
    schedule = one_f_one_b(2, 2)
    at_arrival = simulate(schedule, COSTS, Link(0.5), late(schedule, "last_stage"))
    assert events(at_arrival) == ["0F0 0-1", "0F1 1-2", "0R0 5-6", "0B0 6-8", "0R1 8-9", "0B1 9-11"]
    one_ahead = simulate(early(schedule, "last_stage"), COSTS, Link(0.5))
    assert events(one_ahead) == ["0F0 0-1", "0F1 1-2", "0R0 2-3", "0B0 5-7", "0R1 7-8", "0B1 8-10"]
    assert at_arrival.exposed_seconds == (1.0, 0.0)
    assert one_ahead.exposed_seconds == (0.0, 0.0)


def test_messages_queue_for_their_wire_and_the_critical_path_goes_through_the_queue():
    timeline = simulate(gpipe(2, 3), COSTS, Link(2.5))
    assert messages(timeline)[:3] == ["0F0>1 1-3.5", "0F1>1 3.5-6", "0F2>1 6-8.5"]
    assert path(timeline)[:6] == ["0F0", "0F0>1", "0F1>1", "0F2>1", "1F2", "1B0"]


def test_both_directions_of_a_link_at_once():
    timeline = simulate(one_f_one_b(2, 2), COSTS, Link(2.0))
    forth, back = timeline.messages[1], timeline.messages[2]
    assert (str(forth.action), str(back.action)) == ("0F1", "1B0")
    assert forth.sent_seconds < back.arrived_seconds


def test_a_message_takes_its_latency_and_the_time_of_its_bytes():
    costs = [replace(COSTS, boundary_bytes=size) for size in (10, 6, 9)]
    links = [Link(0.5, bandwidth=2.0), Link(0.0, bandwidth=3.0)]
    timeline = simulate(gpipe(3, 1), costs, links)
    assert messages(timeline) == ["0F0>1 1-4.5", "1F0>2 5.5-8.5", "1B0>0 16.5-20", "2B0>1 11.5-14.5"]


def test_stages_on_one_rank_send_nothing():
    timeline = simulate(from_csv("0F0,1F0,1B0,0B0"), COSTS, Link(5.0))
    assert timeline.messages == ()
    assert timeline.step_seconds == 6


def test_stages_of_one_pair_of_ranks_share_their_wire():
    # 1F0 hands on to 2F0 over the wire from rank 1 to rank 0, and so does the gradient of stage 1.
    timeline = simulate(interleaved_one_f_one_b(2, 2, 2), COSTS, Link(1.0))
    up = [m for m in timeline.messages if m.action.stage % 2 == 1]
    assert {(m.action.stage, m.to_stage) for m in up} == {(1, 2), (1, 0), (3, 2)}
    times = sorted((m.sent_seconds, m.arrived_seconds) for m in up)
    assert all(before[1] <= after[0] for before, after in pairwise(times))


def test_heterogeneous_stages():
    timeline = simulate(gpipe(2, 1), [Block(1, 2, 3), Block(10, 20, 30)])
    assert events(timeline, 0) == ["0F0 0-1", "0B0 61-66"]
    assert events(timeline, 1) == ["1F0 1-11", "1B0 11-61"]


def test_split_backwards():
    timeline = simulate(from_csv("0F0,0I0,0W0\n1F0,1I0,1W0"), Block(1, 2, 4))
    assert events(timeline, 0) == ["0F0 0-1", "0I0 4-6", "0W0 6-10"]
    assert events(timeline, 1) == ["1F0 1-2", "1I0 2-4", "1W0 4-8"]


def test_memory_of_kept_and_recomputed_micro_batches():
    #                F0          F1           R0           B0 ends      B1 ends
    curve = ((0.0, 0.0), (0.0, 1.0), (1.0, 11.0), (2.0, 20.0), (5.0, 10.0), (7.0, 0.0))
    timeline = simulate(gpipe(1, 2), COSTS, choices={(0, 0): State.EARLY})
    assert timeline.memory == (curve,)
    assert timeline.peak_bytes == (20.0,)


QUARTERS = Stage((Block(0.25, 0.25, 0.25, 0.25, saved_bytes=2.5, boundary_bytes=0.25),) * 4)
LAST_EARLY = {(0, 0): Choice((), (3,), (0, 1, 2))}


def test_of_a_split_backward_the_weights_free_everything():
    kept = simulate(from_csv("0F0,0I0,0W0"), COSTS)
    assert kept.memory == (((0.0, 0.0), (0.0, 10.0), (3.0, 0.0)),)
    partly = simulate(from_csv("0F0,0I0,0W0"), QUARTERS, choices=LAST_EARLY)
    #                                           F           R, a quarter   I, the rest   W ends
    assert partly.memory == (((0.0, 0.0), (0.0, 1.0), (1.0, 3.25), (1.25, 10.0), (4.0, 0.0)),)


def test_late_blocks_are_recomputed_when_the_gradient_is_there_in_memory_that_others_have_freed():
    timeline = simulate(gpipe(1, 1), QUARTERS, choices=LAST_EARLY)
    assert events(timeline) == ["0F0 0-1", "0R0 1-1.25", "0R0 1.25-2", "0B0 2-4"]
    assert timeline.memory == (((0.0, 0.0), (0.0, 1.0), (1.0, 3.25), (4.0, 0.0)),)
    assert timeline.exposed_seconds == (1.0,)


def test_bytes_follow_from_the_order():
    step = Step(early(gpipe(1, 2)), (Stage((COSTS,)),), (), {(0, 0): State.EARLY, (0, 1): State.EARLY})
    assert [tuple(level)[:2] for level in step.levels(0)] == [(1, 1), (2, 2), (11, 11), (11, 1), (10, 10), (10, 0)]
    assert step.peak_bytes == step.timeline.peak_bytes == (11,)


def test_what_is_fixed_is_never_recomputed():
    stage = Stage((COSTS,), before=fixed(2.0, saved_bytes=5.0), after=fixed(0.0, 1.0, saved_bytes=3.0))
    timeline = simulate(gpipe(1, 1), stage, choices=late(gpipe(1, 1)))
    assert events(timeline) == ["0F0 0-3", "0R0 3-4", "0B0 4-7"]
    assert timeline.memory == (((0.0, 0.0), (0.0, 9.0), (3.0, 15.0), (7.0, 0.0)),)


def test_static_bytes_of_all_stages_of_a_rank():
    stages = tuple(Stage((replace(COSTS, static_bytes=100 * 10**stage),)) for stage in range(4))
    step = Step(interleaved_one_f_one_b(2, 2, 2), stages, (Link(),) * 3)
    assert step.static_bytes == (10_100.0, 101_000.0)
    assert step.timeline.memory[0][0] == (0.0, 0.0)  # and no peak counts them


def test_exposed_is_what_the_step_loses_without_the_recompute_of_that_stage():
    schedule = early(one_f_one_b(4, 8))
    timeline = simulate(schedule, COSTS)
    for stage in range(4):
        costs = [COSTS] * 4
        costs[stage] = replace(COSTS, recompute_seconds=0.0)
        assert timeline.exposed_seconds[stage] == timeline.step_seconds - simulate(schedule, costs).step_seconds
    assert simulate(schedule, COSTS, exposed=False).exposed_seconds == ()
    assert simulate(one_f_one_b(4, 8), COSTS).exposed_seconds == (0.0,) * 4


def test_events_are_in_the_order_of_ranks_and_actions():
    schedule = early(zero_bubble(3, 6))
    timeline = simulate(schedule, COSTS, Link(0.25))
    assert [event.action for event in timeline.events] == [action for order in schedule.ranks for action in order]
    assert timeline.schedule is schedule


def test_one_action_that_costs_nothing():
    timeline = simulate(gpipe(1, 1), Block(0, 0, 0, 0, 0))
    assert timeline.step_seconds == 0
    assert timeline.idle_share == (0.0,)


@pytest.mark.parametrize(
    ("costs", "link", "text"),
    [
        (replace(COSTS, forward_seconds=-1.0), Link(), r"not a finite number >= 0\n.*stages\.forward_seconds=-1\.0"),
        (replace(COSTS, saved_bytes=math.nan), Link(), r"not a finite number >= 0\n.*stages\.saved_bytes=nan"),
        (replace(COSTS, static_bytes=math.inf), Link(), r"not a finite number >= 0\n.*stages\.static_bytes=inf"),
        (replace(COSTS, recompute_seconds="1"), Link(), r"not a finite number >= 0\n.*stages\.recompute_seconds='1'"),
        ([COSTS, replace(COSTS, boundary_bytes=None)], Link(), r"finite number.*\n.*stages\[1\]\.boundary_bytes=None"),
        (replace(COSTS, boundary_bytes=20), Link(), r"a block saves less than its boundary\n.*boundary_bytes=20"),
        ([COSTS], Link(), r"stages is not a Stage or a Block, or a list with one for each.* 2\n.*1 of 2"),
        ([COSTS, 3.0], Link(), r"stages is not a Stage or a Block.*\n.*stages\[1\]=3\.0"),
        (1.0, Link(), r"stages is not a Stage or a Block.*\n.*stages=1\.0"),
        (Stage((COSTS,), after=COSTS), Link(), r"not made by fixed\(\)\n.*stages\.after=Block"),
        (COSTS, Link(-1.0), r"not a finite number >= 0\n.*link\.latency_seconds=-1\.0"),
        (COSTS, -1, r"not a finite number >= 0\n.*link\.latency_seconds=-1"),
        (COSTS, [Link(0.0, 0.0)], r"a bandwidth is not a number of .*, above 0\n.*link\[0\]\.bandwidth=0\.0"),
        (COSTS, Link(bandwidth=math.nan), r"a bandwidth is .*\n.*link\.bandwidth=nan"),
        (COSTS, [], r"link is not one Link, or one for each of 1 pairs of neighbouring stages\n.*0 of 1"),
        (COSTS, "fast", r"link is not one Link, or one for each of 1 pairs.*\n.*link='fast'"),
        (replace(COSTS, forward_seconds=-1, weight_grad_seconds=math.nan), Link(True), r"simulate\(\): 3 faults"),
    ],
)
def test_bad_costs_and_links(costs, link, text):
    with pytest.raises(ArgumentError, match=text):
        simulate(gpipe(2, 2), costs, link)


def test_a_schedule_that_cannot_run():
    schedule = gpipe(2, 1)
    swapped = replace(schedule, ranks=(schedule.ranks[0][::-1], schedule.ranks[1]))
    with pytest.raises(ArgumentError, match=r"simulate\(\): rank 0, action 0: 0B0 stands before its forward"):
        simulate(swapped)


def test_ranks_that_wait_for_each_other():
    f0, f1, b0, b1 = (Action(0, kind, i) for kind in (Kind.FORWARD, Kind.BACKWARD) for i in (0, 1))
    first, last = (f0, b0, f1, b1), (f1, f0, b0, b1)
    schedule = replace(gpipe(2, 2), ranks=(first, tuple(action._replace(stage=1) for action in last)))
    with pytest.raises(ArgumentError, match=r"rank 0, action 1: ranks wait for each other: a deadlock"):
        simulate(schedule)


@pytest.mark.parametrize(
    ("choices", "text"),
    [
        (7, r"choices is not a mapping of each \(stage, micro-batch\) to what .*\n.*7\n.*ahead\(schedule\)"),
        ({(2, 0): State.LATE}, r"its stages are 0 to 1, its micro-batches 0 to 1\n.*\(2, 0\)"),
        ({(0, 0): "late"}, r"a choice does not give each of the 1 blocks of stage 0 one state\n.*'late'"),
        ({(0, 0): Choice((0,), (0,))}, r"a choice does not give each of the 1 blocks of stage 0 one state\n.*Choice"),
        ({(0, 0): Choice((), (), (0, 1))}, r"a choice does not give each of the 1 blocks of stage 0 one state"),
    ],
)
def test_bad_choices(choices, text):
    with pytest.raises(ArgumentError, match=text):
        simulate(gpipe(2, 2), choices=choices)


def test_choices_that_contradict_the_recomputes_of_the_schedule():
    with pytest.raises(ArgumentError, match=r"R without early blocks, or early .*\n.*0R0, and no early"):
        simulate(early(gpipe(1, 1)), choices={(0, 0): State.LATE})
    with pytest.raises(ArgumentError, match=r"early blocks of \(0, 0\), and no 0R0"):
        simulate(early(gpipe(1, 2), (0, 0)), choices={(0, 0): State.EARLY, (0, 1): State.EARLY})
