"""Two ranks: the order of messages and recomputes, how many blocks run, and the timeline of both."""
from __future__ import annotations

import contextlib
import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules

from tests.distributed.ranks import attempted, on_ranks
from tests.distributed.stages import (
    SINGLE,
    SPLIT,
    Blocks,
    ahead,
    batch,
    events,
    events_of_step,
    gradients_of,
    not_on_old_stages,
    noted,
    schedule_on,
    stages_of,
)
from tests.helpers import Probe
from tests.settings import with_gloo
from torchckpt.distributed import recompute_ahead
from torchckpt.distributed.ahead import MEASURED_STEPS
from torchckpt.planning import Kind
from torchckpt.planning.draw.gantt import gantt

pytestmark = with_gloo


class Arriving(Blocks):
    """Notes when the gradient of its output enters its backward."""

    def forward(self, x):
        return Probe.apply(super().forward(x), lambda: events.append(f"backward {self.blocks[0].name[0]}"))


@contextlib.contextmanager
def messages_noted():
    """``posted`` where torch has begun to receive, ``waited`` where it begins to wait for that."""
    batch_p2p, wait_batch_p2p = schedules._batch_p2p, schedules._wait_batch_p2p
    received = []

    def post(ops, *args, **kwargs):
        works = batch_p2p(ops, *args, **kwargs)
        if ops and ops[0].op is dist.irecv:
            received.extend(works)
            events.append("posted")
        return works

    def wait(works):
        if any(work is one for work in works for one in received):
            events.append("waited")
        wait_batch_p2p(works)

    schedules._batch_p2p, schedules._wait_batch_p2p = post, wait
    try:
        yield
    finally:
        schedules._batch_p2p, schedules._wait_batch_p2p = batch_p2p, wait_batch_p2p


def what_happens(name, make, m, **options):
    with messages_noted():
        schedule, stages = ahead(name, make, m, **options)
        return events_of_step(noted(schedule), stages, m)


def forwards(name, regions):
    """Of all blocks of this rank, replays included, in a step of four micro-batches."""
    stages = stages_of(name, lambda stage: Blocks(stage, count=1, regions=regions))
    schedule = schedule_on(stages, name, 4)
    return len(events_of_step(recompute_ahead(schedule, exempt="none") if regions == "ours" else schedule, stages, 4))


def timelines(name, **options):
    """After two steps more than recomputes stay where they are: what runs, the timeline, and the report's."""
    schedule, stages = ahead(name, **options)
    for _ in range(MEASURED_STEPS + 2):
        ran = events_of_step(noted(schedule), stages, 4)
        schedule.reaches = type(schedule).reaches.__get__(schedule)
    report = schedule.report()
    return {
        "ran": [event for event in ran if re.fullmatch(r"\d[FBIWR]\d", event)],
        "schedule": schedule.schedule,
        "timeline": schedule.timeline(),
        "table": report.table(),
        "measured": report.measured,
    }


def report_of_rank(rank):
    report = {name: attempted(lambda name=name: what_happens(name, Arriving, 2, exempt="none")) for name in SINGLE}
    report["forwards"] = {(name, of): attempted(forwards, name, of) for name in SPLIT for of in ("ours", "torch")}
    report["late"] = attempted(lambda: what_happens("Schedule1F1B", Arriving, 2, segments=1))
    report["timelines"] = {
        "ScheduleInterleaved1F1B": timelines("ScheduleInterleaved1F1B"),
        "ScheduleDualPipeV": timelines("ScheduleDualPipeV", costs="measured"),
    }
    return report


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    return on_ranks(report_of_rank, tmp_path_factory.mktemp("ranks"))


def test_gpipe_recomputes_between_the_receive_and_its_wait(reported):
    first, last = (report["ScheduleGPipe"] for report in reported)
    assert first == [
        *("0UNSHARD", "0F0", "forward 0.0", "forward 0.1", "0SEND_F0", "0F1", "forward 0.0", "forward 0.1", "0SEND_F1"),
        *("0RECV_B0", "posted", "0R0", "replay 0.1", "replay 0.0", "0B0", "waited", "backward 0"),
        *("0RECV_B1", "posted", "0R1", "replay 0.1", "replay 0.0", "0B1", "waited", "backward 0"),
        *("0REDUCE_GRAD", "0RESHARD"),
    ]
    assert last == [
        *("1UNSHARD", "1RECV_F0", "posted", "1F0", "waited", "forward 1.0", "forward 1.1"),
        *("1RECV_F1", "posted", "1F1", "waited", "forward 1.0", "forward 1.1"),
        *("1R0", "replay 1.1", "replay 1.0", "1B0", "backward 1", "1SEND_B0"),
        *("1R1", "replay 1.1", "replay 1.0", "1B1", "backward 1", "1SEND_B1"),
        *("1REDUCE_GRAD", "1RESHARD"),
    ]


