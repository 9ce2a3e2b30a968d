"""Every way to ask for gradients through a region, and how often each makes it replay."""
from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from tests.helpers import (
    Block,
    assert_equal,
    assert_program_transparent,
    assert_transparent,
    clear_gradients,
    gradients,
    in_thread,
    leaf,
    parameters_of,
    plain,
    replays,
    total,
)
from torchckpt import checkpoint
from torchckpt.testing import count_recomputes


class Scene:
    """A block, inputs, and one forward of ``call``; the same numbers for every ``call``."""

    def __init__(self, call, device) -> None:
        torch.manual_seed(1)
        self.block, self.other = Block().to(device), nn.Linear(4, 4).to(device)
        self.x, self.y = leaf(3, 4, device=device), leaf(3, 4, device=device)
        self.outputs = call(lambda x, y: (self.block(x * y), self.block(y)), self.other(self.x), self.y)
        self.loss = total(self.outputs)
        self.leaves = [self.x, self.y, *parameters_of([self.block, self.other])]


def compare(call, device, ask, recomputes):
    """``ask(scene)`` is equal with and without the region, leaves the same ``.grad`` behind, and replays so often."""
    scenes = Scene(plain, device), Scene(call, device)
    with count_recomputes() as counted:
        expected, received = map(ask, scenes)
    assert_equal(received, expected)
    assert_equal(gradients(*scenes[1].leaves), gradients(*scenes[0].leaves))
    assert counted.total == replays(call, recomputes)
    return scenes[1]


def test_backward(call, device):
    scene = compare(call, device, lambda scene: scene.loss.backward(), 1)
    assert None not in gradients(*scene.leaves)


def test_grad_of_an_input(call, device):
    scene = compare(call, device, lambda scene: torch.autograd.grad(scene.loss, scene.x), 1)
    assert gradients(*scene.leaves) == [None] * len(scene.leaves)


def test_grad_of_a_parameter(call, device):
    scene = compare(call, device, lambda scene: torch.autograd.grad(scene.loss, scene.block.second.weight), 1)
    assert gradients(*scene.leaves) == [None] * len(scene.leaves)


def test_grad_of_inputs_and_parameters(call, device):
    scene = compare(call, device, lambda scene: torch.autograd.grad(scene.loss, scene.leaves), 1)
    assert gradients(*scene.leaves) == [None] * len(scene.leaves)


def test_grad_of_an_output_with_a_cotangent(call, device):
    def ask(scene):
        return torch.autograd.grad(scene.outputs[1], [scene.y], torch.ones_like(scene.outputs[1]))

    compare(call, device, ask, 1)


def test_backward_of_chosen_inputs_touches_no_other(call, device):
    scene = compare(call, device, lambda scene: scene.loss.backward(inputs=[scene.y, scene.block.first.bias]), 1)
    with_gradient = [tensor for tensor in scene.leaves if tensor.grad is not None]
    assert [id(tensor) for tensor in with_gradient] == [id(scene.y), id(scene.block.first.bias)]


def test_grad_that_stops_before_the_region_does_not_replay(call, device):
    compare(call, device, lambda scene: torch.autograd.grad(scene.loss, scene.outputs), 0)


def test_gradients_accumulate_over_two_forwards(call, device):
    block, x = Block().to(device), leaf(3, 4, device=device)
    assert_program_transparent(call, lambda call, x: call(block, x) + call(block, x + 1), x, modules=[block])


def test_double_backward(call, device):
    def ask(scene):
        first = torch.autograd.grad(scene.loss, [scene.x, scene.y], create_graph=True)
        total(first).backward()
        return first

    compare(call, device, ask, 1)


def test_double_backward_of_a_gradient_penalty(call, device):
    def ask(scene):
        (penalty,) = torch.autograd.grad(scene.outputs[0].sum(), scene.x, create_graph=True)
        (scene.loss + penalty.pow(2).sum()).backward()

    compare(call, device, ask, 1)


