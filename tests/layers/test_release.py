"""Nothing holds a model, or what counts its steps, once the handle is removed or the model is dropped."""
from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import nn

import torchckpt
from tests.helpers import is_collected
from tests.layers.models import Model, Wide
from tests.slow import few
from torchckpt.layers.count import Counter
from torchckpt.regions.private import dispatch_modes_are_active


class Failing(Wide):
    fails = ""

    def forward(self, x):
        if self.fails and torchckpt.is_recomputing() == (self.fails == "replay"):
            raise ZeroDivisionError
        return super().forward(x)


def forward(model, x):
    model(x)


def step(model, x):
    model(x).square().mean().backward()


def step_with(model, x, fails):
    model.layers[2].fails = fails
    with pytest.raises(ZeroDivisionError):
        step(model, x)
    model.layers[2].fails = ""


def fails_in_a_forward(model, x):
    step_with(model, x, "forward")


def fails_in_a_replay(model, x):
    step_with(model, x, "replay")


def fails_in_a_hook(model, x):
    with model.layers[2].register_forward_hook(lambda *_: 1 / 0):
        with pytest.raises(ZeroDivisionError):
            model(x)


def fails_in_a_backward_after_the_replays(model, x):
    y = model(x.requires_grad_())
    x.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()


def steps(model, x):
    for _ in range(4):
        step(model, x)


def step_and_forward(model, x):
    step(model, x)
    model(x)


def evaluation_after_a_forward(model, x):
    model(x)
    with torch.no_grad():
        model(x)


def forward_that_is_held(model, x):
    return model(x)


def step_that_is_held(model, x):
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    return loss


ENDS = [
    forward, step, steps, step_and_forward, fails_in_a_forward, fails_in_a_replay, fails_in_a_hook,
    fails_in_a_backward_after_the_replays, evaluation_after_a_forward, forward_that_is_held, step_that_is_held,
]  # fmt: skip


def is_counted():
    """Whether a counter is left. Autograd's thread for a device lets go of a backward a moment after its end."""
    for _ in range(100):
        gc.collect()
        if not any(type(found) is Counter for found in gc.get_objects()):
            return False
        threading.Event().wait(0.01)
    return True


def begun(end, device, compiled):
    """A model with a budget, after what ``end`` does, and what of it the loop holds."""
    model = Model([Failing(16, 32) for _ in range(4)]).to(device)
    handle = torchckpt.checkpoint_layers(model, "layers.*", budget="1GiB")
    if compiled:
        for layer in model.layers:
            layer.compile(backend="eager")
    return model, handle, end(model, torch.randn(4, 8, 16, device=device))


def assert_released(end, device, compiled=False):
    for is_removed, handle_stays in ((True, True), (False, False), (False, True)):
        model, handle, held = begun(end, device, compiled)
        root = weakref.ref(model)
        if is_removed:
            handle.remove()
            assert dispatch_modes_are_active() == 0
            assert not is_counted()
            assert root() is not None
        if not handle_stays:
            del handle
        del model
        if compiled:
            torch._dynamo.reset()
        assert is_collected(root)
        assert dispatch_modes_are_active() == 0
        del held
        if handle_stays:
            del handle
        assert not is_counted()


@few(1)
@pytest.mark.parametrize("end", ENDS)
def test_on_the_cpu(end):
    assert_released(end, "cpu")


@few(1)
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("end", [forward, step, steps, fails_in_a_hook, forward_that_is_held])
def test_with_compiled_layers(end):
    assert_released(end, "cpu", compiled=True)


@few(1)
@pytest.mark.accelerator
@pytest.mark.parametrize("end", ENDS)
def test_on_a_device(end, accelerator):
    assert_released(end, accelerator)


@pytest.mark.accelerator
def test_the_memory_of_the_device_is_free_again(accelerator):
    gc.collect()
    before = torch.accelerator.memory_allocated()
    begun(steps, accelerator, False)
    assert not is_counted()
    assert torch.accelerator.memory_allocated() == before


def test_a_step_goes_on_uncounted_after_remove():
    """What waits for its backward is not changed."""
    _, handle, y = begun(forward_that_is_held, "cpu", False)
    handle.remove()
    with torchckpt.testing.count_recomputes() as counted:
        y.square().mean().backward()
    assert counted.total == 4
    assert dispatch_modes_are_active() == 0


def test_a_thread_that_has_counted_a_step_and_ends():
    models = []

    def work():
        model, _, _ = begun(forward, "cpu", False)
        models.append(weakref.ref(model))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not is_counted()
    assert models[0]() is None


def test_a_model_is_freed_without_a_collection():
    """No circle holds it."""
    gc.collect()
    gc.disable()
    try:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)))
        handle = torchckpt.checkpoint_layers(model, "*", budget="1GiB")
        for _ in range(3):
            model(torch.randn(4, 16)).sum().backward()
        root = weakref.ref(model)
        del model, handle
        assert root() is None
    finally:
        gc.enable()
