"""The record of a rank's steps, and all ranks' put together: replicas, other hosts' clocks, sizes."""
from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from torchckpt.distributed import meeting as module
from torchckpt.distributed.meeting import combined, gather, larger_level, larger_stage
from torchckpt.measuring.record import KEPT_STEPS, Record
from torchckpt.planning import Action, Block, Choice, Kind, Stage, ahead, fixed, gpipe, with_recompute
from torchckpt.planning.step.measured import Span
from torchckpt.planning.step.memory import Level, Piece
from torchckpt.regions.core.frame import Frame
from torchckpt.regions.core.options import Options

F, B = Kind.FORWARD, Kind.BACKWARD


class Stopped:
    """A clock that says what it is options."""

    def __init__(self) -> None:
        self.time = 0.0

    def stamp(self):
        return self.time

    def reader(self):
        return float


@pytest.fixture
def record():
    made = Record(torch.device("cpu"))
    made._clock = Stopped()
    return made


def run(record, *actions):
    """A step of actions that are asked for at 0, 10, ..., begin 2 later, and take 3."""
    record.begin()
    for number, action in enumerate(actions):
        record._clock.time = 10.0 * number
        record.awaits()
        record._clock.time += 2
        start = record.now()
        record._clock.time += 3
        record.ended(action, start)
    record.end()


def test_spans_are_when_an_action_was_due_and_began_and_ended(record):
    run(record, Action(0, F, 0), Action(0, B, 0))
    assert record.spans() == [[Span(Action(0, F, 0), 0.0, 2.0, 5.0), Span(Action(0, B, 0), 10.0, 12.0, 15.0)]]


def test_second_half_of_a_pair_is_due_when_the_first_ends(record):
    record.begin()
    record.awaits()
    for number in range(2):
        start = record.now()
        record._clock.time += 4
        record.ended(Action(0, F, number), start)
    record.end()
    assert record.spans() == [[Span(Action(0, F, 0), 0.0, 0.0, 4.0), Span(Action(0, F, 1), 4.0, 4.0, 8.0)]]


def test_step_that_does_not_end_is_none(record):
    run(record, Action(0, F, 0))
    record.begin()
    record.ended(Action(0, F, 1), record.now())
    assert len(record.steps) == 1
    run(record, Action(0, F, 2))
    assert [[span.action.micro_batch for span in step] for step in record.spans()] == [[0], [2]]


def test_last_steps_are_remembered(record):
    for number in range(KEPT_STEPS + 2):
        run(record, Action(0, F, number))
    assert len(record.steps) == KEPT_STEPS
    assert [step[0].action.micro_batch for step in record.spans()] == list(range(2, KEPT_STEPS + 2))
    record.steps.clear()
    assert len(record.steps) == 0
    assert record.spans() == []


@pytest.mark.parametrize(("early", "regions"), [(True, {0: 2.0, 1: 4.0}), (False, {1: 4.0})])
def test_replays_of_regions_are_medians_without_the_first_step(record, early, regions):
    """Those inside of an action that recomputes are noted where that is asked for."""
    record.times_early_replays = early
    for seconds in (9.0, 2.0, 1.0, 7.0):
        record.begin()
        with record.recomputing(Action(3, Kind.RECOMPUTE, 0)), record.replaying((3, 0), 0):
            record._clock.time += seconds
        with record.replaying((3, 0), 1):
            record._clock.time += 2 * seconds
        record.end()
    assert record.replay_seconds() == {3: regions}


def test_a_replay_takes_no_time_for_what_it_need_not_run(record):
    frame, told = Frame(Options()), []
    frame.tail = partial(told.append, "tail")
    record.begin()
    start = record.awaits()
    with record.replaying((3, 0), 1, frame):
        record._clock.time += 2.0
        frame.tail()
        record._clock.time += 5.0
    record._clock.time += 4.0
    record.ended(Action(3, Kind.BACKWARD, 0), start)
    record.end()
    assert told == ["tail"]
    assert record.replay_seconds() == {3: {1: 2.0}}
    spans = [(span.action.kind, span.end_seconds - span.start_seconds) for span in record.spans()[0]]
    assert spans == [(Kind.RECOMPUTE, 2.0), (Kind.BACKWARD, 4.0)]


