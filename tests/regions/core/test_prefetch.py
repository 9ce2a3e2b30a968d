"""prefetch() and the backward: whoever comes first replays, in whichever thread, and nobody replays again."""
from __future__ import annotations

import threading

import pytest
import torch

from tests.helpers import Block, assert_equal, doing, in_thread, in_threads, leaf, plain
from torchckpt import Checkpointing, is_recomputing
from torchckpt.testing import count_recomputes


class Scene:
    """A region after its forward, the gradients of the plain call, and the threads that ran the function."""

    def __init__(self, device, gate=None) -> None:
        torch.manual_seed(1)
        self.block, self.x = Block().to(device), leaf(3, 4, device=device)
        self.leaves = [self.x, *self.block.parameters()]
        self.runs: list[tuple[bool, int]] = []
        self.expected = self._gradients_of(plain)
        self.region = Checkpointing(self._function, self.x)
        self.gate = gate

    def _function(self, x):
        self.runs.append((is_recomputing(), threading.get_ident()))
        if is_recomputing() and self.gate is not None:
            self.gate.wait(timeout=30)
        return self.block(x)

    def _gradients_of(self, call):
        torch.manual_seed(2)
        return torch.autograd.grad(call(self.block, self.x).sum(), self.leaves)

    def forward(self):
        torch.manual_seed(2)
        self.loss = self.region.checkpoint().sum()
        return self.region

    def backward(self):
        return torch.autograd.grad(self.loss, self.leaves)


@pytest.mark.parametrize("prefetches", [1, 2])
def test_prefetch_then_backward(device, prefetches):
    scene = Scene(device)
    with count_recomputes() as recomputes:
        region = scene.forward()
        assert not region.is_recomputed
        for _ in range(prefetches):
            region.prefetch()
            assert region.is_recomputed
        assert_equal(scene.backward(), scene.expected)
    assert recomputes.total == 1


def test_prefetch_after_the_backward(device):
    scene = Scene(device)
    region = scene.forward()
    with count_recomputes() as recomputes:
        scene.backward()
        region.prefetch()
    assert recomputes.total == 1


def test_prefetch_in_another_thread(device):
    scene = Scene(device)
    region = scene.forward()
    in_thread(region.prefetch)
    assert_equal(scene.backward(), scene.expected)
    (forward, here), (replay, there) = scene.runs
    assert (forward, replay) == (False, True)
    assert here != there


def test_prefetch_here_and_backward_in_another_thread(device):
    scene = Scene(device)
    scene.forward().prefetch()
    assert_equal(in_thread(scene.backward), scene.expected)
    assert scene.runs == [(False, threading.get_ident()), (True, threading.get_ident())]


def test_forward_prefetch_and_backward_in_three_threads(device):
    scene = Scene(device)
    region = in_thread(scene.forward)
    in_thread(region.prefetch)
    assert_equal(in_thread(scene.backward), scene.expected)
    assert [replay for replay, _ in scene.runs] == [False, True]


def test_two_threads_race_to_replay(device):
    gate = threading.Event()
    scene = Scene(device, gate)
    region = scene.forward()

    def race():
        gate.set()  # whoever replays waits until both threads run
        return scene.backward()

    with count_recomputes() as recomputes:
        _, received, _ = in_threads(region.prefetch, race, region.prefetch)
    assert_equal(received, scene.expected)
    assert recomputes.total == 1
    assert [replay for replay, _ in scene.runs] == [False, True]


def test_the_second_thread_waits_for_the_first(device):
    begun, gate, events = threading.Event(), threading.Event(), []
    scene = Scene(device)

    def function(x):
        if is_recomputing():
            begun.set()
            gate.wait(timeout=30)
            events.append("replayed")
        return scene.block(x)

    region = Checkpointing(function, scene.x)
    loss = region.checkpoint().sum()

    def backward():
        begun.wait(timeout=30)
        gate.set()
        loss.backward()
        events.append("backward")

    in_threads(region.prefetch, backward)
    assert events == ["replayed", "backward"]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_prefetch_where_gradients_are_off(device, mode):
    scene = Scene(device)
    region = scene.forward()
    with mode():
        region.prefetch()
        assert not torch.is_grad_enabled()
    assert region.is_recomputed
    assert_equal(scene.backward(), scene.expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_prefetch_of_nested_regions_where_gradients_are_off(device, mode):
    torch.manual_seed(1)
    block, x, made = Block().to(device), leaf(3, 4, device=device), []

    def outer(x):
        made.append(Checkpointing(block, x.exp()))
        return made[-1].checkpoint().exp()

    torch.manual_seed(2)
    expected = torch.autograd.grad(block(x.exp()).exp().sum(), x)
    torch.manual_seed(2)
    loss = Checkpointing(outer, x).checkpoint().sum()
    with mode():
        made[0].prefetch()
    assert_equal(torch.autograd.grad(loss, x), expected)


def test_prefetch_of_an_inner_region_replays_the_outer_one_first(device):
    events, made, x = [], [], leaf(3, device=device)

    def inner(h):
        events.append(f"inner {doing()}")
        return h.sin().exp()

    def outer(x):
        events.append(f"outer {doing()}")
        made.append(Checkpointing(inner, x.exp()))
        return made[-1].checkpoint().cos()

    region = Checkpointing(outer, x)
    loss = region.checkpoint().sum()
    made[0].prefetch()
    assert region.is_recomputed
    assert events == [
        "outer forward",
        "inner forward",
        "outer replay",
        "inner forward in a replay",
        "inner replay",
    ]
    assert_equal(torch.autograd.grad(loss, x), torch.autograd.grad(x.exp().sin().exp().cos().sum(), x))


def test_is_recomputed_of_a_region_without_a_graph(device):
    region = Checkpointing(torch.exp, torch.randn(3, device=device))
    region.checkpoint()
    assert region.is_recomputed
    with count_recomputes() as recomputes:
        region.prefetch()
    assert recomputes.total == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_is_recomputed_of_a_region_whose_forward_ran_where_gradients_are_off(device, mode):
    region = Checkpointing(torch.exp, leaf(3, device=device))
    with mode():
        output = region.recompute(region.checkpoint())
    region.prefetch()
    assert region.is_recomputed
    assert not output.requires_grad
