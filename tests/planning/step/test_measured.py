"""A simulated step, written down as a clock would, comes back as it was."""
from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planning.policies import early, late, placed
from torchckpt.planning import (
    Action,
    Block,
    Choice,
    Kind,
    Link,
    Message,
    Stage,
    State,
    Step,
    dualpipe_v,
    gpipe,
    interleaved_one_f_one_b,
    looped_bfs,
    one_f_one_b,
    simulate,
    with_recompute,
    zbv,
    zero_bubble,
)
from torchckpt.planning.step.measured import (
    Span,
    measured_links,
    measured_seconds,
    measured_timeline,
    replays_apart,
)
from torchckpt.planning.step.placement import recomputed_early

F, B, I, W, R = Kind  # noqa: E741  # the letters of the notation

SIZES = Block(0.0, 0.0, 0.0, 0.0, saved_bytes=8, boundary_bytes=1)


def step_of(schedule, costs=SIZES, links=0.25, choices=None):
    """A step with these blocks, whose choices follow from the schedule's R if they are not given."""
    blocks = [costs] * schedule.stages if isinstance(costs, Block) else costs
    links = [Link(links)] * (schedule.stages - 1) if isinstance(links, float) else links
    choices = dict.fromkeys(recomputed_early(schedule), State.EARLY) if choices is None else choices
    return Step(schedule, tuple(Stage((block,)) for block in blocks), tuple(links), choices)


def seconds_of(blocks):
    return tuple(Block(*(getattr(block, name) for name in TIMES), saved_bytes=0.0) for block in blocks)


def costs_of(stages):
    """Of every stage its own, exact in binary."""
    times = [(1 + stage / 4, 1.5 + stage / 8, 0.5 + stage / 4, 1.25 + stage / 2) for stage in range(stages)]
    return [replace(SIZES, **dict(zip(TIMES, own))) for own in times]


TIMES = ("forward_seconds", "input_grad_seconds", "weight_grad_seconds", "recompute_seconds")


def whole(costs):
    """As a clock sees them that only sees whole backwards."""
    halves = [(own.input_grad_seconds + own.weight_grad_seconds) / 2 for own in costs]
    return tuple(
        replace(own, input_grad_seconds=half, weight_grad_seconds=half) for own, half in zip(costs, halves)
    )


def spans_of(timeline, begin=0.0):
    """What a rank asks for next, it asks for when it is done with what it did."""
    step, asked = [[] for _ in timeline.schedule.ranks], [begin] * len(timeline.schedule.ranks)
    for event in timeline.events:
        start, end = begin + event.start_seconds, begin + event.end_seconds
        step[event.rank].append(Span(event.action, asked[event.rank], start, end))
        asked[event.rank] = end
    return step


def ran(schedule, costs, latency=0.25, begin=0.0):
    return spans_of(simulate(schedule, costs, latency, exposed=False), begin)


def span(text, asked, start, end):
    stage, letter, i = text
    return Span(Action(int(stage), Kind(letter), int(i)), asked, start, end)


# costs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("latency", [0.0, 0.25])
@pytest.mark.parametrize(
    "schedule",
    [gpipe(3, 4), one_f_one_b(4, 8), interleaved_one_f_one_b(2, 2, 4), looped_bfs(2, 2, 4)],
    ids=lambda schedule: schedule.name,
)
def test_whole_backwards(schedule, latency):
    costs = costs_of(schedule.stages)
    for order in [early(schedule), early(schedule, "first_backward"), placed(schedule, costs, latency)]:
        step, measured = step_of(order), [ran(order, costs, latency)]
        assert measured_seconds(step, measured) == seconds_of(whole(costs))
        assert measured_links(step, measured) == (Link(latency),) * (schedule.stages - 1)


@pytest.mark.parametrize("schedule", [zero_bubble(3, 6), zero_bubble(2, 4, chunks=2)], ids=["zero_bubble", "chunks"])
def test_split_backwards(schedule):
    costs = costs_of(schedule.stages)
    step, measured = step_of(early(schedule)), [ran(early(schedule), costs)]
    assert measured_seconds(step, measured) == seconds_of(costs)
    assert measured_links(step, measured) == (Link(0.25),) * (schedule.stages - 1)


@pytest.mark.parametrize("schedule", [zbv(3, 6), dualpipe_v(2, 6)], ids=["zbv", "dualpipe_v"])
def test_folded_stages_have_no_link_where_two_neighbours_are_on_one_rank(schedule):
    costs, middle = costs_of(schedule.stages), len(schedule.ranks) - 1
    step, measured = step_of(early(schedule)), [ran(early(schedule), costs)]
    assert measured_seconds(step, measured) == seconds_of(costs)
    links = measured_links(step, measured)
    assert links == tuple(Link(0.0 if boundary == middle else 0.25) for boundary in range(schedule.stages - 1))