# all ranks ------------------------------------------------------------------------------------------------------------


def span(action, start, end):
    return Span(action, start, start, end)


def step_of(rank, begin=0.0, pace=1):
    """A step of the pipeline of two stages and one micro-batch that takes nine seconds."""
    times = {0: [(0, 1), (6, 9)], 1: [(2, 3), (3, 5)]}[rank]
    moments = [(begin + pace * start, begin + pace * end) for start, end in times]
    return [span(Action(rank, kind, 0), start, end) for kind, (start, end) in zip((F, B), moments)]


def gathered(monkeypatch, said, schedule=None, segments=None):
    """``gather()`` where the processes say ``said``."""

    def all_gather(mine, group):
        assert mine[2:] == (0, record.spans(), {})
        return said

    record = Record(torch.device("cpu"))
    monkeypatch.setattr(module.dist, "barrier", lambda group: None)
    monkeypatch.setattr(module, "all_gather", all_gather)
    return gather(schedule or gpipe(2, 1), (), segments, 0, record, {}, None)


def events(step):
    return [[(str(span.action), span.start_seconds, span.end_seconds) for span in spans] for spans in step]


TWO_RANKS = [[("0F0", 0.0, 1.0), ("0B0", 6.0, 9.0)], [("1F0", 2.0, 3.0), ("1B0", 3.0, 5.0)]]


def test_ranks_are_put_together(monkeypatch):
    said = [("host", 50.0, 1, [step_of(1)], {}), ("host", 50.0, 0, [step_of(0)], {})]
    found = gathered(monkeypatch, said)
    assert [events(step) for step in found.spans] == [TWO_RANKS]
    assert [one.forward_seconds for one in found.step.stages] == [1.0, 1.0]
    assert [one.input_grad_seconds + one.weight_grad_seconds for one in found.step.stages] == [3.0, 2.0]
    assert found.step.schedule == gpipe(2, 1)


def test_clocks_of_other_hosts_are_compared_after_the_barrier(monkeypatch):
    """The second host's is 1000 s ahead; that of a process on the first one differs by when it was asked only."""
    said = [("one", 50.0, 0, [step_of(0)], {}), ("other", 1050.0, 1, [step_of(1, 1000.0)], {})]
    assert [events(step) for step in gathered(monkeypatch, said).spans] == [TWO_RANKS]
    said = [("one", 50.0, 0, [step_of(0)], {}), ("one", 57.0, 1, [step_of(1)], {})]
    assert [events(step) for step in gathered(monkeypatch, said).spans] == [TWO_RANKS]


def test_replicas_are_further_steps_and_the_first_is_first(monkeypatch):
    said = [("host", 0.0, rank, [step_of(rank, begin)], {}) for begin in (0.0, 100.0) for rank in range(2)]
    starts = [step[0][0].start_seconds for step in gathered(monkeypatch, said).spans]
    assert starts == [0.0, 100.0]


def test_first_step_is_warm_up_for_the_costs(monkeypatch):
    said = [("host", 0.0, rank, [step_of(rank, pace=7), step_of(rank)], {}) for rank in range(2)]
    found = gathered(monkeypatch, said)
    assert len(found.spans) == 2
    assert [one.forward_seconds for one in found.step.stages] == [1.0, 1.0]


