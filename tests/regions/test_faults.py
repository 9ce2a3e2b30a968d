"""Faults: an exception of the user's passes through as it is, and leaves nothing behind."""
from __future__ import annotations

import traceback
from contextlib import ExitStack, contextmanager, suppress

import pytest
import torch
from torch import nn

from tests.accelerator import random_states
from tests.left_behind import nothing_left_behind
from torchckpt import Checkpointing, checkpoint, checkpoint_module, is_recomputing
from torchckpt.errors import RecomputationError, RegionError
from torchckpt.regions.core import call as call_of_regions
from torchckpt.testing import count_recomputes

ERRORS = [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit]


class Block(nn.Module):
    """Draws random numbers and updates statistics, then raises in the calls that it was told to raise in."""

    def __init__(self, error: type[BaseException] = ValueError, calls: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.error, self.fails_in, self.calls = error, calls, 0

    def forward(self, input):
        self.calls += 1
        hidden = self.dropout(self.norm(self.linear(input)))
        if self.calls in self.fails_in:
            raise self.error("the pump is off")
        return hidden.sin() * hidden.exp()


def buffers_of(module):
    return {name: (id(buffer), buffer.tolist()) for name, buffer in module.named_buffers()}


def equal_gradients(loss, expected, *tensors):
    return all(map(torch.equal, torch.autograd.grad(loss, tensors), torch.autograd.grad(expected, tensors)))


# in the forward -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", ERRORS)
def test_error_in_the_forward_is_the_users_and_leaves_nothing_behind(error, device):
    block, x = Block(error, calls=(1,)).to(device), torch.randn(3, 4, device=device)
    with nothing_left_behind(), pytest.raises(error, match="the pump is off") as caught:
        checkpoint(block, x)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].line == 'raise self.error("the pump is off")'


@pytest.mark.parametrize("error", ERRORS)
def test_error_in_the_forward_leaves_the_generators_where_the_plain_call_does(error, device):
    x, after = torch.randn(3, 4, device=device), []
    for call in (lambda function, x: function(x), checkpoint):
        torch.manual_seed(1)
        with pytest.raises(error):
            call(Block(error, calls=(1,)).to(device), x)
        after.append(random_states(device))
    assert all(map(torch.equal, *after))


@pytest.mark.parametrize("error", ERRORS)
def test_call_after_an_error_in_the_forward_works(error, device):
    block, x = Block(error, calls=(1,)).to(device), torch.randn(3, 4, device=device)
    with pytest.raises(error):
        checkpoint(block, x)
    torch.manual_seed(1)
    loss = checkpoint(block, x).sum()
    torch.manual_seed(1)
    assert equal_gradients(loss, block(x).sum(), *block.parameters())


def test_error_in_the_forward_of_an_inner_region_leaves_nothing_behind():
    block, x = Block(calls=(1,)), torch.randn(3, 4, requires_grad=True)
    with nothing_left_behind(), pytest.raises(ValueError, match="the pump is off"):
        checkpoint(lambda x: checkpoint(block, x.sin()).exp(), x)


def test_error_in_the_forward_that_an_outer_function_catches_does_not_matter(device):
    block = Block(calls=(1, 2)).to(device)  # the replay does as the forward did
    x = torch.randn(3, 4, device=device, requires_grad=True)

    def outer(x):
        try:
            return checkpoint(block, x.sin())
        except ValueError:
            return checkpoint(torch.tanh, x.cos())

    loss = checkpoint(outer, x).sum()
    assert equal_gradients(loss, x.cos().tanh().sum(), x)


def test_error_of_a_context_is_the_users_and_leaves_nothing_behind():
    @contextmanager
    def failing():
        raise ValueError("the pump is off")
        yield

    @contextmanager
    def working():
        yield

    x = torch.randn(3, requires_grad=True)
    with nothing_left_behind(), pytest.raises(ValueError, match="the pump is off"):
        checkpoint(torch.sin, x, context_fn=lambda: (failing(), working()))
    loss = checkpoint(torch.sin, x, context_fn=lambda: (working(), failing())).sum()
    with nothing_left_behind(), pytest.raises(ValueError, match="the pump is off"):
        loss.backward()


