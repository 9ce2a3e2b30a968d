"""Regions that move: with any stream held back, the bytes that were saved come back, and nobody waits in vain.

Where a stream is held, the others get time: whoever should wait and does not is done by then.
"""
from __future__ import annotations

import gc
import time
from collections import Counter

import pytest
import torch
from torch import nn

from tests.device import Rates
from tests.helpers import leaf
from tests.models import MODELS
from tests.models.sequence import Block
from tests.slow import few
from torchckpt import offload, offload_layers
from torchckpt.regions.flags import local
from torchckpt.regions.moved.copies import copies_of
from torchckpt.regions.moved.region import Moved

DEVICE = torch.device("sim", 0)


@pytest.fixture(autouse=True)
def fresh(sim):
    """An arena of which nothing is in use, and the copy streams of the device."""
    gc.collect()
    local.thread.order = None
    sim.synchronize()
    yield
    local.thread.order = None


@pytest.fixture
def copies():
    return copies_of(DEVICE)


@pytest.fixture
def compute():
    return torch.accelerator.current_stream(DEVICE)


def in_time(*streams):
    """Give ``streams`` the time to come to an end, if they wait for nobody."""
    for _ in range(60):
        if all(stream.query() for stream in streams):
            return
        time.sleep(0.001)


def saves(x):
    """Saves one tensor, which nobody else holds: what exp returns."""
    return x.exp().sum()


class Scene:
    """A region, what its gradient must be, and its streams."""

    def __init__(self, value=1.0):
        self.x = torch.full((64,), value, device=DEVICE, requires_grad=True)
        self.expected = torch.full((64,), value).exp()
        self.region = Moved(1)

    def forward(self):
        self.loss = self.region.forward(saves, (self.x,), {})
        return self

    def away(self):
        self.forward()
        self.region.release()
        return self

    def backward(self):
        (gradient,) = torch.autograd.grad(self.loss, self.x)
        del self.loss
        return gradient

    def assert_right(self, gradient=None):
        gradient = self.backward() if gradient is None else gradient
        torch.accelerator.synchronize(DEVICE)
        assert torch.equal(gradient.cpu(), self.expected)


def other(stream=None):
    """A tensor that gets the memory which its stream has freed last, and is written at once."""
    return torch.full((64,), 7.0, device=DEVICE)


# the waits, by their numbers in copies.py -----------------------------------------------------------------------------


def test_1_the_copy_to_the_host_waits_for_the_forward(sim, compute, copies):
    scene = Scene()
    sim.synchronize()
    with sim.held(compute):
        scene.away()
        in_time(copies.out)
    scene.assert_right()


@pytest.mark.parametrize("in_use", [True, False], ids=["in use", "empty between"])
def test_2_a_piece_is_written_when_it_was_read(sim, copies, in_use):
    first, second = Scene(1.0).away(), Scene(2.0)
    third = Scene(3.0).away() if in_use else None
    sim.synchronize()
    place = next(first.region._moving()).piece.bytes.data_ptr()
    with sim.held(copies.back):
        first.region._begin()  # its backward, which has it issued
        second.forward()
        second.region.send()
        assert next(second.region._moving()).piece.bytes.data_ptr() == place
        in_time(copies.out)
    first.assert_right()
    second.region.release()
    second.assert_right()
    if third:
        third.assert_right()


def test_2_pieces_that_are_given_back_in_another_order_than_they_are_read(sim, copies):
    first, last = Scene(1.0).away(), Scene(2.0).away()
    last.region.issue()
    sim.synchronize()
    place = next(first.region._moving()).piece.bytes.data_ptr()
    with sim.held(copies.back):
        first.region._begin()
        last.region._begin()  # nothing is in use then, and what was given back last has been read
        third = Scene(3.0).away()
        assert next(third.region._moving()).piece.bytes.data_ptr() == place
        in_time(copies.out)
    for scene in (first, last, third):
        scene.assert_right()


def test_3_memory_is_let_go_of_when_it_was_copied(sim, compute, copies):
    scene = Scene()
    sim.synchronize()
    with sim.held(copies.out):
        scene.away()
        memory = other()
        in_time(compute)
    scene.assert_right()
    assert (memory.cpu() == 7).all()


