"""Running statistics inside regions: updated once per forward, as without one."""
from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook as any_global_hook
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from tests.helpers import assert_equal, in_threads, leaf, plain, run
from tests.settings import without_collector
from tests.slow import few
from torchckpt import Checkpointing, checkpoint, checkpoint_module, is_recomputing

LAYERS = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(4), (5, 4)),
    "BatchNorm1d of sequences": (lambda: nn.BatchNorm1d(4), (5, 4, 3)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(4), (5, 4, 3, 3)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(4), (5, 4, 2, 2, 2)),
    "LazyBatchNorm1d": (lambda: nn.LazyBatchNorm1d(), (5, 4)),
    "cumulative average": (lambda: nn.BatchNorm1d(4, momentum=None), (5, 4)),
    "momentum of 1": (lambda: nn.BatchNorm1d(4, momentum=1.0), (5, 4)),
    "without weights": (lambda: nn.BatchNorm1d(4, affine=False), (5, 4)),
    "without statistics": (lambda: nn.BatchNorm1d(4, track_running_stats=False), (5, 4)),
    "frozen weights": (lambda: nn.BatchNorm1d(4).requires_grad_(False), (5, 4)),
    "eval mode": (lambda: nn.BatchNorm1d(4).eval(), (5, 4)),
    "SyncBatchNorm": (lambda: nn.SyncBatchNorm(4), (5, 4)),
    "SyncBatchNorm in eval mode": (lambda: nn.SyncBatchNorm(4).eval(), (5, 4)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(4, track_running_stats=True), (5, 4, 3)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(4, track_running_stats=True, affine=True), (5, 4, 3, 3)),
    "InstanceNorm without statistics": (lambda: nn.InstanceNorm2d(4), (5, 4, 3, 3)),
    "LayerNorm": (lambda: nn.LayerNorm(4), (5, 4)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), (5, 4, 3)),
}


def assert_statistics_equal(call, program, module, *inputs):
    """``program(call, module, *inputs)``, run twice, gives what plain calls give; buffers as well."""
    twin, own = copy.deepcopy(module), dict(module.named_buffers())

    def observed(call, module):
        runs = [run(program, call, module, *inputs, modules=[module]) for _ in range(2)]
        return runs, dict(module.named_buffers())

    assert_equal(observed(call, module), observed(plain, twin))
    for name, buffer in module.named_buffers():
        assert own.get(name, buffer) is buffer


@few(10)
@pytest.mark.parametrize(("make", "shape"), LAYERS.values(), ids=LAYERS)
def test_layer(call, device, make, shape):
    def program(call, layer, x):
        return call(lambda x: nn.functional.dropout(layer(x.exp()), 0.5).sin(), x)

    with device:
        layer = make()
    if isinstance(layer, nn.modules.lazy.LazyModuleMixin):
        layer(torch.randn(shape, device=device))
    assert_statistics_equal(call, program, layer, leaf(*shape, device=device))


def test_lazy_layer_that_the_region_initializes(device):
    layer, twin, x = nn.LazyBatchNorm1d(device=device), nn.LazyBatchNorm1d(device=device), leaf(5, 4, device=device)
    received = torch.autograd.grad(checkpoint(layer, x).exp().sum(), [x, layer.weight])
    assert_equal(received, torch.autograd.grad(twin(x).exp().sum(), [x, twin.weight]))
    assert_equal(dict(layer.named_buffers()), dict(twin.named_buffers()))


def test_layer_counts_its_forwards(call, device):
    layer = nn.BatchNorm1d(4).to(device)
    for _ in range(3):
        call(layer, leaf(5, 4, device=device)).sum().backward()
    assert layer.num_batches_tracked == 3


def test_layer_called_twice_in_a_region(call, device):
    def program(call, layer, x):
        return call(lambda x: layer(layer(x.exp()) * 3 + 1).sin(), x)

    assert_statistics_equal(call, program, nn.BatchNorm1d(4).to(device), leaf(5, 4, device=device))


def test_layer_in_two_regions(call, device):
    def program(call, layer, x):
        return call(layer, x) + call(layer, x.exp())

    assert_statistics_equal(call, program, nn.BatchNorm1d(4).to(device), leaf(5, 4, device=device))


