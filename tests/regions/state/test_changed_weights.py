"""What changes between a forward and its backward: an error where eager autograd has one, or the right gradient."""
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.func import functional_call

from tests.helpers import Block, assert_equal, by_hand, plain, prefetched
from torchckpt import checkpoint, checkpoint_module
from torchckpt.errors import RecomputationError
from torchckpt.regions.state import layout
from torchckpt.testing import peak_bytes

IN_PLACE = "modified by an inplace operation"


def double(tensor):
    with torch.no_grad():
        tensor.mul_(2)


def block_of(*names):
    block = Block()
    return block, [dict(block.named_parameters())[name] for name in names]


def closed_over(block, x):
    return checkpoint(lambda x: block(x), x)


@pytest.mark.parametrize("name", ["first.weight", "first.bias", "second.weight", "second.bias"])
@pytest.mark.parametrize("way", [checkpoint, by_hand, lambda block, x: checkpoint(block.forward, x), closed_over])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_parameter_changed_in_place(name, way, requires_grad):
    block, (parameter,) = block_of(name)
    loss = way(block, torch.randn(3, 4, requires_grad=requires_grad)).sum()
    double(parameter)
    with pytest.raises(RecomputationError, match=IN_PLACE):
        loss.backward()


def test_error_names_the_parameter():
    block, (bias,) = block_of("first.bias")
    loss = checkpoint(block, torch.randn(3, 4)).sum()
    double(bias)
    with pytest.raises(RecomputationError) as caught:
        loss.backward()
    assert str(caught.value) == (
        "one of the variables needed for gradient computation has been modified by an inplace operation: the replay of "
        "region 'Block' reads Block.first.bias, [torch.FloatTensor [4]], which was changed in place after the forward\n"
        "  works:    optimizer.step(), or another change of weights and buffers, after the backward"
    )


def test_a_step_of_an_optimizer_between_forward_and_backward():
    block = Block()
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    block(torch.randn(3, 4)).sum().backward()
    loss = checkpoint(block, torch.randn(3, 4)).sum()
    optimizer.step()
    with pytest.raises(RecomputationError, match=IN_PLACE):
        loss.backward()


def test_what_was_recomputed_before_the_change_is_right_or_an_error_as_in_eager():
    block, (weight, bias) = block_of("second.weight", "first.bias")
    torch.manual_seed(1)
    expected = torch.autograd.grad(plain(block, torch.ones(3, 4)).sum(), bias)
    torch.manual_seed(1)
    loss = prefetched(block, torch.ones(3, 4)).sum()
    double(bias)  # nothing needs it any more
    assert torch.equal(torch.autograd.grad(loss, bias)[0], expected[0])
    loss = prefetched(block, torch.ones(3, 4)).sum()
    double(weight)
    with pytest.raises(RuntimeError, match=IN_PLACE):
        loss.backward()