def test_region_where_saved_tensor_hooks_are_forbidden_says_why_and_leaves_nothing_behind():
    x = torch.randn(3, requires_grad=True)
    with torch.autograd.graph.disable_saved_tensors_hooks("hooks are off here"):
        with nothing_left_behind(), pytest.raises(RuntimeError, match="hooks are off here"):
            checkpoint(torch.sin, x)


# in the replay --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", ERRORS)
def test_error_in_the_replay_is_the_users_with_the_line_that_raised(error, device, call):
    block, x = Block(error, calls=(2,)).to(device), torch.randn(3, 4, device=device)
    with nothing_left_behind(), pytest.raises(error, match="the pump is off") as caught:
        call(block, x).sum().backward()
    lines = [entry.line for entry in traceback.extract_tb(caught.value.__traceback__)]
    assert lines[-1] == 'raise self.error("the pump is off")'


@pytest.mark.parametrize("error", ERRORS)
def test_error_in_the_replay_leaves_flags_generators_and_statistics_as_they_were(error, device, call):
    block, x = Block(error, calls=(2,)).to(device), torch.randn(3, 4, device=device)
    region = Checkpointing(block, x)
    loss = region.recompute(region.checkpoint()).sum()
    torch.rand(3)
    states, buffers = random_states(device), buffers_of(block)
    with nothing_left_behind(), pytest.raises(error):
        loss.backward()
    assert all(map(torch.equal, random_states(device), states))
    assert buffers_of(block) == buffers


