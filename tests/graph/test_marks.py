"""Marks and regions: nothing in eager, notes in a traced call."""
from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from tests.graph.traced import plan_of
from tests.helpers import in_threads, leaf
from tests.slow import few
from torchckpt import graph
from torchckpt.errors import ArgumentError
from torchckpt.graph import mark, region, sequential
from torchckpt.graph.annotations import Region
from torchckpt.regions.flags import local


@pytest.fixture
def x():
    return leaf(4)


# eager ----------------------------------------------------------------------------------------------------------------


def test_mark_is_what_was_marked(x):
    nested = {"a": [x, (x, 3)], "b": None}
    assert mark(x) is x
    assert mark(x, "name") is x
    assert mark(nested) is nested
    assert mark("text") == "text"


def test_region_calls_and_returns(x):
    calls = []

    def function(a, *, b):
        calls.append((a, b))
        return a, [b]

    assert region(function)(x, b=2) == (x, [2])
    assert calls == [(x, 2)]
    linear = nn.Linear(4, 4)
    assert torch.equal(region(linear)(x), linear(x))


def test_region_as_a_context_gives_itself():
    with region("a") as inside:
        assert isinstance(inside, Region)
        assert inside.name == "a"
        with inside:
            pass


def test_region_as_a_decorator_keeps_the_name_and_the_docstring():
    @region
    def one(x):
        """Of one."""
        return x

    @region("named")
    def two(x):
        """Of two."""
        return x

    assert (one.__name__, one.__doc__, two.__name__, two.__doc__) == ("one", "Of one.", "two", "Of two.")
    assert (one(1), two(2)) == (1, 2)


def test_sequential_calls_one_after_the_other(x):
    functions = [torch.sin, torch.cos, torch.tanh]
    for segments in (1, 2, 3):
        assert torch.equal(sequential(functions, segments, x), x.sin().cos().tanh())
        assert torch.equal(sequential(functions, segments, x, last=True), x.sin().cos().tanh())
    assert torch.equal(sequential(nn.Sequential(nn.Tanh(), nn.ReLU()), 2, x), x.tanh().relu())
    assert sequential([lambda pair: (pair[1], pair[0])], 1, (1, 2)) == (2, 1)


# faults ---------------------------------------------------------------------------------------------------------------


def test_mark_whose_arguments_are_swapped(x):
    with pytest.raises(ArgumentError) as caught:
        mark("h", x)
    assert str(caught.value) == (
        "mark(): the name of the mark is not a string\n"
        f"  received: a tensor of shape {tuple(x.shape)}\n"
        '  works:    graph.mark(h, "h")'
    )


@pytest.mark.parametrize(("what", "received"), [(3, "3"), (None, "None"), (torch.ones(2), "a tensor of shape (2,)")])
def test_region_of_neither_a_callable_nor_a_name(what, received):
    with pytest.raises(ArgumentError) as caught:
        region(what)
    assert str(caught.value) == (
        f"region(): the argument is neither a callable nor a name\n  received: {received}\n"
        "  works:    graph.region(block)(x)"
    )


@pytest.mark.parametrize(("functions", "segments", "works"), [(9, 10, 3), (9, 0, 3), (9, -1, 3), (0, 1, 1)])
def test_segments_that_are_too_few_or_too_many(functions, segments, works):
    with pytest.raises(ArgumentError) as caught:
        sequential([torch.sin] * functions, segments, torch.ones(1))
    assert str(caught.value) == (
        f"sequential(): {'there is no segment' if segments < 1 else 'there are more segments than functions'}\n"
        f"  received: {segments} segments of {functions} functions\n  works:    segments={works}"
    )


# traced ---------------------------------------------------------------------------------------------------------------


def test_region_keeps_what_enters_it_alone(x):
    def function(x):
        h = x.exp()
        with region("a"):
            h = h.sin().tanh().cos()
        return h.sum()

    plan = plan_of(function, x)
    assert plan.saved == ("exp",)
    assert plan.recomputed == ("sin", "tanh")
    assert plan.order[plan.boundary :] == (
        "tangents", "sin", "tanh", "sin_1", "neg", "mul", "tanh_backward", "cos_1", "mul_1", "mul_2",
    )


@few(1)
@pytest.mark.parametrize(
    "around",
    [
        lambda function: region(function),
        lambda function: region("name")(function),
        lambda function: region(nn.Sequential(*(type("M", (nn.Module,), {"forward": lambda self, x: function(x)})(),))),
    ],
    ids=["callable", "named", "module"],
)
def test_forms_of_a_region_are_one(x, around):
    inside = around(lambda h: h.sin().tanh().cos())
    plan = plan_of(lambda x: inside(x.exp()).sum(), x)
    assert (plan.saved, plan.recomputed) == (("exp",), ("sin", "tanh"))


def test_value_between_two_regions_is_kept(x):
    """Whether or not they have one name."""
    for second in ("a", "b"):
        def function(x, second=second):
            with region("a"):
                h = x.sin().exp()
            with region(second):
                h = h.tanh().cos()
            return h.sum()

        plan = plan_of(function, x)
        assert (plan.saved, plan.recomputed) == (("exp",), ("tanh",))