def test_1f1b_recomputes_between_the_receive_and_its_wait(reported):
    first, last = (report["Schedule1F1B"] for report in reported)
    assert first == [
        *("0UNSHARD", "0F0", "forward 0.0", "forward 0.1", "0SEND_F0", "0F1", "forward 0.0", "forward 0.1", "0SEND_F1"),
        *("0RECV_B0", "posted", "0R0", "replay 0.1", "replay 0.0", "0B0", "waited", "backward 0"),
        *("0RECV_B1", "posted", "0R1", "replay 0.1", "replay 0.0", "0B1", "waited", "backward 0"),
        *("0REDUCE_GRAD", "0RESHARD"),
    ]
    assert last == [
        *("1UNSHARD", "1RECV_F0", "posted", "1F0", "waited", "forward 1.0", "forward 1.1", "1RECV_F1", "posted"),
        *("1R0", "replay 1.1", "replay 1.0", "1B0", "backward 1", "1SEND_B0"),
        *("1F1", "waited", "forward 1.0", "forward 1.1"),
        *("1R1", "replay 1.1", "replay 1.0", "1B1", "backward 1", "1SEND_B1"),
        *("1REDUCE_GRAD", "1RESHARD"),
    ]


def test_with_one_segment_the_last_region_is_early_and_the_first_late(reported):
    first, _ = (report["late"] for report in reported)
    assert first[first.index("0RECV_B0") : first.index("0RECV_B1")] == [
        *("0RECV_B0", "posted", "0R0", "replay 0.1", "0B0", "waited", "backward 0", "replay 0.0"),
    ]


@pytest.mark.parametrize("name", SPLIT)
def test_split_backward_recomputes_exactly_once(reported, name):
    """Two stages of a block each, four micro-batches: eight forwards, eight replays; stock checkpointing has more."""
    for report in reported:
        assert report["forwards"][name, "ours"] == 16
    assert [report["forwards"][name, "torch"] for report in reported] == STOCK[name]


STOCK = {
    "ScheduleInterleavedZeroBubble": [24, 32],  # stage 0, on the first rank, is asked for no gradient of its inputs
    "ScheduleZBVZeroBubble": [24, 32],
    "ScheduleDualPipeV": [18, 20],  # most of whose backwards are whole
}
"""Per rank, with ``torch.utils.checkpoint``: what is split is replayed for the inputs, and again for each of the two
groups of weights that torch asks for the gradients of."""


@pytest.mark.parametrize("name", ["ScheduleInterleaved1F1B", "ScheduleDualPipeV"])
def test_timeline_is_the_same_on_all_ranks_and_in_the_order_of_the_schedule(reported, name):
    first, last = (report["timelines"][name] for report in reported)
    assert first["timeline"] == last["timeline"]
    assert first["schedule"] == last["schedule"]
    timeline, schedule = first["timeline"], first["schedule"]
    for rank, report in enumerate((first, last)):
        mine = [event for event in timeline.events if event.rank == rank]
        assert tuple(event.action for event in mine) == schedule.ranks[rank]
        times = [(event.start_seconds, event.end_seconds) for event in mine]
        assert times == sorted(times)
        if name != "ScheduleDualPipeV":  # whose pairs are one action there
            assert report["ran"] == [str(action) for action in schedule.ranks[rank]]
        assert report["table"] == first["table"]
        assert report["measured"] == timeline
    assert {event.action.kind for event in timeline.events} >= {Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD}
    assert len(timeline.messages) > 0
    assert all(peak > 0 for peak in timeline.peak_bytes)
    drawn = gantt(timeline, 200).splitlines()
    assert len(drawn) == 2
    assert all("F" in line and "R" in line and "B" in line for line in drawn)


class Named(Blocks):
    """Takes the batch by a keyword, which all ranks give: the first stage has no arguments by place."""

    def forward(self, x=None, ids=None):
        return super().forward(ids if x is None else x)


def gradients_beside_an_evaluation(rank, evaluates):
    torch.manual_seed(rank)
    stages, (x, target) = stages_of("Schedule1F1B", Named), batch(4)
    schedule = recompute_ahead(schedule_on(stages, "Schedule1F1B", 4), exempt="none")
    other = recompute_ahead(schedule_on(stages, "ScheduleGPipe", 2))
    for number in range(3):
        torch.manual_seed(number)
        schedule.step(ids=x, target=target)
        if evaluates:
            other.eval(ids=x, target=target)
    return gradients_of(stages)


def beside_an_evaluation(rank):
    return [gradients_beside_an_evaluation(rank, evaluates) for evaluates in (False, True)]


@not_on_old_stages("micro-batches of other sizes are refused")
def test_ranks_agree_that_another_schedule_has_prepared_their_stages(tmp_path):
    """The first rank saw nothing of it, and sent no shapes: the next took what it did send for these."""
    for plain, evaluated in on_ranks(beside_an_evaluation, tmp_path, timeout=60):
        assert len(plain) == 8
        assert all(map(torch.equal, plain, evaluated))
