"""Schedules as graphs that run: the same numbers whatever is recomputed, and what nothing reads any more dies."""
from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from tests.graph.traced import joint_of
from tests.helpers import assert_equal, leaf
from torchckpt.graph.step.emit import emit, emit_one
from torchckpt.planning.remat.flow.late import late
from torchckpt.planning.remat.flow.memory import simulate


def function(x, w):
    h = (x @ w).tanh()
    top, index = h.max(1)
    return (nn.functional.layer_norm(h, (4,)).t() * top).exp().sum(), index


@pytest.fixture(scope="module")
def inputs():
    torch.manual_seed(0)
    return [leaf(4, 3), leaf(3, 4)]


@pytest.fixture(scope="module")
def joint(inputs):
    return joint_of(function, *inputs)


def schedules(flow):
    """Everything kept, nothing, and at random, with repeats that are not needed."""
    rng = random.Random(0)
    yield list(flow.eager)
    yield late(flow, set())
    for _ in range(6):
        schedule = late(flow, {storage for storage in flow.writer if rng.random() < 0.5})
        for _ in range(rng.randint(0, 3)):
            place = rng.randint(1, len(schedule))
            again = [index for index in schedule[:place] if flow.operations[index].repeatable]
            schedule.insert(place, rng.choice(again))
        yield schedule


def calls(module):
    return [node.name for node in module.graph.nodes if node.op == "call_function"]


def emitted(joint, schedule):
    return emit(joint, schedule, simulate(joint.flow, schedule).boundary)


def test_every_schedule_has_the_numbers_of_eager(joint, inputs):
    loss, index = function(*inputs)
    expected = [loss.detach(), index, *torch.autograd.grad(loss, inputs)]
    tangent, data = torch.ones(()), [tensor.detach() for tensor in inputs]
    for schedule in schedules(joint.flow):
        forward, backward = emitted(joint, schedule)
        outputs = forward([*data])
        gradients = backward([*outputs[2:], tangent])
        assert_equal([*outputs[:2], *gradients], expected)
        assert_equal(list(emit_one(joint, schedule)([*data, tangent])), expected)


def test_lists_are_emptied(joint, inputs):
    forward, backward = emitted(joint, joint.flow.eager)
    arguments = [tensor.detach() for tensor in inputs]
    outputs = list(forward(arguments))
    assert arguments == []
    rest = [*outputs[2:], torch.ones(())]
    backward(rest)
    assert rest == []


def test_repeats_stand_where_the_schedule_has_them():
    joint = joint_of(lambda x: x.sin().exp().tanh().sum(), leaf(3))
    forward, backward = emitted(joint, [0, 1, 2, 3, 4, 1, 0, 1, 2, 5, 6, 7, 8])
    assert calls(forward) == ["sin", "exp", "tanh", "sum_1"]
    names = [name.split("_")[0] for name in calls(backward)]
    assert names.index("sin") < names.index("exp") < names.index("tanh")
    assert names.count("exp") == 1  # the first is dead


def test_only_what_is_read_crosses():
    joint = joint_of(lambda x: x.sin().exp().tanh().sum(), leaf(3))
    forward, backward = emitted(joint, joint.flow.eager)
    crossing = [node.name for node in backward.graph.find_nodes(op="placeholder")]
    assert crossing == ["saved_tanh", "saved_exp", "saved_primals_1", "tangents_1"]
    (outputs,) = forward.graph.output_node().args
    assert [node.name for node in outputs] == ["sum_1", "tanh", "exp", "primals_1"]


def test_what_only_dead_code_reads_does_not_cross():
    """It would be alive to the end of the backward: nothing frees an argument that is not read.

    Here sin is run again before it is read, and its repeat reads the input alone; what exp is made of crosses for a
    repeat that nobody reads.
    """
    joint = joint_of(lambda x: x.sin().exp().cos().sum(), leaf(3))
    names = [operation.name for operation in joint.flow.operations]
    sin, exp, tangents = names.index("sin"), names.index("exp"), names.index("tangents")
    schedule = [*range(tangents + 1), exp, sin, exp, *range(tangents + 1, len(names))]
    forward, backward = emitted(joint, schedule)
    crossing = backward.graph.find_nodes(op="placeholder")
    assert [node.name for node in crossing] == ["saved_primals_1", "tangents_1"]
    assert all(node.users for node in crossing)
    assert len(forward.graph.output_node().args[0]) == 2


def test_views_are_made_again_of_the_newest_copy():
    """A view of the first copy would keep it."""
    joint = joint_of(lambda x, w: (x.sin().t() @ w).sum(), leaf(3, 4), leaf(3, 4))
    _, backward = emitted(joint, late(joint.flow, set()))
    nodes = {node.name: node for node in backward.graph.nodes}
    assert "saved_sin" not in nodes
    (reader,) = nodes["sin"].users
    assert reader.op == "call_function"


def test_results_are_those_of_the_first_run():
    joint = joint_of(lambda x: (x.sin(), x.sin().exp()), leaf(3))
    assert pytree.tree_leaves(joint.outputs)
    flow = joint.flow
    first = next(index for index, operation in enumerate(flow.operations) if operation.name == "sin")
    schedule = [*range(flow.forward), first, *range(flow.forward, len(flow.operations))]
    forward, _ = emitted(joint, schedule)
    x = torch.ones(3)
    assert_equal(list(forward([x])[:2]), [x.sin(), x.sin().exp()])


def test_notes_of_nodes_are_those_of_the_trace(joint):
    forward, backward = emitted(joint, late(joint.flow, set()))
    for module in (forward, backward):
        for node in module.graph.nodes:
            assert node.op == "output" or "val" in node.meta
