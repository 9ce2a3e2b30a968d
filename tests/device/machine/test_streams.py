"""Streams: what is queued runs later, in the order of its stream, and in no other order unless an event says so."""
from __future__ import annotations

import re

import pytest
import torch

from tests.helpers import in_thread


def ones(*shape, device="sim:0"):
    tensor = torch.ones(*shape, device=device)
    torch.accelerator.synchronize(tensor.device)
    return tensor


def is_nan(tensor):
    return bool(tensor.cpu().isnan().all())


def test_operators_are_queued_and_run_later(sim, streams):
    x = ones(3)
    with sim.held():
        y = x + 1
        assert not torch.accelerator.current_stream().query()
        assert y.shape == (3,)
    assert torch.equal(y.cpu(), torch.full((3,), 2.0))
    assert torch.accelerator.current_stream().query()


def test_a_read_on_another_stream_without_a_wait_is_wrong(sim, streams):
    first, second = streams
    x = ones(3)
    with sim.held(first):
        with first:
            y = x + 1
        with second:
            z = y + 0
        second.synchronize()
        assert is_nan(z)


@pytest.mark.parametrize("wait", ["event", "stream"])
def test_a_read_that_waits_is_right(sim, streams, wait):
    first, second = streams
    x = ones(3)
    with sim.held(first):
        with first:
            y = x + 1
        if wait == "event":
            second.wait_event(first.record_event())
        else:
            second.wait_stream(first)
        with second:
            z = y + 0
        assert not second.query()
    second.synchronize()
    assert torch.equal(z.cpu(), torch.full((3,), 2.0))


def test_an_event_waits_for_what_was_queued_before_it_alone(sim, streams):
    first, second = streams
    x = ones(3)
    with first:
        y = x + 1
    event = first.record_event()
    first.synchronize()
    with sim.held(first):
        with first:
            y += 1
        second.wait_event(event)
        with second:
            z = y + 0
        second.synchronize()
        assert torch.equal(z.cpu(), torch.full((3,), 2.0))


def test_order_of_two_streams(sim, streams):
    first, second = streams
    names = {first.stream_id: "first", second.stream_id: "second"}
    x = ones(3)
    with sim.record() as ran:
        with first:
            y = x.exp()
            event = first.record_event()
            y = y.sin()
        second.wait_event(event)
        with second:
            z = y.cos()
        first.wait_stream(second)
        with first:
            z.tan()
    assert [(names[one.stream], one.operator) for one in ran if one.operator != "aten::sin"] == [
        ("first", "aten::exp"),
        ("second", "aten::cos"),
        ("first", "aten::tan"),
    ]
    assert [one.operator for one in ran if names[one.stream] == "first"] == ["aten::exp", "aten::sin", "aten::tan"]


def test_streams_of_two_devices_are_not_in_order(sim):
    x = ones(3, device="sim:0")
    with sim.held(torch.accelerator.current_stream(0)):
        x + 1
        y = ones(3, device="sim:1") + 1
        assert torch.equal(y.cpu(), torch.full((3,), 2.0))  # while sim:0 stands still


def test_each_new_stream_is_another(sim):
    numbers = {torch.Stream("sim:2").stream_id for _ in range(100)}
    assert len(numbers) == 100


def test_a_stream_context_sets_stream_and_device_and_puts_them_back(sim):
    stream = torch.Stream("sim:2")
    with stream:
        assert torch.accelerator.current_device_index() == 2
        assert torch.accelerator.current_stream() == stream
    assert torch.accelerator.current_device_index() == 0
    assert torch.accelerator.current_stream(2) == torch.sim.default_stream(2)


def test_the_current_stream_is_each_threads_own(sim):
    with torch.Stream("sim:0") as stream:
        assert torch.accelerator.current_stream() == stream
        assert in_thread(torch.accelerator.current_stream) == torch.sim.default_stream(0)


def test_priorities_are_taken_and_ignored(sim):
    assert torch.Stream("sim:0", priority=-1).device == torch.device("sim:0")


# events ---------------------------------------------------------------------------------------------------------------


def test_elapsed_time_is_that_of_the_operators_between(sim):
    begin, end = torch.sim.Event(enable_timing=True), torch.Event("sim", enable_timing=True)
    x = ones(3)
    with sim.durations(seconds={"aten::exp": 0.004}):
        with sim.held():  # all is queued before the first begins
            begin.record()
            x.exp().exp()
            end.record()
        end.synchronize()
    assert begin.elapsed_time(end) == pytest.approx(8.0)


def test_an_event_that_was_never_recorded_is_done(sim):
    event = torch.Event("sim")
    assert event.query()
    event.synchronize()
    torch.accelerator.current_stream().wait_event(event)
    assert torch.equal((ones(2) + 1).cpu(), torch.full((2,), 2.0))


def test_an_event_is_done_when_its_stream_has_come_there(sim):
    with sim.held():
        event = torch.accelerator.current_stream().record_event()
        assert not event.query()
    event.synchronize()
    assert event.query()


def test_an_event_that_is_recorded_again_is_another_point(sim, streams):
    first, second = streams
    x, event = ones(3), first.record_event()
    with sim.held(first):
        with first:
            y = x + 1
        first.record_event(event)
        assert not event.query()
        second.wait_event(event)
        with second:
            z = y + 0
        assert not second.query()
    second.synchronize()
    assert torch.equal(z.cpu(), torch.full((3,), 2.0))


# waiting too long -----------------------------------------------------------------------------------------------------


def numbers_left_out(error):
    """The message, without the numbers of events, which go on counting."""
    return re.sub(r"event \d+", "event #", str(error.value))


def test_the_host_is_told_who_waits_for_what_after_the_timeout(sim, streams):
    first, second = streams
    one, two = first.stream_id, second.stream_id
    x = ones(3)
    with sim.held(first), sim.timeout(0.3):
        with first:
            y = x.exp()
        second.wait_event(first.record_event())
        with second:
            z = x.sin()
        with pytest.raises(RuntimeError) as error:
            second.synchronize()
    assert numbers_left_out(error) == (
        f"stream {two} of sim:0 was waited for, and is not done after 0.3 s. What the streams do:\n"
        f"  sim:0 stream {one}: waits for the host, which holds it, tasks behind it: 2\n"
        f"  sim:0 stream {two}: waits for event #, recorded on stream {one} of sim:0, tasks behind it: 1"
    )
    del y, z


def test_a_stream_that_waits_too_long_goes_on_and_says_so(sim, streams):
    first, second = streams
    one, two = first.stream_id, second.stream_id
    with sim.held(first):
        event = first.record_event()
        with sim.timeout(0.01):
            second.wait_event(event)
            while not second.query():
                pass
    with pytest.raises(RuntimeError) as error:
        second.synchronize()
    assert numbers_left_out(error) == (
        f"stream {two} of sim:0 has waited 0.02 s for event #, recorded on stream {one} of sim:0, and goes on without "
        "it. What the streams do:\n"
        f"  sim:0 stream {one}: waits for the host, which holds it, tasks behind it: 1\n"
        f"  sim:0 stream {two}: waits for event #, recorded on stream {one} of sim:0, tasks behind it: 0"
    )


def test_what_the_streams_do(sim, streams):
    assert sim.doing() == " nothing."
    with sim.held(streams[0]):
        while "holds" not in sim.doing():
            pass
        assert sim.doing() == (
            f"\n  sim:0 stream {streams[0].stream_id}: waits for the host, which holds it, tasks behind it: 0"
        )