@pytest.mark.parametrize(("count", "total"), [(1, 4), (3, 4), (4, 4)])
def test_early_and_late_replays_count_together_and_are_no_backward(count, total):
    for schedule in [one_f_one_b(2, 4), zero_bubble(2, 4)]:
        costs, parts = costs_of(2), tuple(range(total))
        choice = Choice((), parts[total - count :], parts[: total - count])
        shares = [replace(own, **{name: getattr(own, name) / total for name in TIMES}) for own in costs]
        stages = [Stage((block,) * total) for block in shares]
        choices = {(stage, i): choice for stage in range(2) for i in range(4)}
        timeline = simulate(schedule, stages, 0.25, choices, exposed=False)
        found = measured_seconds(step_of(schedule), [spans_of(timeline)])
        assert found == seconds_of(whole(costs) if schedule.name == "1f1b" else costs)


def test_a_stage_that_is_never_recomputed_would_take_as_long_as_its_forward():
    costs, schedule = costs_of(3), early(one_f_one_b(3, 3), "last_stage")
    found = measured_seconds(step_of(schedule), [ran(schedule, costs)])
    assert [own.recompute_seconds for own in found] == [1.25, 1.75, costs[2].forward_seconds]


def test_medians_of_several_steps():
    schedule, costs = early(one_f_one_b(2, 2)), costs_of(2)
    slow = [replace(own, forward_seconds=100.0, recompute_seconds=200.0) for own in costs]
    steps = [ran(schedule, own, begin=1000.0 * number) for number, own in enumerate([slow, costs, costs])]
    assert measured_seconds(step_of(schedule), steps) == seconds_of(whole(costs))
    assert measured_links(step_of(schedule), steps) == (Link(0.25),)


def test_nothing_measured_costs_nothing():
    assert measured_seconds(step_of(gpipe(2, 1)), []) == seconds_of([SIZES] * 2)
    assert measured_links(step_of(gpipe(2, 1)), []) == (Link(0.0),)
    assert measured_links(step_of(gpipe(1, 1)), [ran(gpipe(1, 1), costs_of(1))]) == ()


# links ----------------------------------------------------------------------------------------------------------------


def links_of(*messages):
    """Of two stages, whose messages are (when sent, asked for, there)."""
    senders = [span(f"0F{i}", 0, 0, sent) for i, (sent, _, _) in enumerate(messages)]
    receivers = [span(f"1F{i}", asked, there, 99) for i, (_, asked, there) in enumerate(messages)]
    return measured_links(step_of(gpipe(2, len(messages))), [[senders, receivers]])


def test_a_link_takes_as_long_as_the_fastest_quarter_of_what_was_waited_for():
    assert links_of((10, 0, 17)) == (Link(7),)
    assert links_of((10, 0, 15), (10, 0, 12), (10, 0, 13), (10, 0, 14)) == (Link(3),)
    assert links_of((10, 0, 15), (10, 20, 20)) == (Link(5),)  # the second was there, who knows since when


def test_of_messages_that_nobody_waited_for_the_fastest_took_no_longer_than_it_seems():
    assert links_of((10, 20, 20), (30, 33, 33), (40, 41, 44)) == (Link(3),)
    assert links_of((10, 10, 10)) == (Link(0),)


def test_a_link_that_nobody_waited_for_is_no_slower_than_the_others():
    def found(seconds):
        rows = ["0F0", 0, 0, 10], ["1F0", 0, 10 + seconds, 30], ["2F0", 40, 40, 50]
        step = [[span(*row)] for row in rows]
        return measured_links(step_of(gpipe(3, 2)), [step])

    assert found(3) == (Link(3), Link(3))  # 2F0 was there 10 after it was sent, or sooner
    assert found(15) == (Link(15), Link(10))


def test_clocks_that_disagree_do_not_make_a_link_faster_than_nothing():
    assert links_of((10, 0, 9)) == (Link(0),)


# timeline -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("begin", [0.0, 4096.0])
@pytest.mark.parametrize(
    "schedule",
    [gpipe(3, 4), one_f_one_b(4, 8), interleaved_one_f_one_b(2, 2, 4), zero_bubble(3, 6), zbv(2, 4), dualpipe_v(2, 4)],
    ids=lambda schedule: schedule.name,
)
def test_a_timeline_comes_back(schedule, begin):
    costs = [replace(own, boundary_bytes=0.25) for own in costs_of(schedule.stages)]
    links = [Link(0.125 * (boundary % 3)) for boundary in range(schedule.stages - 1)]
    for order, choices in [(early(schedule, "last_stage"), None), (schedule, late(schedule))]:
        simulated = simulate(order, costs, links, choices, exposed=False)
        found = measured_timeline(step_of(order, costs, links, choices), spans_of(simulated, begin))
        assert found.schedule is simulated.schedule
        assert found.events == simulated.events
        assert found.memory == simulated.memory
        assert found.peak_bytes == simulated.peak_bytes
        assert found.step_seconds == simulated.step_seconds
        assert found.idle_share == simulated.idle_share
        assert [(message.action, message.to_stage) for message in found.messages] == [
            (message.action, message.to_stage) for message in simulated.messages
        ]
        assert (found.exposed_seconds, found.critical_path) == ((), ())