# torch warns, once in a process, of a cycle of leaf and gradient: ask() breaks it
@pytest.mark.filterwarnings(r"ignore:Using backward\(\) with create_graph=True")
def test_double_backward_through_backward(call, device):
    def ask(scene):
        scene.loss.backward(create_graph=True)
        first, scene.x.grad = scene.x.grad, None
        clear_gradients(*scene.leaves)
        total(first).backward()

    compare(call, device, ask, 1)


def test_derivatives_of_a_cube(call, device):
    x = torch.full((), 2.0, device=device, requires_grad=True)
    y = call(lambda x: x**3, x)
    first = torch.autograd.grad(y, x, create_graph=True)[0]
    second = torch.autograd.grad(first, x, create_graph=True)[0]
    third = torch.autograd.grad(second, x)[0]
    assert [d.item() for d in (y, first, second, third)] == [8, 12, 12, 6]


def test_gradient_penalty_inside_the_region(call, device):
    block = Block().to(device)

    def function(x):
        energy = block(x)
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy, force

    assert_transparent(call, function, leaf(3, 4, device=device), modules=[block])


def test_second_backward_of_a_kept_graph(call, device):
    def ask(scene):
        scene.loss.backward(retain_graph=True)
        first = gradients(*scene.leaves)
        scene.loss.backward()
        return first

    compare(call, device, ask, 1)


def test_many_backwards_of_a_kept_graph(call, device):
    def ask(scene):
        return [torch.autograd.grad(scene.loss, scene.leaves, retain_graph=True) for _ in range(4)]

    compare(call, device, ask, 1)


def test_second_backward_of_a_freed_graph_is_the_error_of_eager(call, device):
    def ask(scene):
        scene.loss.backward()
        with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
            scene.loss.backward()

    compare(call, device, ask, 1)


def test_two_losses_one_after_the_other(call, device):
    def ask(scene):
        first, second = total(scene.outputs[:1]), total(scene.outputs[1:])
        first.backward(retain_graph=True)
        after_first = gradients(*scene.leaves)
        second.backward()
        return after_first

    compare(call, device, ask, 1)


def test_two_losses_of_disjoint_graphs(call, device):
    def ask(scene):
        first, second = scene.outputs
        first.sum().backward(inputs=[scene.x, scene.y])
        second.sum().backward()

    compare(call, device, ask, 1)


def test_two_losses_of_one_output(call, device):
    def ask(scene):
        scene.outputs[0].sum().backward(retain_graph=True)
        scene.outputs[0].exp().sum().backward()

    compare(call, device, ask, 1)


def test_backward_in_another_thread(call, device):
    compare(call, device, lambda scene: in_thread(scene.loss.backward), 1)


def test_forward_in_another_thread(call, device):
    compare(functools.wraps(call)(functools.partial(in_thread, call)), device, lambda scene: scene.loss.backward(), 1)


def test_forward_and_backward_in_two_other_threads(call, device):
    forward = functools.wraps(call)(functools.partial(in_thread, call))
    compare(forward, device, lambda scene: in_thread(scene.loss.backward), 1)


def test_hooks_on_tensors_and_parameters_fire_once(call, device):
    block, x, fired = Block().to(device), leaf(3, 4, device=device), []
    output = call(block, x)
    for name, tensor in {"input": x, "output": output, **dict(block.named_parameters())}.items():
        tensor.register_hook(lambda grad, name=name: fired.append(name))
    output.sum().backward()
    assert sorted(fired) == ["first.bias", "first.weight", "input", "output", "second.bias", "second.weight"]


def test_hook_on_a_tensor_inside_the_region_fires_once():
    fired = []

    def function(x):
        hidden = x.exp()
        hidden.register_hook(lambda grad: fired.append("hidden"))
        return hidden.sin()

    checkpoint(function, leaf(3)).sum().backward()
    assert fired == ["hidden"]


def test_anomaly_detection_around_the_region(call, device):
    block = Block().to(device)
    with pytest.warns(UserWarning, match="Anomaly Detection has been enabled"), torch.autograd.detect_anomaly():
        assert_transparent(call, block, leaf(3, 4, device=device), modules=[block])
