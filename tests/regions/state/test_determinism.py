"""Determinism: a replay is held to its forward, and a gradient that would be wrong is an error."""
from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from torchckpt import Checkpointing, checkpoint, checkpoint_module, is_recomputing
from torchckpt.errors import RecomputationError

# functions whose replay differs from their forward --------------------------------------------------------------------


def fewer(x):
    h = x.sin()
    return h if is_recomputing() else h.exp()


def more_between(x):
    h = x.sin()
    if is_recomputing():
        h = torch.cat([h[:2].sin(), h[2:]])
    return h.exp()


def more_at_the_end(x):
    h = x.sin().exp()
    return h.sin() if is_recomputing() else h


def other_shape(x):
    return (x[:2] if is_recomputing() else x).sin().sum()


def other_dtype(x):
    return (x.double() if is_recomputing() else x).sin().float()


def other_values(x):
    return (x * 2 if is_recomputing() else x).sin().exp()


class Uncertain(nn.Module):
    def forward(self, x):
        return other_shape(x)

    def method(self, x):
        return other_shape(x)


class Holder:
    class Inner(Uncertain):
        pass


def error_of(function, *args, **options) -> str:
    loss = checkpoint(function, *args, **options).sum()
    with pytest.raises(RecomputationError) as caught:
        loss.backward()
    return str(caught.value)


@pytest.fixture
def x(device):
    return torch.linspace(0, 1, 4, device=device, requires_grad=True)


# the message ----------------------------------------------------------------------------------------------------------


def test_message_is_literally_this():
    assert error_of(fewer, torch.ones(4, requires_grad=True)) == (
        "the replay of region 'fewer' did not save what its forward saved: tensor 2 of 2\n"
        "  forward saved: float32 (4,) on cpu, for Exp; "
        "torch.utils.checkpoint.set_checkpoint_debug_enabled(True) shows its line\n"
        "  replay saved:  nothing, it had ended\n"
        "  likely:        (1) work that the first call alone does (it fills a cache); (2) state that the function "
        "changes itself (a counter, a cache); (3) a generator that no replay sets\n"
        "  works:         (1) do it before, or in each call; (2) change it under "
        "`if not torchckpt.is_recomputing():`; (3) checkpoint(function, x, generators=(generator,))"
    )


@pytest.mark.parametrize(
    ("function", "place", "forward", "replay"),
    [
        (fewer, "2 of 2", "float32 (4,)", None),
        (more_between, "2 of 2", "float32 (4,)", "float32 (2,)"),
        (other_shape, "1 of 1", "float32 (4,)", "float32 (2,)"),
        (other_dtype, "1 of 1", "float32 (4,)", "float64 (4,)"),
    ],
)
@pytest.mark.parametrize("check", ["default", "values"])
def test_difference_is_named_with_its_position_and_both_descriptions(function, place, forward, replay, check, x):
    message = error_of(function, x, determinism_check=check)
    assert f"region '{function.__name__}' did not save" in message
    assert f"tensor {place}\n" in message
    assert f"forward saved: {forward} on {x.device}, for " in message
    assert f"replay saved:  {f'{replay} on {x.device}, for ' if replay else 'nothing, it had ended'}" in message


def test_more_at_the_end_is_an_error_where_the_replay_runs_to_its_end(x):
    message = error_of(more_at_the_end, x, early_stop=False)
    assert "tensor 3 of 2\n" in message
    assert "forward saved: nothing, it had ended\n" in message
    assert f"replay saved:  float32 (4,) on {x.device}, for Sin at " in message


def test_more_at_the_end_is_never_reached_with_early_stop(x):
    (gradient,) = torch.autograd.grad(checkpoint(more_at_the_end, x).sum(), x)
    (expected,) = torch.autograd.grad(more_at_the_end(x).sum(), x)
    assert torch.equal(gradient, expected)


@pytest.mark.accelerator
def test_other_device_is_an_error_that_names_both(accelerator):
    def other_device(x):
        return (x.cpu() if is_recomputing() else x).sin().to(accelerator)

    message = error_of(other_device, torch.ones(4, device=accelerator, requires_grad=True))
    assert f"forward saved: float32 (4,) on {accelerator}, for Sin" in message
    assert "replay saved:  float32 (4,) on cpu, for Sin at " in message
    assert "a module that was moved since the forward" in message


def checkpointed(module):
    checkpoint_module(module)
    return module


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (other_shape, "other_shape"),
        (functools.partial(other_shape), "other_shape"),
        (functools.partial(functools.partial(other_shape)), "other_shape"),
        (Uncertain(), "Uncertain"),
        (Holder.Inner(), "Holder.Inner"),
        (Uncertain().method, "Uncertain.method"),
        (lambda x: other_shape(x), "<lambda>"),
    ],
)
def test_region_is_called_by_function_method_or_class(function, name):
    assert f"the replay of region '{name}' " in error_of(function, torch.ones(4, requires_grad=True))


