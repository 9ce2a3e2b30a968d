"""torch's private names: each does what is made of it here."""
from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from tests.graph.allocations import live_bytes
from tests.graph.traced import joint_of
from tests.helpers import leaf
from torchckpt.errors import CaptureError
from torchckpt.features import INDUCTOR, TESTED, Feature
from torchckpt.graph.private.runtime import (
    allocations,
    is_collective,
    is_mutable,
    is_random,
    storage_number,
    without_modes,
)
from torchckpt.graph.private.surroundings import compiling
from torchckpt.graph.private.trace import (
    Boxed,
    backward_node,
    differentiable,
    is_data_dependent,
    mutated_inputs,
    require,
    tangent_places,
)

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("target", "random", "mutable"),
    [
        (aten.sin.default, False, False),
        (aten.native_dropout.default, True, False),
        (aten.bernoulli.p, True, False),
        (aten.add_.Tensor, False, True),
        (aten.add.out, False, True),
        (torch.sin, False, False),
        ("name", False, False),
    ],
    ids=str,
)
def test_operators(target, random, mutable):
    assert (is_random(target), is_mutable(target), is_collective(target)) == (random, mutable, False)


def test_collectives():
    assert is_collective(torch.ops._c10d_functional.all_reduce.default)


def test_storage_is_one_of_views_and_another_of_others():
    x = torch.ones(4)
    assert storage_number(x) == storage_number(x[1:]) == storage_number(x.view(2, 2))
    assert storage_number(x) != storage_number(x.clone())
    sparse = torch.eye(2).to_sparse()
    assert storage_number(sparse) == storage_number(sparse) != storage_number(torch.eye(2).to_sparse().coalesce())


def test_a_feature_that_torch_lacks():
    require(Feature("a thing", "2.11", ("torch:Tensor",), ""))
    with pytest.raises(CaptureError) as raised:
        require(Feature("a `thing`", "2.11", ("torch:Tensor", "torch:no_such_name", "torch:nor_this"), ""))
    assert str(raised.value) == (
        f"this torch lacks what a thing needs and torch 2.11 to {TESTED[-1]} have\n"
        f"  received: torch {torch.__version__} without torch:no_such_name\n"
        f"  works:    pip install 'torch=={TESTED[-1]}.*'"
    )


def test_boxed_code_takes_a_list_and_empties_it():
    drawn = fx.Graph()
    x, y = drawn.placeholder("x"), drawn.placeholder("y")
    drawn.output((drawn.call_function(torch.add, (x, y)),))
    drawn.set_codegen(Boxed())
    module, arguments = fx.GraphModule(nn.Module(), drawn), [torch.ones(2), torch.ones(2)]
    assert torch.equal(module.forward(arguments)[0], torch.full((2,), 2.0))
    assert arguments == []


def test_boxed_code_of_no_inputs_and_of_one():
    for count in (0, 1):
        drawn = fx.Graph()
        inputs = [drawn.placeholder(f"x{place}") for place in range(count)]
        drawn.output(tuple(inputs))
        drawn.set_codegen(Boxed())
        module, arguments = fx.GraphModule(nn.Module(), drawn), [3] * count
        assert module.forward(arguments) == (3,) * count
        assert arguments == []


def test_boxed_code_frees_what_was_read_for_the_last_time():
    drawn = fx.Graph()
    node = drawn.placeholder("x")
    for _ in range(5):
        node = drawn.call_function(torch.sin, (node,))
    drawn.output((node,))
    drawn.set_codegen(Boxed())
    module = fx.GraphModule(nn.Module(), drawn)
    assert max(live_bytes(lambda: module.forward([torch.ones(1000)]))) == 8000