class Half(nn.Module):
    """One method that uses one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def encode(self, x):
        return self.used(x).sin().exp()


@pytest.mark.parametrize("way", ["method", "closed over", "compiled"])
def test_what_the_region_does_not_read_may_change(way):
    """Where an optimizer steps in the backward, the layers behind are done when this one is replayed."""
    model, x = Half(), torch.randn(3, 4)
    if way == "compiled":
        model.used.compile(backend="eager")
    expected = torch.autograd.grad(model.encode(x).sum(), [model.used.weight])
    loss = checkpoint(model.encode if way == "method" else lambda x: model.encode(x), x).sum()
    double(model.other.weight)
    double(model.other.bias)
    assert torch.equal(torch.autograd.grad(loss, [model.used.weight])[0], expected[0])


@pytest.mark.parametrize("kind", ["leaf", "no leaf", "without gradient"])
@pytest.mark.parametrize("way", [checkpoint, by_hand])
def test_closed_over_tensor_changed_in_place(kind, way):
    x = torch.randn(4, requires_grad=True)
    w = torch.randn(4, requires_grad=kind != "without gradient")
    scale = w * 1 if kind == "no leaf" else w
    for call in plain, way:
        loss = call(lambda x: (x * scale).sin(), x).sum()
        double(scale)
        with pytest.raises(RuntimeError, match=IN_PLACE):
            loss.backward()


def test_what_a_region_changes_in_place_itself_is_right():
    def function(x):
        h = x * 2
        h.relu_()
        return (h * w).exp()

    x, w = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    expected = torch.autograd.grad(function(x).sum(), [x, w])
    assert all(map(torch.equal, torch.autograd.grad(checkpoint(function, x).sum(), [x, w]), expected))


def test_an_input_at_a_later_version_is_right(call):
    def program(call, x, w):
        h = (x * w).neg_().mul_(2)
        return call(lambda h: (h * w).sin().exp(), h)

    x, w = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    expected = torch.autograd.grad(program(plain, x, w).sum(), [x, w])
    assert all(map(torch.equal, torch.autograd.grad(program(call, x, w).sum(), [x, w]), expected))
    with torch.autograd.graph.save_on_cpu():
        output = program(call, x, w)
    assert all(map(torch.equal, torch.autograd.grad(output.sum(), [x, w]), expected))


def test_output_changed_in_place_is_right_where_the_region_alone_needs_it():
    """Eager autograd, which kept it, raises."""
    x = torch.randn(4, requires_grad=True)
    expected = torch.autograd.grad((x.sigmoid() * 2).sum(), x)
    output = checkpoint(torch.sigmoid, x)
    output.mul_(2)
    assert torch.equal(torch.autograd.grad(output.sum(), x)[0], expected[0])


# exchanged ------------------------------------------------------------------------------------------------------------


def weights_of(module, scale):
    return {name: (parameter.detach() * scale).requires_grad_() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("way", [plain, checkpoint, by_hand, prefetched, closed_over])
def test_functional_call(way):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x):
            return way(self.block, x)

    torch.manual_seed(0)
    model, x = Model(), torch.randn(3, 4)
    weights = weights_of(model, 2)
    own = list(model.parameters())
    torch.manual_seed(1)
    inner = {name.removeprefix("block."): weight for name, weight in weights.items()}
    expected = torch.autograd.grad(functional_call(model.block, inner, (x,)).sum(), list(weights.values()))
    torch.manual_seed(1)
    output = functional_call(model, weights, (x,))
    assert all(map(torch.equal, torch.autograd.grad(output.sum(), list(weights.values())), expected))
    assert all(map(torch.Tensor.is_set_to, own, model.parameters()))


def test_functional_call_of_a_checkpointed_module_with_weights_that_have_a_graph():
    """As in meta-learning: the weights of the second call come from the gradients of the first."""
    block, x = Block(), torch.randn(3, 4)

    def learn():
        torch.manual_seed(1)
        weights = dict(block.named_parameters())
        for _ in range(3):
            loss = functional_call(block, weights, (x,)).sin().sum()
            gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            weights = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients)}
        return torch.autograd.grad(functional_call(block, weights, (x,)).sum(), list(block.parameters()))

    expected = learn()
    with checkpoint_module(block):
        assert all(map(torch.equal, learn(), expected))


def test_functional_call_with_buffers():
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Sigmoid()).eval()
    x, other = torch.randn(3, 4), {"1.running_mean": torch.ones(4), "1.running_var": torch.full((4,), 3.0)}
    expected = torch.autograd.grad(functional_call(block, other, (x,)).sum(), list(block.parameters()))
    with checkpoint_module(block):
        output = functional_call(block, other, (x,))
        received = torch.autograd.grad(output.sum(), list(block.parameters()))
    assert all(map(torch.equal, received, expected))
    assert not block[1].running_mean.any()


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_parameter_that_another_took_the_place_of(name, call):
    layer, x = nn.Linear(4, 4), torch.randn(3, 4)
    module = nn.Sequential(layer, nn.Tanh(), nn.Sigmoid())
    first = getattr(layer, name)
    expected = torch.autograd.grad(module(x).sum(), first)
    output = call(module, x)
    second = nn.Parameter(torch.zeros_like(first))
    setattr(layer, name, second)
    assert torch.equal(torch.autograd.grad(output.sum(), first)[0], expected[0])
    assert getattr(layer, name) is second


def test_parameter_that_was_removed_is_an_error():
    layer, x = nn.Linear(4, 4), torch.randn(3, 4)
    loss = checkpoint(nn.Sequential(layer, nn.Sigmoid()), x).sum()
    del layer.bias
    with pytest.raises(RecomputationError, match=r"^the parameters of region 'Sequential' are not those"):
        loss.backward()


@pytest.mark.parametrize("way", ["copy", "data"])
def test_weights_averaged_between_steps(way):
    """As an evaluation with averaged weights does."""
    block, x = Block(), torch.randn(3, 4)
    for _ in range(2):
        torch.manual_seed(1)
        expected = torch.autograd.grad(block(x).sum(), list(block.parameters()))
        torch.manual_seed(1)
        received = torch.autograd.grad(checkpoint(block, x).sum(), list(block.parameters()))
        assert all(map(torch.equal, received, expected))
        for parameter in block.parameters():
            if way == "data":
                parameter.data = parameter.data * 0.9
            else:
                double(parameter)


class Layers(nn.ModuleList):
    """Regions whose functions close over all layers, and call one."""

    def forward(self, x, call=None):
        for place in range(len(self)):
            x = checkpoint(lambda x, place=place: self[place](x if call is None else call(x)).sin(), x)
        return x


def step_in_backward(parameter):
    with torch.no_grad():
        parameter.sub_(parameter.grad, alpha=0.1)


def test_layers_that_are_updated_in_the_backward_cost_no_replay_of_another_a_search(monkeypatch):
    """The names of all parameters were looked for in each replay: a step of 48 layers took 7 s in place of 30 ms."""
    layers, asked = Layers(nn.Linear(4, 4) for _ in range(4)), []
    monkeypatch.setattr(layout.Layout, "path_of", lambda *_: asked.append(1))
    for parameter in layers.parameters():
        parameter.register_post_accumulate_grad_hook(step_in_backward)
    layers(torch.randn(3, 4)).sum().backward()
    assert not asked


def test_code_is_not_compiled_again_where_other_layers_are_updated_in_the_backward():
    layers, counter = Layers(nn.Linear(4, 4) for _ in range(3)), CompileCounter()
    for parameter in layers.parameters():
        parameter.register_post_accumulate_grad_hook(step_in_backward)
    compiled = torch.compile(lambda x: x.sin() * x, backend=counter)
    for _ in range(2):
        layers(torch.randn(3, 4, requires_grad=True), compiled).sum().backward()
    assert counter.frame_count == 1


def test_regions_that_reach_an_embedding_share_the_copy_of_its_weight():
    model, x = Layers(nn.Linear(4, 4) for _ in range(8)), torch.randn(3, 4, requires_grad=True)
    model[0].words = nn.Embedding(1000, 100, max_norm=1.0)
    assert peak_bytes(lambda: model(x).sum().backward(), "cpu") < 2 * model[0].words.weight.nbytes


@pytest.mark.parametrize("way", [checkpoint, by_hand, prefetched, closed_over])
@pytest.mark.parametrize("is_trained", [False, True])
def test_what_is_frozen_or_trained_after_the_forward_does_not_change_the_replay(way, is_trained):
    found = []
    for call in (plain, way):
        torch.manual_seed(1)
        block, (weight, bias) = block_of("first.weight", "second.bias")
        x = torch.randn(3, 4, requires_grad=True)
        for parameter in (weight, bias):
            parameter.requires_grad_(is_trained)
        loss = call(block, x).sum()
        for parameter in (weight, bias):
            parameter.requires_grad_(not is_trained)
        loss.backward()
        assert weight.requires_grad is bias.requires_grad is not is_trained
        found.append([x.grad, *(parameter.grad for parameter in block.parameters())])
    assert_equal(found[1], found[0])


def test_a_parameter_that_is_frozen_and_changed_in_place_is_an_error():
    block, (weight,) = block_of("second.weight")
    loss = checkpoint(block, torch.randn(3, 4)).sum()
    double(weight.requires_grad_(False))
    with pytest.raises(RecomputationError, match=IN_PLACE):
        loss.backward()
    assert not weight.requires_grad
