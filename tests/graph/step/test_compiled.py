"""Operations that are computed where they are read, and schedules of what is left."""
from __future__ import annotations

import pytest
import torch

from torchckpt import graph
from torchckpt.graph.step.compiled import Fusion
from torchckpt.graph.step.costs import roofline
from torchckpt.graph.step.halves import Halves
from torchckpt.graph.trace.capture import Capture
from torchckpt.planning.remat.flow.late import late
from torchckpt.planning.remat.flow.memory import simulate


def joint(function, *tensors):
    halves = Halves(roofline, lambda joint: joint.flow.eager)
    Capture(function, tensors, {}, halves)
    return halves.joint


def names(joint):
    return [operation.name for operation in joint.flow.operations[: joint.flow.forward]]


def chain(x, w):
    return ((x * 2 + 1).sin() @ w).sum()


@pytest.fixture
def tensors():
    return torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)


def test_what_one_neighbour_reads_is_a_part_of_it(tensors):
    whole = joint(chain, *tensors)
    assert names(whole) == ["mul", "add", "sin", "mm", "sum_1"]
    assert names(Fusion(whole).joint) == ["add", "sin", "mm", "sum_1"]  # the cosine reads the sum too


def test_a_product_between_two_keeps_them_apart(tensors):
    def apart(x, w):
        y = x * 2
        return (x @ w + y).sum()

    operations = names(Fusion(joint(apart, *tensors)).joint)
    assert "mul" in operations
    assert "add" not in operations


def test_marked_values_are_written(tensors):
    marked = joint(lambda x, w: (graph.mark(x * 2, "h") + 1).exp().sum(), *tensors)
    assert "mul" in names(Fusion(marked).joint)


@pytest.mark.parametrize("schedule", [lambda flow: flow.eager, lambda flow: late(flow, frozenset())])
def test_schedules_expand_to_those_of_all_operations(tensors, schedule):
    whole = joint(lambda x, w: chain(chain(x, w) * x, w), *tensors)
    fusion = Fusion(whole)
    fused = schedule(fusion.joint.flow)
    expanded = fusion.expanded(fused)
    assert sorted(set(expanded)) == list(whole.flow.eager)
    assert simulate(fusion.joint.flow, fused).peak_bytes <= simulate(whole.flow, expanded).peak_bytes


def test_a_merged_operation_costs_what_it_moves(tensors):
    whole = joint(chain, *tensors)
    flow = Fusion(whole).joint.flow
    add = next(operation for operation in flow.operations if operation.name == "add")
    assert add.seconds == pytest.approx(2 * 64e-9)
    assert len(add.reads) == 1