def test_differentiable_traces_without_running_and_runs_what_was_made():
    parted, runs = [], []

    def partition(module, inputs, *, num_fwd_outputs, **ignored):
        parted.append((module, num_fwd_outputs))
        from torchckpt.graph.step.costs import Cost
        from torchckpt.graph.step.emit import emit
        from torchckpt.graph.step.joint import joint_of as made
        joint = made(module, num_fwd_outputs, lambda node: Cost(0.0, 0))
        return emit(joint, joint.flow.eager, joint.flow.forward)

    def function(x, y):
        runs.append(1)
        return (x * y).sin().sum(), y

    def backward(whole, arguments):
        return [gradient if gradient is None else 2 * gradient for gradient in whole(arguments)]

    x, y = leaf(3), torch.ones(3)
    called = differentiable(function, partition, backward, (x, y))
    assert len(parted) == 1
    assert parted[0][1] == 2
    count = len(runs)
    outputs = called(x, y)
    assert len(runs) == count
    assert torch.equal(outputs[0], (x * y).sin().sum())
    assert torch.equal(torch.autograd.grad(outputs[0], x)[0], 2 * x.cos())


def test_outputs_that_are_new_values_of_inputs():
    graph = joint_of(nn.BatchNorm1d(3), leaf(4, 3)).module.graph
    outputs = graph.output_node().args[0]
    names = sorted(outputs[place].name for place in mutated_inputs(graph.output_node()))
    assert names == ["add", "getitem_3", "getitem_4"]
    assert mutated_inputs(joint_of(torch.sin, leaf(3)).module.graph.output_node()) == {}


def test_tangents_are_those_of_outputs():
    joint = joint_of(lambda x: (x.argmax(), x.sin(), x.cos()), leaf(3))
    assert {node.name: place for node, place in tangent_places(joint.module.graph).items()} == {
        "tangents_1": 1, "tangents_2": 2,
    }


def test_backward_node_is_that_of_a_traced_call():
    from torchckpt import graph

    model = nn.Linear(3, 3)
    output = graph.rematerialize(model)(torch.ones(2, 3))
    assert backward_node(output, 3) is output.grad_fn
    assert backward_node(output, 4) is None
    assert backward_node(model(torch.ones(2, 3)), 3) is None
    assert backward_node(torch.ones(3), 0) is None


def test_inductor_is_asked_for_where_it_compiles(monkeypatch):
    from torchckpt import graph

    gone = {INDUCTOR: ("torch._inductor:gone",)}
    monkeypatch.setattr("torchckpt.graph.private.trace._missing", lambda feature: gone.get(feature, ()))
    model = nn.Linear(3, 3)
    assert torch.equal(graph.rematerialize(model)(torch.ones(2, 3)), model(torch.ones(2, 3)))
    with pytest.raises(CaptureError, match=r"torch\._inductor:gone"):
        graph.rematerialize(model, torch.ones(2, 3), engine="inductor")


def test_compiling_is_said_inside_alone():
    assert not torch.compiler.is_compiling()
    with compiling():
        assert torch.compiler.is_compiling()
    with pytest.raises(KeyError), compiling():
        raise KeyError
    assert not torch.compiler.is_compiling()


def test_modes_are_off_inside():
    with torch._subclasses.FakeTensorMode():
        assert type(torch.ones(1)) is not torch.Tensor
        with without_modes():
            assert type(torch.ones(1)) is torch.Tensor


def test_errors_of_values():
    with torch._subclasses.FakeTensorMode():
        x = torch.ones(3)
    for ask in (lambda: x.sum().item(), lambda: bool(x.sum() > 0), x.nonzero):
        with pytest.raises(Exception) as caught:  # noqa: PT011  # of a private class
            ask()
        assert is_data_dependent(caught.value)
    assert not is_data_dependent(RuntimeError("data-dependent"))


def test_allocations_are_bytes_taken_and_given_back():
    def run():
        x = torch.empty(1000)
        y = torch.empty(10)
        del x
        return y

    kept = []
    assert allocations(lambda: kept.append(run())) == [4000, 40, -4000]
    assert allocations(lambda: None) == []
    with pytest.raises(KeyError):
        allocations(lambda: {}["x"])
    assert allocations(kept.clear) == [-40]
