"""Another thread that evaluates the model has no part in the step that is running."""
from __future__ import annotations

import threading

import pytest
import torch

from tests.layers.models import gradients, plain_gradients
from tests.slow import few
from torchckpt import checkpoint_layers
from torchckpt.regions.private import dispatch_modes_are_active


def elsewhere(call):
    """Call it in another thread, to its end."""
    errors = []

    def work():
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors


def evaluate(model, x):
    with torch.no_grad():
        model(x)


@few(1)
@pytest.mark.parametrize("place", ["first", "layers.0.norm", "layers.1.norm"])
@pytest.mark.parametrize("steps", [range(4), (0,), (2,)])
def test_an_evaluation_while_a_step_runs(model, x, place, steps):
    is_on = []

    def hook(*_):
        if is_on:
            is_on.clear()
            elsewhere(lambda: evaluate(model, x))

    expected = plain_gradients(model, x)
    model.get_submodule(place).register_forward_hook(hook)
    handle = checkpoint_layers(model, "layers.*", budget="100%")
    for at in range(4):
        is_on[:] = [True] if at in steps else []
        found = gradients(model, x)
        assert at in steps or all(map(torch.equal, found, expected))  # both draw from one generator
        assert handle.plan is None if at == 0 else len(handle.plan.took.calls) == len(model.layers)
    handle.remove()
    assert dispatch_modes_are_active() == 0


def test_a_layer_that_is_looked_at_while_a_step_goes_on(model, x):
    """As if the other thread were stopped between two instructions."""
    class Script(list):
        def __len__(self):
            return super().__len__() + 1  # the step is one call further by then

    handle = checkpoint_layers(model, "layers.*", budget="100%")
    for _ in range(4):
        gradients(model, x)
    steps = handle._steps
    model(x)
    assert len(steps.step.script) == len(model.layers)
    steps.step.script = Script(steps.step.script)
    elsewhere(lambda: evaluate(model.layers[1], x))
    handle.remove()