def test_4_memory_is_written_when_its_last_user_is_done(sim, compute, copies):
    scene = Scene().away()
    sim.synchronize()
    with sim.held(compute):
        memory = torch.full((64,), 7.0, device=DEVICE)
        result = memory + 1
        del memory
        scene.region.issue()
        in_time(copies.back)
    assert (result.cpu() == 8).all()
    scene.assert_right()


@pytest.mark.parametrize("is_late", [True, False], ids=["in the backward", "ahead"])
def test_5_a_backward_waits_for_what_it_reads(sim, compute, copies, is_late):
    scene = Scene().away()
    sim.synchronize()
    with sim.held(copies.back):
        if not is_late:
            scene.region.issue()
        gradient = scene.backward()
        in_time(compute)
    scene.assert_right(gradient)


def test_waits_that_are_noted_are_waits(sim, compute, copies, monkeypatch):
    monkeypatch.setattr(copies, "waits", [])
    scene = Scene().away()
    sim.synchronize()
    with sim.held(copies.back):
        gradient = scene.backward()
        in_time(compute)
    scene.assert_right(gradient)
    assert len(copies.waits) == 2  # for its release, and for its backward


def test_5_each_backward_of_a_kept_graph_waits(sim, copies):
    scene = Scene().away()
    sim.synchronize()
    side = torch.Stream(DEVICE)
    with sim.held(copies.back):
        scene.region.issue()
        torch.autograd.grad(scene.loss, scene.x, retain_graph=True)
        gradient = scene.backward()
        in_time(side)
    scene.assert_right(gradient)


def test_6_what_nobody_has_read_is_let_go_of_when_it_came(sim, compute, copies):
    scene = Scene().away()
    sim.synchronize()
    with sim.held(copies.back):
        scene.region.issue()
        del scene.loss  # and the memory of the target is free
        memory = other()
        in_time(compute)
    torch.accelerator.synchronize(DEVICE)
    assert (memory.cpu() == 7).all()


def test_what_was_not_let_go_of_is_read_while_it_is_sent_and_dies_without_a_wait(sim, compute, copies):
    scene = Scene()
    sim.synchronize()
    with sim.held(copies.out):
        scene.forward()
        scene.region.send()
        gradient = scene.backward()
        with sim.timeout(20):
            compute.synchronize()  # though the copy has not begun
    scene.assert_right(gradient)


# streams of the user --------------------------------------------------------------------------------------------------


def test_a_region_on_another_stream_than_its_schedule(sim, copies):
    """It is made, and its memory goes back to the pool of the stream, where the forward ran."""
    side, scene = torch.Stream(DEVICE), Scene()
    sim.synchronize()
    with sim.held(side):
        with side:
            scene.forward()
        scene.region.send()  # the stream that is current now has not waited for the other
        in_time(copies.out)
    sim.synchronize()
    with sim.held(copies.out):
        scene.region.release()
        with side:
            memory = other()
        in_time(side)
    sim.synchronize()
    scene.assert_right()
    assert (memory.cpu() == 7).all()


@pytest.mark.parametrize("issues", [False, True], ids=["release", "7_and_the_issue"])
def test_a_copy_that_is_held_until_the_release_on_another_stream(sim, copies, issues):
    side, scene = torch.Stream(DEVICE), Scene(2.0 + issues)  # other bytes than are there
    sim.synchronize()
    with side:
        scene.forward()
    with sim.held(copies.out):
        scene.region.send()
        scene.region.release()
        if issues:  # where the stream that is current has not waited for the copy
            scene.region.issue()
        with side:
            memory = other()
        in_time(side, copies.back)
    sim.synchronize()
    scene.assert_right()
    assert (memory.cpu() == 7).all()