def test_region_of_a_checkpointed_module_is_called_by_the_forward_of_its_class():
    loss = checkpointed(Uncertain())(torch.ones(4, requires_grad=True))
    with pytest.raises(RecomputationError, match=r"the replay of region 'Uncertain\.forward' did not save"):
        loss.backward()


def test_region_by_hand_is_called_by_its_function():
    region = Checkpointing(other_shape, torch.ones(4, requires_grad=True))
    region.checkpoint()
    with pytest.raises(RecomputationError, match="the replay of region 'other_shape' did not save"):
        region.prefetch()


def test_inner_region_is_the_one_that_is_named():
    def inner(x):
        return other_shape(x)

    # An outer replay ends at the inner region's boundary: the inner one is replayed from there, by itself.
    message = error_of(lambda x: checkpoint(inner, x.exp()), torch.ones(4, requires_grad=True))
    assert "the replay of region 'test_inner_region_is_the_one_that_is_named.<locals>.inner' did not save" in message


# determinism_check="values" -------------------------------------------------------------------------------------------


class Counting(nn.Module):
    def __init__(self, guarded):
        super().__init__()
        self.guarded, self.calls = guarded, 0

    def forward(self, x):
        if not (self.guarded and is_recomputing()):
            self.calls += 1
        return (x * self.calls).sin()


def test_values_finds_a_changed_parameter(device):
    linear = nn.Linear(4, 4, device=device)
    loss = checkpoint(linear, torch.ones(2, 4, device=device), determinism_check="values").sin().sum()
    loss.backward()  # as long as nothing changes, it is silent

    bias = nn.Parameter(torch.ones(4, device=device))

    def block(x):
        return (linear(x.sin()) + bias).sin()

    loss = checkpoint(block, torch.ones(2, 4, device=device), determinism_check="values").sum()
    with torch.no_grad():
        bias.add_(1)
    with pytest.raises(RecomputationError, match=r"tensor \d of \d.*\n.*\n.*, with other values, for ") as caught:
        loss.backward()
    assert "a parameter, buffer or global that changed since the forward" in str(caught.value)


def test_values_finds_a_parameter_changed_through_its_data(device):
    scale = nn.Parameter(torch.ones(4, device=device))
    loss = checkpoint(lambda x: x.sin() * scale, torch.ones(4, device=device), determinism_check="values").sum()
    scale.data = scale.data * 2
    (sum_of_gradients,) = torch.autograd.grad(loss, scale)  # d/d scale = sin(x), which does not depend on scale
    assert torch.equal(sum_of_gradients, torch.ones(4, device=device).sin())

    loss = checkpoint(lambda x: (x * scale).sin(), torch.ones(4, device=device), determinism_check="values").sum()
    scale.data = scale.data * 2
    with pytest.raises(RecomputationError, match="with other values"):
        loss.backward()


def test_values_finds_an_unguarded_counter(x):
    loss = checkpoint(Counting(guarded=False), x, determinism_check="values").sum()
    with pytest.raises(RecomputationError, match=r"if not torchckpt\.is_recomputing\(\)"):
        loss.backward()


def test_values_is_silent_about_a_guarded_counter(x):
    (gradient,) = torch.autograd.grad(checkpoint(Counting(guarded=True), x, determinism_check="values").sum(), x)
    (expected,) = torch.autograd.grad(Counting(guarded=True)(x).sum(), x)
    assert torch.equal(gradient, expected)


def noisy(generator):
    return lambda x: (x * torch.rand(x.shape, generator=generator, device=x.device)).sin()


def test_values_finds_a_generator_that_nothing_names(x):
    of_device = {x.device: torch.Generator(x.device).manual_seed(1)}.get
    loss = checkpoint(lambda y: noisy(of_device(y.device))(y), x, determinism_check="values").sum()
    with pytest.raises(RecomputationError, match=r"generators=\(generator,\)"):
        loss.backward()


def test_values_is_silent_about_a_generator_that_was_named(x):
    generator = torch.Generator(x.device).manual_seed(1)
    loss = checkpoint(noisy(generator), x, generators=(generator,), determinism_check="values").sum()
    (gradient,) = torch.autograd.grad(loss, x)
    (expected,) = torch.autograd.grad(noisy(torch.Generator(x.device).manual_seed(1))(x).sum(), x)
    assert torch.equal(gradient, expected)


def test_values_finds_random_numbers_where_no_snapshot_was_taken(x):
    loss = checkpoint(noisy(None), x, preserve_rng_state=False, determinism_check="values").sum()
    with pytest.raises(RecomputationError, match="with other values"):
        loss.backward()