def test_layer_inside_and_outside_a_region(call, device):
    def program(call, layer, x):
        return layer(call(lambda x: layer(x).exp(), x))

    assert_statistics_equal(call, program, nn.BatchNorm1d(4).to(device), leaf(5, 4, device=device))


def test_layer_under_no_grad_inside_the_region(call, device):
    def program(call, layer, x):
        def function(x):
            with torch.no_grad():
                scale = layer(x.exp())
            return (x * scale).sin() * scale

        return call(function, x)

    assert_statistics_equal(call, program, nn.BatchNorm1d(4).to(device), leaf(5, 4, device=device))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_layer_where_gradients_are_off(device, mode):
    layer = nn.BatchNorm1d(4).to(device)
    with mode():
        checkpoint(layer, torch.randn(5, 4, device=device))
    assert layer.num_batches_tracked == 1


def test_layers_in_nested_regions(device):
    layers = nn.ModuleList(nn.BatchNorm1d(4) for _ in range(3)).to(device)

    def program(call, layers, x):
        def level(x, depth):
            hidden = layers[depth](x.exp())
            return call(level, hidden, depth + 1).sin() if depth < 2 else hidden

        return call(level, x, 0)

    assert_statistics_equal(checkpoint, program, layers, leaf(5, 4, device=device))


def test_one_layer_at_every_depth(device):
    def program(call, layer, x):
        def level(x, depth):
            hidden = layer(x.exp())
            return call(level, hidden, depth - 1).sin() if depth else hidden

        return call(level, x, 2)

    assert_statistics_equal(checkpoint, program, nn.BatchNorm1d(4).to(device), leaf(5, 4, device=device))


def test_replay_that_raises_leaves_the_statistics(device):
    layer = nn.BatchNorm1d(4).to(device)

    def function(x):
        hidden = layer(x.exp())
        if is_recomputing():
            raise KeyError
        return hidden.sin()

    loss = checkpoint(function, leaf(5, 4, device=device)).sum()
    own, after_forward = dict(layer.named_buffers()), {name: b.clone() for name, b in layer.named_buffers()}
    with pytest.raises(KeyError):
        loss.backward()
    assert_equal(dict(layer.named_buffers()), after_forward)
    assert all(own[name] is buffer for name, buffer in layer.named_buffers())


def test_statistics_that_the_caller_changes_between_forward_and_backward_stay(device):
    layer = nn.BatchNorm1d(4).to(device)
    loss = checkpoint(lambda x: layer(x.exp()).sin(), leaf(5, 4, device=device)).sum()
    layer.reset_running_stats()
    loss.backward()
    assert_equal(dict(layer.named_buffers()), dict(nn.BatchNorm1d(4).to(device).named_buffers()))


# compiled -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [lambda layer: layer.forward, checkpoint_module], ids=["forward", "checkpoint_module"])
def test_layer_that_is_the_region_itself(device, call):
    layer, x = nn.BatchNorm1d(4).to(device), leaf(5, 4, device=device)
    own = dict(layer.named_buffers())
    function = call(layer)
    outputs = checkpoint(function, x) if callable(function) else layer(x)
    outputs.exp().sum().backward()
    assert layer.num_batches_tracked == 1
    assert all(buffer is own[name] for name, buffer in layer.named_buffers())


class Net(nn.Module):
    """A norm layer between two layers without one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.linear(x)).tanh()


def compiled_module(model):
    return torch.compile(model, backend="aot_eager")


def compiled_in_place(model):
    model.compile(backend="aot_eager")
    return model


def compiled_function(model):
    return torch.compile(lambda x: model(x), backend="aot_eager")


@few(1)
@pytest.mark.usefixtures("fresh_dynamo")
def test_layer_in_a_compiled_module_inside_a_region(device):
    def program(call, model, x):
        function = compiled_module(model)
        return call(lambda x: function(x).sin(), x)

    assert_statistics_equal(checkpoint, program, Net().to(device), leaf(5, 4, device=device))


@few(1)
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("compiled", [compiled_in_place, compiled_function])
def test_layer_in_other_compiled_code(device, compiled):
    model = Net().to(device)
    function = compiled(model)
    checkpoint(lambda x: function(x).sin(), leaf(5, 4, device=device)).sum().backward()
    assert model.norm.num_batches_tracked == 1


class Owner:
    """An object that is no module, and whose layer is out of sight of the region's function."""

    def __init__(self, layer):
        self.parts = {"inside": [layer]}

    def function(self):
        return lambda x: self.parts["inside"][0](x.exp()).sin()


