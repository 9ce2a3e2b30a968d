"""Time: durations of operators, links and copies, and delays. The times are those that were set, not measured ones."""
from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attention
from torch.utils.flop_counter import FlopCounterMode

from tests.device import Rates


def seconds(ran):
    """Each operator, and for how long it ran."""
    return [(one.operator, pytest.approx(one.end_seconds - one.start_seconds, abs=1e-7)) for one in ran]


def spans(ran):
    """When each started and ended, since the first start."""
    first = ran[0].start_seconds
    return [pytest.approx((one.start_seconds - first, one.end_seconds - first), abs=1e-7) for one in ran]


def total(ran):
    return sum(one.end_seconds - one.start_seconds for one in ran)


def milliseconds(ran):
    """Each operator's device and start, since the first start."""
    first = min(one.start_seconds for one in ran)
    return [(one.device, round((one.start_seconds - first) * 1e3, 3)) for one in ran]


def ones(*shape, device="sim:0"):
    return torch.ones(*shape, device=device)


def test_operators_of_a_stream_follow_one_another(sim):
    x = ones(3)
    with sim.durations(seconds={"aten::exp": 0.002, "aten::sin": 0.001}), sim.record() as ran:
        with sim.held():
            x.exp().sin().exp()
    assert [one.operator for one in ran] == ["aten::exp", "aten::sin", "aten::exp"]
    assert spans(ran) == [(0, 0.002), (0.002, 0.003), (0.003, 0.005)]


def test_two_streams_run_at_once_and_an_event_orders_them(sim):
    x, first, second = ones(3), torch.Stream("sim:0"), torch.Stream("sim:0")
    sim.synchronize()
    with sim.durations(seconds={"aten::exp": 0.002, "aten::sin": 0.003}), sim.record() as ran:
        with sim.held(first):
            second.wait_stream(first)  # both start when the first goes on
            with first:
                y = x.exp()
                event = first.record_event()
            with second:
                x.sin()
                second.wait_event(event)
                y.exp()
            with first:
                first.wait_stream(second)
                x.exp()
    names = {first.stream_id: "first", second.stream_id: "second"}
    start = ran[0].start_seconds
    assert sorted((names[one.stream], round((one.start_seconds - start) * 1e3, 3), one.operator) for one in ran) == [
        ("first", 0.0, "aten::exp"),
        ("first", 5.0, "aten::exp"),
        ("second", 0.0, "aten::sin"),
        ("second", 3.0, "aten::exp"),
    ]


def test_rates(sim):
    a, b = ones(8, 16), ones(16, 4)
    rates = Rates(flops_per_second=1e6, bytes_per_second=1e6, seconds_per_operator=1e-4)
    sim.synchronize()
    with sim.durations(rates), sim.record() as ran:
        a @ b
        a + 1
        torch.sim.synchronize()
    assert seconds(ran) == [
        ("aten::mm", 1e-4 + 2 * 8 * 16 * 4 / 1e6),  # 1024 FLOPs, against 896 bytes
        ("aten::add", 1e-4 + (2 * 8 * 16 * 4 + 8) / 1e6),  # 512 bytes in, 512 out, and the number
    ]


FLOPS = {
    "mm": (lambda: ones(8, 16) @ ones(16, 4), 2 * 8 * 16 * 4),
    "mv": (lambda: ones(8, 16).mv(ones(16)), 2 * 8 * 16),
    "addmm": (lambda: torch.addmm(ones(4), ones(8, 16), ones(16, 4)), 2 * 8 * 16 * 4),
    "bmm": (lambda: ones(3, 8, 16) @ ones(3, 16, 4), 3 * 2 * 8 * 16 * 4),
    "baddbmm": (lambda: torch.baddbmm(ones(1), ones(3, 8, 16), ones(3, 16, 4)), 3 * 2 * 8 * 16 * 4),
    "conv2d": (lambda: nn.functional.conv2d(ones(2, 4, 8, 8), ones(6, 4, 3, 3), padding=1, stride=2), None),
    "conv1d in groups": (lambda: nn.functional.conv1d(ones(2, 4, 8), ones(6, 2, 3), groups=2, dilation=2), None),
    "conv transposed": (lambda: nn.functional.conv_transpose2d(ones(2, 4, 8, 8), ones(4, 6, 3, 3), stride=2), None),
    "attention": (lambda: attention(*[ones(2, 4, 8, 16)] * 3), 2 * 2 * 2 * 4 * 8 * 8 * 16),
    "a sum": (lambda: ones(8).sum(), 0),
}


@pytest.mark.parametrize(("call", "flops"), FLOPS.values(), ids=FLOPS)
def test_flops(sim, call, flops):
    if flops is None:  # as PyTorch's own counter has it
        with FlopCounterMode(display=False) as counter:
            call()
        flops = counter.get_total_flops()
    sim.synchronize()
    with sim.durations(Rates(flops_per_second=1e8)), sim.record() as ran:
        call()
    assert total(ran) == pytest.approx(flops / 1e8, abs=1e-7)