NORMS = [nn.BatchNorm1d(4), nn.InstanceNorm1d(4, track_running_stats=True)]


@pytest.mark.parametrize("norm", NORMS, ids=["batch", "instance"])
def test_values_is_silent_about_running_statistics(norm, device):
    x, norm = torch.randn(3, 4, 5, device=device, requires_grad=True), norm.to(device)
    (gradient,) = torch.autograd.grad(checkpoint(norm, x, determinism_check="values").sin().sum(), x)
    (expected,) = torch.autograd.grad(norm(x).sin().sum(), x)
    assert torch.equal(gradient, expected)


def test_values_says_which_tensor_differed_first(x):
    def third(x):
        h = x.sin().exp()
        return (h * 2 if is_recomputing() else h).tanh().exp()

    message = error_of(third, x, determinism_check="values")
    assert "tensor 3 of 4\n" in message
    assert f"forward saved: float32 (4,) on {x.device}, for Tanh" in message
    assert f"replay saved:  float32 (4,) on {x.device}, with other values, for Tanh at " in message


def test_values_is_silent_about_equal_replays(x):
    def block(x):
        h = nn.functional.dropout(x.sin(), 0.5)
        return h.exp() * (x > 0.5) + h.to(torch.complex64).abs() + h[::2].repeat(2)

    (gradient,) = torch.autograd.grad(checkpoint(block, x, determinism_check="values").sum(), x)
    assert gradient.shape == x.shape


def test_default_does_not_read_values(x):
    checkpoint(other_values, x).sum().backward()


@pytest.mark.parametrize("function", [other_dtype, other_values])
def test_none_is_silent(function, x):
    checkpoint(function, x, determinism_check="none").sum().backward()
    assert x.grad.shape == x.shape


def test_none_cannot_be_silent_about_a_tensor_that_is_missing(x):
    assert "replay saved:  nothing, it had ended" in error_of(fewer, x, determinism_check="none")


# functions that catch exceptions --------------------------------------------------------------------------------------


def test_function_that_catches_every_exception_cannot_hide_a_difference(x):
    def careful(x):
        h = x.sin()
        try:
            h = h[:2].exp() if is_recomputing() else h.exp()
        except Exception:
            h = h * 2
        return h.tanh()

    assert "forward saved: float32 (4,)" in error_of(careful, x)


def test_function_that_catches_every_exception_cannot_hide_other_values(x):
    def careful(x):
        try:
            return other_values(x).tanh()
        except Exception:
            return x.sin().exp().tanh()

    assert "with other values" in error_of(careful, x, determinism_check="values")


def test_function_that_catches_every_exception_and_saves_the_right_number_instead_cannot_hide_a_difference(x):
    def careful(x):
        try:
            h = x[:2].sin() if is_recomputing() else x.sin()
        except Exception:
            h = x.sin()
        return h.exp()

    assert "replay saved:  float32 (2,)" in error_of(careful, x)


def test_function_that_catches_every_exception_with_a_fallback_is_equal(x):
    def careful(x):
        try:
            h = x.sin().exp()
        except Exception:
            h = x.cos()
        return h

    (gradient,) = torch.autograd.grad(checkpoint(careful, x).sum(), x)
    (expected,) = torch.autograd.grad(careful(x).sum(), x)
    assert torch.equal(gradient, expected)


def test_function_that_retries_on_every_exception_is_equal(x):
    def persistent(x):
        for _ in range(3):
            try:
                return x.sin().exp()
            except Exception:
                continue
        raise RuntimeError("tried three times")

    (gradient,) = torch.autograd.grad(checkpoint(persistent, x).sum(), x)
    (expected,) = torch.autograd.grad(persistent(x).sum(), x)
    assert torch.equal(gradient, expected)


def test_tensor_from_outside_that_the_function_writes_is_an_error_that_says_where_to_put_it(x):
    buffer, weight = torch.empty_like(x), nn.Parameter(torch.ones_like(x))

    def writes_a_buffer(x):
        torch.sin(x.detach(), out=buffer)
        return (x * buffer).exp()

    def clamps_a_weight(x):
        with torch.no_grad():
            weight.clamp_(-1, 1)
        return (x * weight).exp()

    for function in (writes_a_buffer, clamps_a_weight):
        message = error_of(function, x)
        assert "it is at version" in message
        assert "a tensor from outside that the function itself writes (out=, clamp_)" in message


def test_buffer_of_a_module_that_the_function_writes_is_equal(x):
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("buffer", torch.empty_like(x))

        def forward(self, x):
            torch.sin(x.detach(), out=self.buffer)
            return (x * self.buffer).exp()

    (gradient,) = torch.autograd.grad(checkpoint(Writes(), x).sum(), x)
    (expected,) = torch.autograd.grad(Writes()(x).sum(), x)
    assert torch.equal(gradient, expected)