@pytest.mark.parametrize("error", ERRORS)
def test_error_in_the_replay_restores_autocast_grad_mode_and_default_dtype(error):
    block, x = Block(error, calls=(2,)), torch.randn(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        region = Checkpointing(block, x)
        region.checkpoint()
    with torch.no_grad(), nothing_left_behind(), pytest.raises(error):
        region.prefetch()


@pytest.mark.parametrize("error", ERRORS)
def test_backward_after_an_error_in_the_replay_is_equal(error, device):
    block, x = Block(error, calls=(2, 3)).to(device), torch.randn(3, 4, device=device, requires_grad=True)
    torch.manual_seed(1)
    loss = checkpoint(block, x).sum()
    for _ in range(2):
        with pytest.raises(error):
            torch.autograd.grad(loss, x, retain_graph=True)
    block.fails_in = ()
    torch.manual_seed(1)
    with count_recomputes() as recomputes:
        assert equal_gradients(loss, block(x).sum(), x, *block.parameters())
    assert recomputes.total == 1


def test_prefetch_after_an_error_in_the_replay_is_equal():
    block, x = Block(calls=(2,)), torch.randn(3, 4, requires_grad=True)
    torch.manual_seed(1)
    region = Checkpointing(block, x)
    loss = region.checkpoint().sum()
    with pytest.raises(ValueError, match="the pump is off"):
        region.prefetch()
    assert not region.is_recomputed
    region.prefetch()
    assert region.is_recomputed
    torch.manual_seed(1)
    assert equal_gradients(loss, block(x).sum(), x, *block.parameters())


def test_backward_after_a_difference_in_the_replay_is_equal():
    x, differs = torch.randn(4, requires_grad=True), []

    def function(x):
        return (x[:2] if differs else x).sin().sum()

    loss = checkpoint(function, x)
    differs.append(True)
    with nothing_left_behind(), pytest.raises(RecomputationError):
        loss.backward(retain_graph=True)
    differs.clear()
    assert equal_gradients(loss, x.sin().sum(), x)


@pytest.mark.parametrize("error", ERRORS)
def test_call_after_an_error_in_the_replay_works(error, device):
    block, x = Block(error, calls=(2,)).to(device), torch.randn(3, 4, device=device, requires_grad=True)
    with pytest.raises(error):
        checkpoint(block, x).sum().backward()
    torch.manual_seed(1)
    loss = checkpoint(block, x).sum()
    torch.manual_seed(1)
    assert equal_gradients(loss, block(x).sum(), x, *block.parameters())


@pytest.mark.parametrize("failing_call", [2, 3])
def test_error_in_a_nested_replay_leaves_nothing_behind_and_can_be_retried(failing_call, device):
    block, x = Block(calls=(failing_call,)).to(device), torch.randn(3, 4, device=device, requires_grad=True)

    def inner(x):
        return block(x.cos()).sin()

    def outer(x):
        return checkpoint(inner, x.sin()).exp()

    torch.manual_seed(1)
    loss = checkpoint(outer, x).sum()
    buffers = buffers_of(block)
    with nothing_left_behind(), pytest.raises(ValueError, match="the pump is off"):
        torch.autograd.grad(loss, x, retain_graph=True)
    assert buffers_of(block) == buffers
    block.fails_in = ()
    torch.manual_seed(1)
    assert equal_gradients(loss, inner(x.sin()).exp().sum(), x, *block.parameters())


def test_error_in_the_replay_of_a_checkpointed_module_leaves_it_working():
    block, x = Block(calls=(2,)), torch.randn(3, 4)
    checkpoint_module(block)
    with nothing_left_behind(), pytest.raises(ValueError, match="the pump is off"):
        block(x).sum().backward()
    block(x).sum().backward()
    assert block.linear.weight.grad is not None


@pytest.mark.parametrize("saves_before", [True, False])
def test_prefetch_after_an_error_in_the_forward_does_nothing_or_says_so(saves_before):
    calls = []

    def function(x):
        calls.append(None)
        if saves_before:
            x = x.sin()
        raise ValueError("the pump is off")

    region = Checkpointing(function, torch.randn(3, requires_grad=True))
    with pytest.raises(ValueError, match="the pump is off"):
        region.checkpoint()
    with nothing_left_behind(), suppress(RegionError):
        region.prefetch()
    assert len(calls) == 1


# while a replay ends early --------------------------------------------------------------------------------------------


class Leaving:
    """A context whose end raises in a replay."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if is_recomputing():
            raise OSError("the disk is full")


@contextmanager
def leaving():
    with Leaving():
        yield


def in_finally(x):
    try:
        return x.sin().exp()
    finally:
        if is_recomputing():
            raise OSError("the disk is full")


def in_exit(x):
    with Leaving():
        return x.sin().exp()


def in_a_generator(x):
    with leaving():
        return x.sin().exp()


def in_an_exit_stack(x):
    with ExitStack() as stack:
        stack.enter_context(leaving())
        return x.sin().exp()


def from_none(x):
    try:
        return x.sin().exp()
    finally:
        if is_recomputing():
            raise OSError("the disk is full") from None


def after_a_wrapper(x):
    try:
        return wrapping(x)
    finally:
        if is_recomputing():
            raise OSError("the disk is full")


def wrapping(x):
    try:
        return x.sin().exp()
    except Exception as error:
        raise RuntimeError("a layer failed") from error


def wrapping_twice(x):
    try:
        return wrapping(x)
    except RuntimeError as error:
        raise ValueError("a model failed") from error


@pytest.mark.parametrize(
    "function", [in_finally, in_exit, in_a_generator, in_an_exit_stack, from_none, after_a_wrapper]
)
def test_error_while_a_replay_ends_early_is_the_users_and_the_replay_can_be_tried_again(function):
    x = torch.randn(3, requires_grad=True)
    region = Checkpointing(function, x)
    loss = region.recompute(region.checkpoint()).sum()
    for replay in (region.prefetch, lambda: torch.autograd.grad(loss, x), region.prefetch):
        with nothing_left_behind(), pytest.raises(OSError, match="the disk is full"):
            replay()
    loss = checkpoint(function, x).sum()
    with nothing_left_behind(), pytest.raises(OSError, match="the disk is full"):
        loss.backward()


@pytest.mark.parametrize("function", [wrapping, wrapping_twice])
def test_function_that_takes_the_end_of_the_replay_for_an_error_is_equal(function, call):
    x = torch.randn(3, requires_grad=True)
    assert equal_gradients(call(function, x).sum(), x.sin().exp().sum(), x)


def test_an_interrupt_when_a_replay_begins_is_no_other_error(monkeypatch):
    block, x = Block(), torch.randn(3, 4)
    loss = checkpoint(block, x).sum()

    def interrupted(function):
        raise KeyboardInterrupt

    monkeypatch.setattr(call_of_regions, "runs_compiled_code", interrupted)
    with nothing_left_behind(), pytest.raises(KeyboardInterrupt):
        loss.backward()