def test_flops_of_a_backward_are_those_of_pytorchs_counter(sim):
    layer = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, bias=False)).to("sim:0")

    def step():
        layer(ones(2, 3, 8, 8)).sum().backward()

    with FlopCounterMode(display=False) as counter:
        step()
    sim.synchronize()
    with sim.durations(Rates(flops_per_second=1e8)), sim.record() as ran:
        step()
    assert total(ran) == pytest.approx(counter.get_total_flops() / 1e8, abs=1e-6)


# links ----------------------------------------------------------------------------------------------------------------


def test_a_copy_takes_the_time_of_its_link(sim):
    x = ones(250)
    sim.synchronize()
    with sim.durations(Rates(link_bytes_per_second=1e6, seconds_per_copy=0.001)), sim.record() as ran:
        x.to("sim:1")
        x.cpu()
        x.clone()  # on the device: no link
    assert seconds(ran) == [("aten::copy_", 0.002), ("aten::copy_", 0.002), ("aten::copy_", 0)]


def test_copies_share_a_link_and_other_links_are_free(sim):
    x, streams = ones(250), [torch.Stream("sim:0") for _ in range(3)]
    back, returning = ones(250, device="sim:1"), torch.Stream("sim:1")
    sim.synchronize()
    with sim.durations(Rates(link_bytes_per_second=1e6)), sim.record() as ran:
        gate = torch.Stream("sim:0")
        with sim.held(gate):
            for stream in (*streams, returning):
                stream.wait_stream(gate)
            with streams[0]:
                x.to("sim:1")
            with streams[1], torch.Stream("sim:1"):
                x.to("sim:1")
            with streams[2]:
                x.to("sim:2")
            with returning:
                back.to("sim:0")
    assert sorted(milliseconds(ran)) == [(0, 0.0), (0, 0.0), (0, 1.0), (1, 0.0)]


def test_a_copy_takes_its_turn_though_this_machine_was_too_slow_for_it(sim):
    """The thread of the second stream computes for long, in no time of the device; the copy behind it comes first."""
    x, large = ones(250), ones(1000, 1000)
    gate, first, second = (torch.Stream("sim:0") for _ in range(3))
    sim.synchronize()
    with sim.durations(Rates(link_bytes_per_second=1e6), {"aten::exp": 0.01, "aten::mm": 0}), sim.record() as ran:
        with sim.held(gate):
            for stream in (first, second):
                stream.wait_stream(gate)
            with first:
                x.exp().to("sim:1")
            with second, torch.Stream("sim:1"):
                large @ large @ large
                x.to("sim:1")
    starts = {one.stream: start for one, (_, start) in zip(ran, milliseconds(ran)) if one.operator == "aten::copy_"}
    assert starts == {first.stream_id: 10.0, second.stream_id: 0.0}


def test_eight_milliseconds_on_each_of_four_devices_are_eight_in_all(sim):
    inputs = [ones(3, device=f"sim:{device}") for device in range(4)]
    sim.synchronize()
    with sim.durations(seconds={"aten::exp": 0.008}), sim.record() as ran:
        gate = torch.Stream("sim:0")
        with sim.held(gate):
            for x in inputs:
                torch.accelerator.current_stream(x.device).wait_stream(gate)
                x.exp()
    assert spans(ran) == [(0, 0.008)] * 4


def test_what_the_machine_was_too_slow_for_is_told(sim):
    x = ones(3)
    with sim.durations(seconds={"aten::exp": 1e-9}):
        x.exp()
        sim.synchronize()
        assert sim.lateness_seconds() > 0


def test_without_durations_nothing_is_late(sim):
    ones(3).exp()
    sim.synchronize()
    with sim.durations():
        assert sim.lateness_seconds() == 0


# delays ---------------------------------------------------------------------------------------------------------------


def delayed(sim, seed, share=0.5):
    """By how much each of some operators on two streams was late. Each has a duration, so that times are exact."""
    x, gate = ones(3), torch.Stream("sim:0")
    sim.synchronize()
    with sim.delays(seed, 0.001, share), sim.durations(seconds={"aten::exp": 0.0005}), sim.record() as ran:
        fresh = [torch.Stream("sim:0"), torch.Stream("sim:0")]
        with sim.held(gate):
            for stream in fresh:
                stream.wait_stream(gate)
                with stream:
                    for _ in range(8):
                        x.exp()
    own = [[one for one in ran if one.stream == stream.stream_id] for stream in fresh]
    return [[round(later.start_seconds - one.end_seconds, 6) for one, later in pairwise(ones)] for ones in own]


def test_delays_follow_from_the_seed(sim):
    first, again, other = delayed(sim, 1), delayed(sim, 1), delayed(sim, 2)
    assert first == again
    assert first != other
    assert first[0] != first[1]  # each stream has its own
    assert all(0 <= gap <= 0.001 for gaps in first for gap in gaps)


def test_delays_do_not_depend_on_the_streams_that_were_made_before(sim):
    first = delayed(sim, 1)
    while torch.Stream("sim:0").stream_id != 1023:  # from 1024 on, numbers are used again
        pass
    assert delayed(sim, 1) == first


def test_a_share_of_the_operators_is_late(sim):
    assert delayed(sim, 1, share=0) == [[0.0] * 7] * 2
    assert all(gap > 0 for gaps in delayed(sim, 1, share=1) for gap in gaps)
