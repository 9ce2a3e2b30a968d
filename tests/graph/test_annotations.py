"""Notes on nodes, as they are written and as they are read."""
from __future__ import annotations

import threading

import pytest
import torch
from torch import fx

from tests.graph.traced import joint_of
from tests.helpers import leaf
from torchckpt.graph import mark, region
from torchckpt.graph.annotations import Tracing, is_tracing, mark_of, module_of, regions_of
from torchckpt.regions.flags import local


@pytest.fixture
def node():
    return fx.Graph().placeholder("x")


def notes(function, *inputs):
    nodes = [node for node in joint_of(function, *inputs).module.graph.nodes if node.op == "call_function"]
    return {node.name: [name.split("#")[0] for name in regions_of(node)] for node in nodes}


def test_node_without_notes(node):
    assert (mark_of(node), module_of(node), regions_of(node)) == (None, "", ())


def test_regions_are_outermost_first_and_those_of_the_backward_too():
    def function(x):
        with region("outer"):
            x = x.sin()
            with region("inner"):
                x = x.exp()
            x = x.tanh()
        return x.sum()

    regions = notes(function, leaf(3))
    assert regions["sin"] == regions["tanh"] == regions["tanh_backward"] == regions["cos"] == ["outer"]
    assert regions["exp"] == ["outer", "inner"]
    assert regions["sum_1"] == []


def test_regions_with_one_name_are_two():
    def function(x):
        for _ in range(2):
            with region("same"):
                x = x.sin()
        return x.sum()

    graph = joint_of(function, leaf(3)).module.graph
    first, second = (regions_of(node) for node in graph.nodes if node.target is torch.ops.aten.sin.default)
    assert first != second
    assert [name.split("#")[0] for name in (*first, *second)] == ["same", "same"]


def test_numbers_of_regions_start_anew_with_each_trace():
    """So that a plan that was made before is of the same names."""
    def function(x):
        return region(torch.sin)(x).sum()

    x = leaf(3)
    assert len({regions_of(next(n for n in joint_of(function, x).module.graph.nodes if n.name == "sin"))
                for _ in range(2)}) == 1


def test_mark_is_a_note_on_an_alias():
    graph = joint_of(lambda x: mark(x.sin(), "h").exp().sum(), leaf(3)).module.graph
    marked = [node for node in graph.nodes if mark_of(node) is not None and node.target is torch.ops.aten.alias.default]
    assert [(mark_of(node), node.all_input_nodes[0].name) for node in marked] == [("h", "sin")]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("L['self']", ""),
        ("L['self']._modules['layers']._modules['3'].mlp", "layers.3.mlp"),
        ("L['self'].layers[3].mlp", "layers.3.mlp"),
        ("L['fn'].body['a']", "body.a"),
        ("L['self'].head", "head"),
    ],
)
def test_module_by_the_stack_that_dynamo_leaves(node, source, name):
    node.meta["nn_module_stack"] = {"outer": ("L['self']", object), "inner": (source, object)}
    assert module_of(node) == name


def test_note_comes_before_the_stack(node):
    node.meta.update(custom={"torchckpt_module": "a.b"}, nn_module_stack={"x": ("L['self'].c", object)})
    assert module_of(node) == "a.b"


def test_tracing_is_of_the_thread_and_nests():
    assert not is_tracing()
    with Tracing() as outer:
        assert is_tracing()
        with Tracing() as inner:
            assert local.thread.tracing is inner
        assert local.thread.tracing is outer
    assert local.thread.tracing is None


def test_alias_that_is_returned_is_what_was_marked():
    x = torch.ones(2)
    with Tracing() as tracing:
        once = tracing.mark(x, "a")
        twice = tracing.mark(once, "b")
        assert once is not x
        assert tracing.unmarked(twice) is x
        assert tracing.unmarked(x) is x
        assert tracing.unmarked("text") == "text"


def test_a_region_that_another_thread_enters_while_it_is_traced():
    """As one that modules have in common, of which another is called meanwhile."""
    shared = region("shared")

    def enter(entered, traced):
        with shared:
            entered.set()
            traced.wait(30)

    def function(x):
        events = threading.Event(), threading.Event()
        thread = threading.Thread(target=enter, args=events, daemon=True)
        with shared:
            thread.start()
            events[0].wait(30)
            x = x.sin()
        x = x.exp()
        events[1].set()
        thread.join(30)
        return x.sum()

    regions = notes(function, leaf(3))
    assert (regions["sin"], regions["exp"]) == (["shared"], [])