def test_layer_that_is_found_when_autograd_saves_its_statistics(call, device):
    def program(call, layer, x):
        return call(Owner(layer).function(), x)

    for layer in nn.BatchNorm1d(4), nn.InstanceNorm1d(4, track_running_stats=True):
        assert_statistics_equal(call, program, layer.to(device), leaf(5, 4, 3, device=device))


@pytest.mark.parametrize("values", ["default", "values"])
def test_layer_in_a_region_that_is_replayed_inside_of_another(device, values):
    def program(call, layer, x):
        if call is plain:
            return layer(x.exp()).sin().cos()
        check = {"determinism_check": values}
        return call(lambda x: call(Owner(layer).function(), x, **check).cos(), x, **check)

    layer = nn.InstanceNorm1d(4, track_running_stats=True).to(device)
    assert_statistics_equal(checkpoint, program, layer, leaf(5, 4, 3, device=device))


# threads and hooks ----------------------------------------------------------------------------------------------------


def test_two_threads_replay_one_layer(device):
    layer = nn.BatchNorm1d(4).to(device)
    own = dict(layer.named_buffers())
    regions = [Checkpointing(lambda x: layer(x.exp()).sin(), leaf(5, 4, device=device)) for _ in range(8)]
    for region in regions:
        region.checkpoint()
    after_forwards = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    in_threads(*(region.prefetch for region in regions))
    assert_equal(dict(layer.named_buffers()), after_forwards)
    assert all(own[name] is buffer for name, buffer in layer.named_buffers())


def test_no_hook_is_left_behind(call, device):
    layer = nn.BatchNorm1d(4).to(device)
    call(layer, leaf(5, 4, device=device)).sum().backward()
    assert not any_global_hook()


def test_no_hook_is_left_behind_by_a_replay_that_raises(device):
    def function(x):
        if is_recomputing():
            raise KeyError
        return x.exp()

    with pytest.raises(KeyError):
        checkpoint(function, leaf(3, device=device)).sum().backward()
    assert not any_global_hook()


def test_global_hooks_of_the_caller_stay(device):
    events = []
    before = register_module_forward_pre_hook(lambda module, _: events.append(f"before {type(module).__name__}"))
    after = register_module_forward_hook(lambda module, _, __: events.append(f"after {type(module).__name__}"))
    layer = nn.BatchNorm1d(4).to(device)
    try:
        checkpoint(lambda x: layer(x.exp()).sin(), leaf(5, 4, device=device)).sum().backward()
        layer(torch.randn(5, 4, device=device))
    finally:
        before.remove()
        after.remove()
    assert events == ["before BatchNorm1d", "after BatchNorm1d"] * 3
    assert not any_global_hook()


def test_layer_is_not_kept_alive(device):
    layer = nn.BatchNorm1d(4).to(device)
    alive = weakref.ref(layer)
    checkpoint(layer, leaf(5, 4, device=device)).sum().backward()
    with without_collector():
        del layer
        assert alive() is None


class Bare(nn.Module):
    """Calls the forward of a layer, and not the layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, input):
        return self.layer.forward(input).sin()


@pytest.mark.parametrize("make", [nn.BatchNorm1d, lambda size: nn.InstanceNorm1d(size, track_running_stats=True)])
def test_layer_whose_bare_forward_is_called(call, device, make):
    module = Bare(make(4)).to(device)
    assert_statistics_equal(call, lambda call, module, x: call(module, x), module, leaf(5, 4, 3, device=device))


def test_data_and_frozen_weights_that_change_before_the_backward_are_an_error():
    data, layer = torch.randn(5, 4), nn.BatchNorm1d(4)
    output = checkpoint(lambda: layer(data))
    data.exp_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.square().sum().backward()
    layer.weight.requires_grad_(False)
    output = checkpoint(lambda x: layer(x), leaf(5, 4))
    layer.weight.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.square().sum().backward()