def test_a_backward_on_another_stream_than_the_issue(sim, compute, copies):
    """The memory is of the pool of the stream of the issue: it is kept until the other has read it."""
    side, scene = torch.Stream(DEVICE), Scene()
    sim.synchronize()
    with side:
        scene.away()
        out = scene.loss
    sim.synchronize()
    scene.region.issue()
    sim.synchronize()
    with sim.held(side):
        with side:
            gradient = scene.backward()
        del out
        memory = other()
        in_time(compute)
    sim.synchronize()
    scene.assert_right(gradient)
    assert (memory.cpu() == 7).all()


def test_the_current_stream_is_asked_each_time(sim, copies):
    """Steps on streams of their own, one after the other, each held while the next is queued."""
    for _ in range(3):
        side, scene = torch.Stream(DEVICE), Scene()
        sim.synchronize()
        with side:
            with sim.held(side):
                scene.away()
                in_time(copies.out)
                scene.region.issue()
                in_time(copies.back)
                gradient = scene.backward()
            side.synchronize()
        scene.assert_right(gradient)


# what runs where ------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def forward(self, x):
        return x.tanh().exp()


def chain(x, regions=5):
    for _ in range(regions):
        x = offload(Layer(), x, min_bytes=1)
    return x.sum()


def test_each_way_has_a_stream_of_its_own_beside_the_computation(sim, compute, copies):
    x = leaf(64, device=DEVICE)
    chain(x * 1).backward()
    sim.synchronize()
    with sim.record() as ran:
        chain(x * 1).backward()
    by_stream = Counter((one.stream, one.operator == "aten::copy_") for one in ran if one.device == 0)
    out, back = copies.out.stream_id, copies.back.stream_id
    # of five regions three go, with two storages each, and the fourth is sent, too
    assert (by_stream[out, True], by_stream[back, True]) == (8, 6)
    assert (by_stream[out, False], by_stream[back, False], by_stream[compute.stream_id, True]) == (0, 0, 0)
    assert len({out, back, compute.stream_id}) == 3


def test_copies_run_beside_the_computation(sim):
    """A copy of a region takes half of a forward of it: the step takes no longer than without."""
    x = leaf(64, device=DEVICE)
    seconds = {"aten::tanh": 0.02, "aten::tanh_backward": 0.04}

    def step_seconds(call):
        chain(x * 1).backward()
        with sim.durations(Rates(seconds_per_copy=0.005), seconds), sim.record() as ran, sim.prepared():
            call()
        return max(one.end_seconds for one in ran) - min(one.start_seconds for one in ran)

    def plain():
        y = x * 1
        for _ in range(5):
            y = Layer()(y)
        y.sum().backward()

    assert step_seconds(lambda: chain(x * 1).backward()) <= step_seconds(plain) + 0.002


def gpt():
    case = MODELS["gpt6"](device="sim:0", width=16)
    inputs = case.inputs

    def step():
        torch.manual_seed(1)
        loss = case.loss(case.model(*inputs))
        loss.backward()
        gradients = [parameter.grad for parameter in case.model.parameters()]
        case.model.zero_grad(set_to_none=True)
        return gradients

    return case.model, step


def test_no_step_waits_on_the_host_and_none_but_the_first_pins_memory(sim):
    copies_of.cache_clear()
    model, step = gpt()
    step()
    pins = []
    with offload_layers(model, Block, min_bytes=1):
        for _ in range(4):
            sim.synchronize()
            sim.reset_counts()
            with sim.held(), sim.timeout(5):  # a step is queued while the device stands still
                step()
                counts = sim.counts()
            pins.append(counts.pins)
            assert (counts.waits, counts.synchronous) == (0, {})
    assert pins == [1, 0, 0, 0]


@few(1)
@pytest.mark.parametrize("late", ["out", "back", "compute", "nothing"])
def test_a_step_whose_streams_are_late(sim, copies, compute, late):
    model, step = gpt()
    expected = step()
    sim.synchronize()
    streams = {"out": copies.out, "back": copies.back, "compute": compute, "nothing": torch.Stream(DEVICE)}
    with offload_layers(model, Block, min_bytes=1):
        for _ in range(2):
            with sim.held(streams[late]):
                received = step()
                in_time(*(stream for name, stream in streams.items() if name != late))
            sim.synchronize()
            assert all(map(torch.equal, received, expected))