def test_value_that_leaves_a_region_is_recomputed_with_it(x):
    def function(x):
        with region("a"):
            h = x.sin().exp()
        return h.tanh().sum()

    assert plan_of(lambda x: function(x) + 1, x).recomputed == ("sin", "exp")
    assert plan_of(function, x).saved == ("tanh",)


def test_region_in_a_region_keeps_nothing_but_what_enters_the_outer(x):
    def function(x):
        h = x.exp()
        with region("outer"):
            h = h.sin()
            with region("inner"):
                h = h.cos().sin()
        return h.sum()

    plan = plan_of(function, x)
    assert plan.saved == ("exp",)
    assert plan.recomputed == ("sin", "cos")


def test_nine_functions_in_three_segments(x):
    """The last segment's values are alive when the backward starts, and kept unless it is told."""
    plan = plan_of(lambda x: sequential([torch.sin] * 9, 3, x).sum(), x)
    assert plan.saved == ("sin_2", "sin_6", "sin_7")
    assert plan.recomputed == ("sin_3", "sin_4", "sin_5", "sin", "sin_1")
    plan = plan_of(lambda x: sequential([torch.sin] * 9, 3, x, last=True).sum(), x)
    assert plan.saved == ("sin_2", "sin_5")
    assert plan.recomputed == ("sin_6", "sin_7", "sin_3", "sin_4", "sin", "sin_1")


@pytest.mark.parametrize(
    ("functions", "segments", "cut"), [(5, 2, [2, 3]), (7, 3, [2, 2, 3]), (3, 3, [1, 1, 1]), (4, 1, [4])]
)
def test_segments_are_about_as_long(functions, segments, cut, x):
    counts = []

    def count(x):
        counts[-1] += 1
        return x.sin()

    class Counted(Region):
        def __enter__(self):
            counts.append(0)
            return super().__enter__()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[Region.__module__], "Region", Counted)  # graph.mark is the function
        sequential([count] * functions, segments, x, last=True)
    assert counts == cut


def marked(x):
    h = mark(x.sin(), "h")
    k = mark({"a": [h.cos(), 3]}, "k")["a"][0]
    return mark(k.exp().tanh()).sum()


@few(1)
@pytest.mark.parametrize(
    ("keep", "saved", "recomputed"),
    [
        (None, ("sin", "exp", "tanh"), ()),
        ("collection", ("sin", "exp", "tanh"), ()),
        (["h"], ("sin", "exp", "tanh"), ()),
        (["k"], ("exp", "tanh"), ("sin",)),
    ],
)
def test_marks_of_a_call(x, keep, saved, recomputed):
    """What is alive when the backward starts is spared, marked or not."""
    plan = plan_of(marked, x, keep=keep)
    assert list(plan.names) == ["h", "k", ""]
    assert (plan.saved, plan.recomputed) == (saved, recomputed)
    assert plan.explain("h") == "h:\n  sin: 16 B, " + ("dropped after its last use, recomputed 1x (0 FLOPs)"
                                                      if recomputed else "saved")


def test_marks_may_share_a_name(x):
    plan = plan_of(lambda x: mark(mark(x.sin(), "h").cos(), "h").exp().sum(), x)
    assert [plan.flow.operations[plan.flow.writer[s]].name for s in plan.names["h"]] == ["sin", "cos"]


def test_mark_in_a_region_is_kept(x):
    def function(x):
        with region("r"):
            h = mark(x.sin().exp(), "e").cos()
        return h.sin().sum()

    plan = plan_of(function, x)
    assert (plan.saved, plan.recomputed) == (("exp",), ("cos",))


def test_marks_change_no_value_and_no_output(x):
    def function(x):
        h = mark(x.sin(), "h")
        return mark(h * 2, "out"), h, mark(x)

    class Model(nn.Module):
        def forward(self, x):
            return function(x)

    step = graph.rematerialize(Model(), x)
    for received, expected in zip(step(x), function(x)):
        assert torch.equal(received, expected)
        assert received.requires_grad
    assert step(x)[2].data_ptr() == x.data_ptr()


def test_mark_of_an_input_or_an_integer_names_nothing_that_could_be_kept(x):
    plan = plan_of(lambda x: (mark(x, "x").sin() * mark(x.argmax(), "n")).sum(), x)
    assert plan.names["x"] == ()
    assert len(plan.names["n"]) == 1


def test_regions_of_a_traced_call_end_with_an_error(x):
    def function(x):
        with region("a"):
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        plan_of(function, x)
    assert local.thread.tracing is None
    assert plan_of(lambda x: x.sin().exp().sum(), x).recomputed == ()


def test_regions_in_threads_that_are_not_traced_are_nothing(x):
    """While another thread traces."""
    outer = region("shared")

    def traced():
        return plan_of(lambda x: region(lambda x: x.sin().exp().tanh())(x).sum(), x).recomputed

    def eager():
        with outer:
            return mark(x, "x") is x

    assert in_threads(traced, eager, eager) == [("sin", "exp", "tanh"), True, True]
