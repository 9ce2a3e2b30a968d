"""What a forward makes, by the names that users know it by."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.graph.traced import joint_of
from tests.helpers import leaf
from tests.slow import few
from torchckpt.graph import mark, region
from torchckpt.graph.keep import Value, Values


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 5), nn.Tanh())
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return mark(self.drop(self.body(x)), "out").sin().sum()


@pytest.fixture
def values():
    return Values(joint_of(Net(), torch.randn(3, 4)))


def named(values, storages):
    flow = values._joint.flow
    return sorted(flow.operations[flow.writer[storage]].name for storage in storages)


def of(function, *inputs):
    values = Values(joint_of(function, *inputs))
    return values, {operation.name: operation for operation in values._joint.flow.operations}


def test_made_is_what_the_forward_writes_but_its_results(values):
    """Of the dropout, its output and its mask."""
    flow = values._joint.flow
    assert [flow.operations[flow.writer[s]].name for s in values.made] == [
        "addmm", "tanh", "native_dropout", "native_dropout", "sin",
    ]


def test_modules_are_what_leaves_them_and_marks_what_carries_them(values):
    assert {name: named(values, storages) for name, storages in values.modules.items()} == {
        "body.0": ["addmm"], "body.1": ["tanh"], "body": ["tanh"], "drop": ["native_dropout"] * 2,
    }
    assert {name: named(values, storages) for name, storages in values.marks.items()} == {"out": ["native_dropout"]}


def test_value(values):
    assert [values.value(storage) for storage in values.made] == [
        Value("addmm", "body.0", (), "aten.addmm", (3, 5), torch.float32, 60, 2 * 3 * 4 * 5),
        Value("tanh", "body.1", (), "aten.tanh", (3, 5), torch.float32, 60, 0),
        Value("getitem", "drop", ("out",), "aten.native_dropout", (3, 5), torch.float32, 60, 0),
        Value("getitem_1", "drop", (), "aten.native_dropout", (3, 5), torch.bool, 15, 0),
        Value("sin", "", (), "aten.sin", (3, 5), torch.float32, 60, 0),
    ]


def test_output_of_an_operation_that_nothing_reads_is_not_made():
    """Every value that a function is asked about is one that has a node."""
    values, _ = of(lambda x: (x * 2).max(0)[0].sin().sum(), leaf(3, 4))
    for storage in values.made:
        assert values.value(storage).bytes


def test_two_outputs_of_one_operation_have_shapes_of_their_own():
    values, operations = of(lambda x: nn.functional.layer_norm(x.sin(), (4,)).sum(), leaf(3, 4))
    outputs = [values.value(storage) for storage in operations["native_layer_norm"].writes]
    assert [(value.name, value.shape) for value in outputs] == [
        ("getitem", (3, 4)), ("getitem_1", (3, 1)), ("getitem_2", (3, 1)),
    ]


@few(1)
@pytest.mark.parametrize("inside", ["one", "two", "apart", "leaves"])
def test_depths(inside):
    """0: kept. What enters a region is kept as what is around that region is."""
    def function(x):
        a = x.sin()
        with region("one"):
            b = a.exp()
            with region("two"):
                c = b.tanh().cos()
            d = c.sigmoid()
        with region("apart"):
            e = b.neg().sin()
        return (d + e).sum()

    values, operations = of(function, leaf(3))
    depth = {name: values.depths[operation.writes[0]] for name, operation in operations.items()
             if operation.writes and operation.writes[0] in values.depths}
    level = {name: len(regions) for name, regions in zip(operations, values.regions)}
    expected = {
        "one": (["sin", "exp"], [0, 0], [0, 1]),  # exp goes from region to region
        "two": (["tanh"], [2], [2]),
        "apart": (["neg"], [1], [1]),
        "leaves": (["cos", "sigmoid", "sin_1"], [2, 1, 1], [2, 1, 1]),
    }
    names, depths, levels = expected[inside]
    assert [depth[name] for name in names] == depths
    assert [level[name] for name in names] == levels


def test_homes():
    """What leaves a region is at home in the one that reads it; of what is one region deep it need not be told."""
    def function(x):
        with region("one"):
            b = x.exp()
            with region("two"):
                c = b.tanh().cos()
                with region("three"):
                    d = c.sin().sinh()
            e = c.neg() * d
        return e.sum()

    values, operations = of(function, leaf(3))
    outer, two, three = ("one#0",), ("one#0", "two#1"), ("one#0", "two#1", "three#2")
    assert {name: values.homes.get(operations[name].writes[0]) for name in ("exp", "tanh", "cos", "sin", "sinh")} == {
        "exp": None, "tanh": (two, two), "cos": (two, outer), "sin": (three, three), "sinh": (three, outer),
    }


def test_values_between_regions_and_around():
    values, operations = of(lambda x: x.sin().exp().sum(), leaf(3))
    assert {*values.depths.values()} == {0}
    assert values.regions == ((),) * len(operations)
    assert values.homes == {}
    assert values.paths == ("",) * len(operations)
