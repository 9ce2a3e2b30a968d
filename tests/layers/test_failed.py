"""Steps of which a backward has raised an error that the loop catches: the next step follows the plan again."""
from __future__ import annotations

import pytest
import torch

import torchckpt
from tests.slow import few, slow
from torchckpt.testing import count_recomputes

X = torch.randn(4, 16, 16)


def loss_of(model):
    return model(X).square().mean()


def step(model):
    loss_of(model).backward()


def replays(model):
    with count_recomputes() as counted:
        step(model)
    return counted.total


def failing(module):
    """A context in which the backward of ``module`` raises an error."""
    return module.weight.register_hook(lambda _: 1 / 0)


def drops_the_graph(model, module):
    with failing(module), pytest.raises(ZeroDivisionError):
        step(model)


def holds_the_loss(model, module):
    loss = loss_of(model)
    with failing(module), pytest.raises(ZeroDivisionError):
        loss.backward()
    return loss


def holds_the_error(model, module):
    with failing(module), pytest.raises(ZeroDivisionError) as held:
        step(model)
    return held


def fails_in_the_second_backward(model, module):
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    with failing(module), pytest.raises(ZeroDivisionError):
        loss.backward()
    return loss


FAILS = [drops_the_graph, holds_the_loss, holds_the_error, fails_in_the_second_backward]


@few(1)
@pytest.mark.parametrize("at", [0, *slow([3]), 5])
@pytest.mark.parametrize("fails", FAILS)
def test_the_next_step_follows_the_plan(model, fails, at):
    with torchckpt.checkpoint_layers(model, "layers.*", budget="70%") as handle:
        first, planned = replays(model), replays(model)
        assert first == 6 > planned == 6 - len(handle.plan.kept) > 0
        for _ in range(3):
            held = fails(model, model.layers[at].parts[0])
            assert replays(model) == planned
            del held
            assert replays(model) == planned


@few(1)
@pytest.mark.parametrize("fails", FAILS)
def test_a_counted_step_is_counted_again(model, fails):
    with torchckpt.checkpoint_layers(model, "layers.*", budget="70%") as handle:
        held = fails(model, model.layers[3].parts[0])
        assert replays(model) == 6
        assert replays(model) == 6 - len(handle.plan.kept)
        del held


def test_the_bytes_of_a_plan_are_counted_in_the_next_step(model):
    with torchckpt.checkpoint_layers(model, "layers.*", budget="70%") as handle:
        step(model)
        step(model)
        drops_the_graph(model, model.layers[3].parts[0])  # the step that shows what a plan takes
        assert handle.plan.measured_peak_bytes is None
        step(model)
        step(model)
        assert handle.plan.measured_peak_bytes == pytest.approx(handle.plan.peak_bytes, rel=0.01)


def test_a_step_that_never_reaches_all_calls_has_a_plan_of_its_own(model):
    """Nothing fails in it."""
    def half(model):
        seen = []
        with model.layers[3].register_forward_hook(lambda _, inputs, output: seen.append(output)):
            loss = loss_of(model)
        with count_recomputes() as counted:
            torch.autograd.grad(loss, seen)
        return counted.total

    with torchckpt.checkpoint_layers(model, "layers.*", budget="1GiB"):
        assert [replays(model), replays(model)] == [6, 0]
        assert [half(model) for _ in range(4)] == [0, 2, 0, 0]
        assert [replays(model) for _ in range(12)][-2:] == [0, 0]