def test_bytes_of_all_ranks_are_costs_and_segments_choices(monkeypatch):
    block = Block(0.0, 0.0, 0.0, 0.0, 20.0, 2.0)
    counted = Stage((block,) * 4), Stage((replace(fixed(), saved_bytes=30.0),))
    said = [("host", 0.0, rank, [step_of(rank)], {rank: counted[rank]}) for rank in range(2)]
    schedule = gpipe(2, 1)
    placed = with_recompute(schedule, ahead(schedule))
    found = gathered(monkeypatch, said, placed, segments=1).step
    assert [(one.saved_bytes, one.least_bytes) for one in found.stages] == [(80.0, 8.0), (30.0, 0.0)]
    assert found.choices == {(0, 0): Choice((), (3,), (0, 1, 2)), (1, 0): Choice((), (0,))}


@pytest.mark.usefixtures("alone")
def test_on_one_rank(record):
    run(record, Action(0, F, 0), Action(0, B, 0))
    found = gather(gpipe(1, 1), (), None, 0, record, {0: Stage((fixed(saved_bytes=5.0),))}, dist.group.WORLD)
    assert events(found.spans[0]) == [[("0F0", 2.0, 5.0), ("0B0", 12.0, 15.0)]]
    assert found.step.links == ()
    assert [one.saved_bytes for one in found.step.stages] == [5.0]


# replicas of other sizes ----------------------------------------------------------------------------------------------

FORWARD, BACKWARD = Action(0, F, 0), Action(0, B, 0)


def together(first, other):
    found = larger_stage(first, other)
    assert found == larger_stage(other, first)
    return found


def test_each_number_of_a_level_is_the_larger():
    pieces = Piece(1, False, 5.0, 2.0), Piece(0, True, 3.0, 3.0)
    first = {FORWARD: Level(5.0, 2.0, 1.0, pieces)}
    others = tuple(piece._replace(highest=4.0, left=2.5) for piece in pieces)
    other = {FORWARD: Level(4.0, 3.0, 2.0, others), BACKWARD: Level(1.0, 0.0)}
    larger = Level(5.0, 3.0, 2.0, (Piece(1, False, 5.0, 2.5), Piece(0, True, 4.0, 3.0)))
    assert combined(first, other, larger_level) == {FORWARD: larger, BACKWARD: Level(1.0, 0.0)}
    assert combined({}, first, larger_level) == combined(first, {}, larger_level) == first


def test_pieces_that_differ_are_none():
    levels = [{FORWARD: Level(5.0, 2.0, 0.0, (Piece(0, is_replay, 5.0, 2.0),))} for is_replay in (False, True)]
    assert combined(*levels, larger_level) == {FORWARD: Level(5.0, 2.0)}


def test_a_block_takes_what_either_does_in_each_state():
    """The first has much that a recompute frees, the second a large input: either way there is room for both."""
    blocks = Block(0, 0, 0, 3.0, 10.0, boundary_bytes=1.0), Block(0, 0, 0, 2.0, 9.0, boundary_bytes=8.0)
    ends = {"before": fixed(saved_bytes=1.0), "after": fixed(saved_bytes=2.0)}
    found = together(Stage(blocks[:1], **ends), Stage(blocks[1:], fixed(saved_bytes=3.0)))
    larger = Block(0, 0, 0, 3.0, saved_bytes=17.0, boundary_bytes=8.0)
    assert found == Stage((larger,), fixed(saved_bytes=3.0), ends["after"])
    assert combined({0: found}, {1: found}, larger_stage) == {0: found, 1: found}


def test_so_it_does_away():
    moved = [Block(saved_bytes=10.0, moved_bytes=10.0), Block(saved_bytes=9.0, moved_bytes=2.0)]
    assert together(*(Stage((block,)) for block in moved)) == Stage((Block(saved_bytes=17.0, moved_bytes=10.0),))
    less, more = (Stage((replace(moved[0], moved_bytes=each),)) for each in (3.0, 4.0))
    assert together(less, more) == Stage((Block(saved_bytes=11.0, moved_bytes=4.0),))


def test_stages_of_other_blocks_have_no_plan_in_common():
    stages = [Stage((Block(),) * count) for count in (2, 3)]
    assert larger_stage(*stages) == stages[0]