def test_messages_come_back_where_none_waits_for_its_wire():
    costs, links = costs_of(4), [Link(0.125), Link(0.25), Link(0.125, bandwidth=8.0)]
    for schedule in [one_f_one_b(4, 8), gpipe(4, 4)]:
        simulated = simulate(early(schedule), costs, links, exposed=False)
        step = step_of(simulated.schedule, costs, links)
        assert measured_timeline(step, spans_of(simulated)).messages == simulated.messages


def message_of(sent, asked, there, latency):
    first = [span("0F0", 0, 0, sent), span("0B0", 99, 99, 100)]
    last = [span("1F0", asked, there, 50), span("1B0", 50, 50, 99)]
    timeline = measured_timeline(step_of(gpipe(2, 1), links=[Link(latency)]), [first, last])
    assert timeline.messages[1] == Message(Action(1, B, 0), 0, 99, 99)
    return timeline.messages[0]


@pytest.mark.parametrize(
    ("sent", "asked", "there", "latency", "arrived"),
    [
        (10, 0, 17, 2, 17),  # waited for: it was slow
        (10, 20, 20, 2, 12),  # not waited for: as its link
        (10, 11, 11, 2, 11),  # but no later than its receiver went on
        (10, 0, 9, 2, 10),  # nor before it was sent, whatever the clocks say
        (10, 10, 10, 0, 10),
    ],
)
def test_when_a_message_arrived(sent, asked, there, latency, arrived):
    assert message_of(sent, asked, there, latency) == Message(Action(0, F, 0), 1, sent, arrived)


def test_time_begins_with_the_first_action_of_any_rank():
    first = [span("0F0", 90, 103, 105), span("0B0", 105, 112, 114)]
    last = [span("1F0", 80, 106, 108), span("1B0", 108, 108, 111)]
    timeline = measured_timeline(step_of(gpipe(2, 1), links=[Link(1)]), [first, last])
    assert [(event.rank, str(event.action), event.start_seconds, event.end_seconds) for event in timeline.events] == [
        (0, "0F0", 0, 2),
        (0, "0B0", 9, 11),
        (1, "1F0", 3, 5),
        (1, "1B0", 5, 8),
    ]
    assert timeline.messages == (Message(Action(0, F, 0), 1, 2, 3), Message(Action(1, B, 0), 0, 8, 9))
    assert timeline.memory[1] == ((0.0, 0.0), (3, 8), (8, 0))


def test_a_step_of_nothing():
    schedule = replace(gpipe(2, 1), ranks=((), ()))
    timeline = measured_timeline(step_of(schedule), [[], []])
    assert (timeline.events, timeline.messages, timeline.step_seconds) == ((), (), 0.0)


def test_what_was_replayed_inside_a_backward_stands_before_it_as_a_recompute():
    spans = [span("0F0", 0.0, 0.0, 1.0), span("0R0", 1.0, 1.0, 1.5), span("0B0", 1.5, 2.0, 5.0), span("0B1", 5, 5, 7)]
    assert replays_apart(spans, {(0, 0): 1.5}) == [
        span("0F0", 0.0, 0.0, 1.0),
        span("0R0", 1.0, 1.0, 1.5),
        span("0R0", 1.5, 2.0, 3.5),
        span("0B0", 3.5, 3.5, 5.0),
        span("0B1", 5, 5, 7),
    ]


def test_recompute_at_arrival_waits_for_the_gradient():
    schedule, costs = one_f_one_b(2, 4), costs_of(2)
    choices = late(schedule)
    simulated = simulate(schedule, costs, 0.25, choices)
    step, measured = step_of(schedule, costs, choices=choices), spans_of(simulated)
    assert measured_seconds(step, [measured]) == seconds_of(whole(costs))
    assert measured_links(step, [measured]) == (Link(0.25),)
    assert measured_timeline(step, measured).messages == simulated.messages


def test_a_late_replay_that_nothing_asked_for_takes_no_time():
    """As of a stage that saves nothing."""
    schedule = gpipe(1, 2)
    step = step_of(schedule, choices={(0, 0): State.LATE, (0, 1): State.LATE})
    (spans,) = spans_of(step.timeline)
    timeline = measured_timeline(step, [[span for span in spans if span.action.kind is not Kind.RECOMPUTE]])
    assert len(timeline.events) == 4


def test_a_late_replay_that_nothing_asked_for_takes_no_time_beside_an_early_one():
    """As of a stage whose first regions are frozen."""
    schedule, visits = gpipe(1, 2), [(0, 0), (0, 1)]
    schedule = with_recompute(schedule, dict.fromkeys(visits, State.EARLY))
    step = Step(schedule, (Stage((SIZES, SIZES)),), (), dict.fromkeys(visits, Choice(early=(1,), late=(0,))))
    spans = [span(str(action), *[float(time)] * 3) for time, action in enumerate(schedule.ranks[0])]
    assert len(measured_timeline(step, [spans]).events) == len(spans) == 6
