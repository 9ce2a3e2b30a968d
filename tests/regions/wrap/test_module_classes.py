"""Checkpointed modules of classes of many kinds, and under torch's own ways to change a class."""
from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from tests.regions.modules import Block, Model, assert_recomputes_to_equal, checkpointed, step
from tests.slow import few
from torchckpt import checkpoint_module
from torchckpt.testing import count_recomputes


@pytest.fixture
def model():
    return Model()


def test_subclass_that_calls_super_is_one_region():
    class Doubled(Block):
        def forward(self, input, *, scale=1.0):
            return super().forward(input, scale=scale) * 2

    block = Doubled()
    expected, _ = step(copy.deepcopy(block))
    assert_recomputes_to_equal(checkpointed(block), expected)


def test_class_with_slots_works():
    class Slotted(nn.Module):
        __slots__ = ("factor",)

        def __init__(self):
            super().__init__()
            self.factor, self.linear = 3, nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x) * self.factor

    module = Slotted()
    expected, _ = step(module)
    assert_recomputes_to_equal(checkpointed(module), expected)
    assert module.factor == 3


def test_class_with_another_metaclass_works():
    class Meta(type):
        pass

    class Made(nn.Linear, metaclass=Meta):
        pass

    module = Made(4, 4)
    expected, _ = step(module)
    assert_recomputes_to_equal(checkpointed(module), expected)
    assert isinstance(type(module), Meta)


def test_class_that_registers_its_subclasses_registers_no_other():
    names = []

    class Registered(nn.Linear):
        def __init_subclass__(cls, *, name, **kwargs):
            super().__init_subclass__(**kwargs)
            names.append(name)

    class Layer(Registered, name="layer"):
        pass

    module = Layer(4, 4)
    expected, _ = step(module)
    assert_recomputes_to_equal(checkpointed(module), expected)
    assert names == ["layer"]


def test_module_list_keeps_its_items_and_is_checkpointed_item_by_item(model):
    for layer in model.layers:
        checkpoint_module(layer)
    model.layers.append(checkpointed(Block()))
    assert len(model.layers) == 3
    assert step(model)[1] == 3


def test_recurrent_module_with_a_tuple_of_outputs_works():
    lstm, x = nn.LSTM(4, 4), torch.randn(3, 2, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(lstm(x)[0].sum(), x)
    checkpoint_module(lstm)
    (gradient,) = torch.autograd.grad(lstm(x)[0].sum(), x)
    assert torch.equal(gradient, expected)


def test_replica_of_data_parallel_is_a_region_with_its_own_parameters():
    linear = checkpointed(nn.Linear(4, 4))
    replica = linear._replicate_for_data_parallel()
    replica.weight, replica.bias = linear.weight * 2, linear.bias * 2
    x = torch.ones(3, 4)
    with count_recomputes() as recomputes:
        output = replica(x)
        output.sin().sum().backward()
    assert torch.equal(output, nn.functional.linear(x, linear.weight * 2, linear.bias * 2))
    assert recomputes.by_region == {"'Linear.forward'": 1}
    assert linear.weight.grad is not None


# other wrappers of classes --------------------------------------------------------------------------------------------


class Doubled(nn.Module):
    def forward(self, weight):
        return weight.sin() * 2


@pytest.mark.parametrize("order", ["checkpoint first", "parametrize first"])
def test_parametrized_module_is_one_region_in_either_order(order):
    linear, plain = nn.Linear(4, 4), nn.Linear(4, 4)
    plain.load_state_dict(linear.state_dict())
    parametrize.register_parametrization(plain, "weight", Doubled())
    if order == "checkpoint first":
        checkpoint_module(linear)
    parametrize.register_parametrization(linear, "weight", Doubled())
    if order == "parametrize first":
        checkpoint_module(linear)
    expected, _ = step(plain)
    assert_recomputes_to_equal(linear, expected)
    assert_recomputes_to_equal(copy.deepcopy(linear), expected)


def test_handle_of_a_module_that_was_parametrized_since_makes_it_plain():
    linear = nn.Linear(4, 4)
    handle = checkpoint_module(linear)
    parametrize.register_parametrization(linear, "weight", Doubled())
    handle.remove()
    assert step(linear)[1] == 0


def test_module_that_was_parametrized_between_two_checkpoints_is_one_region():
    linear = nn.Linear(4, 4)
    handle = checkpoint_module(linear)
    parametrize.register_parametrization(linear, "weight", Doubled())
    handle.remove()
    expected, _ = step(linear)
    checkpoint_module(linear)
    assert_recomputes_to_equal(linear, expected)


def test_parametrization_that_is_removed_leaves_a_region():
    linear = checkpointed(nn.Linear(4, 4))
    parametrize.register_parametrization(linear, "weight", Doubled())
    parametrize.remove_parametrizations(linear, "weight")
    assert step(linear)[1] == 1


def test_traced_graph_can_be_checkpointed_and_copied_as_before():
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    expected, _ = step(traced)
    assert_recomputes_to_equal(checkpointed(traced), expected)
    assert all(map(torch.equal, step(copy.deepcopy(traced))[0], expected))
    assert all(map(torch.equal, step(pickle.loads(pickle.dumps(traced)))[0], expected))


def test_copy_of_a_traced_graph_checkpoints_too():
    traced = checkpointed(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.Tanh())))
    assert step(copy.deepcopy(traced))[1] == 1


@few(1)
@pytest.mark.parametrize("how", ["module.compile()", "torch.compile(module)", "torch.compile(around)"])
def test_compiled_module_is_a_region_all_the_same(how):
    """One of ours, or inside of a compiled graph one of torch's."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    expected, _ = step(module)
    checkpoint_module(module)
    if how == "module.compile()":
        module.compile(backend="eager")
        assert_recomputes_to_equal(module, expected)
        return
    around = module if how == "torch.compile(module)" else nn.Sequential(module)
    assert_recomputes_to_equal(torch.compile(around, backend="eager"), expected, total=0)


def test_region_with_a_compiled_child_is_equal():
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    expected, _ = step(module)
    module[0].compile(backend="eager")
    assert_recomputes_to_equal(checkpointed(module), expected)


def test_functions_of_the_kernel_are_not_compiled_with_a_child():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    module[0].compile(backend=backend)
    step(module)
    by_eager = len(graphs)
    region = checkpointed(module)
    step(region)
    step(region)
    assert len(graphs) == by_eager
