"""Calls that can be traced, and what is said of those that cannot."""
from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.graph.traced import Function
from tests.helpers import assert_equal, leaf
from tests.slow import few
from torchckpt import graph
from torchckpt.errors import ArgumentError, CaptureError
from torchckpt.features import Feature
from torchckpt.graph.step.costs import roofline
from torchckpt.graph.step.halves import Halves
from torchckpt.graph.trace.capture import Capture
from torchckpt.regions.flags import local
from torchckpt.regions.live import LiveStorages


def capture(function, *tensors, data=None):
    return Capture(function, tensors, data or {}, Halves(roofline, lambda joint: joint.flow.eager))


def refused(function, *inputs, **named):
    with pytest.raises(CaptureError) as caught:
        graph.rematerialize(Function(function))(*inputs, **named)
    assert local.thread.tracing is None
    assert not torch.compiler.is_compiling()
    return caught.value


def line(text, error):
    """That the message names this line of this file."""
    return re.search(re.escape(f'{__file__}:') + r"\d+: \"" + re.escape(text), str(error))


# what is captured -----------------------------------------------------------------------------------------------------


def test_call_is_the_function_with_its_derivatives():
    x, y = leaf(3), leaf(3)
    called = capture(lambda x, y: {"a": (x * y).sin(), "n": 3, "none": [None]}, x, y)
    received, expected = called([x, y]), {"a": (x * y).sin(), "n": 3, "none": [None]}
    assert_equal(received, expected)
    assert_equal(*(torch.autograd.grad(outputs["a"].sum(), (x, y)) for outputs in (received, expected)))


def test_nothing_runs_while_a_call_is_traced():
    calls = []

    def function(x):
        calls.append(type(x).__name__)
        return (x * torch.rand(3)).sin()

    x, before = leaf(3), torch.get_rng_state()
    called = capture(function, x)
    assert torch.equal(torch.get_rng_state(), before)
    traced = len(calls)
    called([x])
    assert len(calls) == traced
    assert "Tensor" not in calls


def test_schedule_is_what_was_chosen():
    seen = []

    def choose(joint):
        seen.append(joint)
        return joint.flow.eager

    halves = Halves(roofline, choose)
    Capture(lambda x: x.sin(), [leaf(3)], {}, halves)
    assert seen == [halves.joint]


def test_buffers_may_change():
    def function(x, total):
        total.add_(x.detach().sum())
        return x * total

    x, total = leaf(3), torch.tensor(1.0)
    called = capture(function, x, total)
    assert total == 1.0
    called([x, total])
    assert torch.equal(total, 1.0 + x.detach().sum())


def test_layers_of_code_that_look_at_values_in_eager_alone():
    """They ask whether they are compiled."""
    def function(x):
        if not torch.compiler.is_compiling() and x.sum() > 0:
            raise KeyError
        return x.sin()

    x = torch.ones(3, requires_grad=True)
    assert torch.equal(capture(function, x)([x]), x.sin())


@few(3)
@pytest.mark.parametrize("kind", [MemoryError, torch.OutOfMemoryError, ValueError, RuntimeError, AssertionError])
@pytest.mark.parametrize("failing", [0, 1])
def test_error_of_the_function_that_is_raised_once_is_not_lost(kind, failing):
    """A trace calls the function twice. A third call would be a second trace, which hides the error."""
    calls = []

    def function(x):
        calls.append(1)
        if len(calls) == failing + 1:
            raise kind("of the function")
        return x.sin()

    with pytest.raises(kind, match=r"^of the function$"):
        capture(function, leaf(3))
    assert len(calls) == failing + 1
    calls.clear()
    if not failing:
        with pytest.raises(kind, match=r"^of the function$"):
            graph.gradient(lambda x: function(x).sum(), torch.ones(3))
        assert len(calls) == 1


def test_error_of_memory_is_not_one_of_tracing():
    """Nor where it is raised in place of one."""
    def function(x):
        try:
            return x * x.sum().item()
        except RuntimeError:
            raise MemoryError("of the function") from None

    with pytest.raises(MemoryError, match="of the function"):
        capture(function, leaf(3))


def test_error_that_is_raised_for_one_of_tracing_counts_as_one():
    def function(x):
        if torch.compiler.is_compiling():
            return x.sin()
        try:
            return x * x.sum().item()
        except RuntimeError as error:
            raise ValueError("no sum") from error

    x = leaf(3)
    assert torch.equal(capture(function, x)([x]), x.sin())


def test_operator_that_fails_on_traced_tensors_alone_counts_as_tracing():
    @torch.library.custom_op("torchckpt_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @twice.register_fake
    def _(x):
        raise RuntimeError("of the operator")

    def function(x):
        return x.sin() if torch.compiler.is_compiling() else x.sin() + twice(x.detach())

    x = leaf(3)
    assert torch.equal(capture(function, x)([x]), x.sin())


def test_error_in_a_compiled_function_is_not_lost():
    calls = []

    @torch.compile(backend="eager")
    def inner(x):
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("of the function")
        return x.sin()

    with pytest.raises(ValueError, match="of the function"):
        capture(lambda x: inner(x), leaf(3))


# what is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sin() if x.sum() > 0 else x,
        lambda x: x * x.sum().item(),
        lambda x: x * float(x[0]),
        lambda x: x[x > 0].sum(),
        lambda x: x.nonzero().float() + x.sum(),
    ],
    ids=["if", "item", "float", "mask", "nonzero"],
)
def test_values_that_decide(function):
    error = refused(function, leaf(3))
    wrong = "rematerialize(): the call depends on the values of its tensors, and a graph cannot"
    assert str(error).startswith(f"{wrong}\n  received: ")
    assert "works:    torch.where() in place of if;" in str(error)
    assert line("lambda x: x", error)
    assert error.__cause__ is not None


class Deciding(nn.Linear):
    def forward(self, x):
        h = super().forward(x)
        if h.sum() > 0:
            return h.sin()
        return h


def test_line_of_a_model_that_looks_at_values():
    with pytest.raises(CaptureError) as caught:
        graph.rematerialize(Deciding(3, 3), torch.randn(2, 3))
    assert line("if h.sum() > 0:", caught.value)


def test_line_of_a_model_below_a_counted_step():
    """Operators pass a mode of this package there."""
    with LiveStorages(torch.device("cpu")), pytest.raises(CaptureError) as caught:
        graph.rematerialize(Deciding(3, 3), torch.randn(2, 3))
    assert line("if h.sum() > 0:", caught.value)


def test_line_of_a_package_beside_torch_whose_name_begins_with_that_of_torch():
    path = f"{Path(torch.__file__).parent}_of_a_user/layers.py"
    found: dict = {"Module": nn.Module}
    lines = "class Layer(Module):", "    def forward(self, x):", "        return x * float(x.sum())"
    exec(compile("\n".join(lines), path, "exec"), found)
    with pytest.raises(CaptureError) as caught:
        graph.rematerialize(found["Layer"](), leaf(3))
    assert f"at {path}:3" in str(caught.value)


def test_operation_without_a_derivative():
    @torch.library.custom_op("torchckpt_tests::lost", mutates_args=())
    def lost(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    lost.register_fake(torch.empty_like)
    error = refused(lambda x: lost(x * 2).sum(), leaf(3))
    wrong = "rematerialize(): an operation between an input and the loss has no derivative"
    assert str(error).startswith(f"{wrong}\n  received: ")
    assert "works:    torch.library.register_autograd(), or y.detach() where no gradient is wanted" in str(error)


def test_tensor_that_is_no_input_and_no_buffer():
    class Masked(nn.Linear):
        def __init__(self):
            super().__init__(3, 3)
            self.mask = torch.ones(3)

        def forward(self, x):
            return super().forward(x) * self.mask

    with pytest.raises(CaptureError) as caught:
        graph.rematerialize(Masked(), torch.randn(2, 3))
    wrong = "rematerialize(): the call reads a tensor that is no input, parameter or buffer"
    assert str(caught.value).startswith(f"{wrong}\n  received: ")
    assert line("return super().forward(x) * self.mask", caught.value)
    works = 'works:    self.register_buffer("mask", mask, persistent=False) in place of self.mask = mask'
    assert str(caught.value).endswith(works)


def test_tensor_that_is_made_inside_is_fine():
    x = leaf(3)
    called = capture(lambda x: x * torch.tensor([1.0, 2.0, 3.0]) + torch.arange(3), x)
    assert torch.equal(called([x]), x * torch.tensor([1.0, 2.0, 3.0]) + torch.arange(3))


@pytest.mark.parametrize(
    ("function", "inputs", "named", "what"),
    [
        (lambda x, w: x.add_(1) * w, [torch.ones(3), leaf(3)], {}, "args[0]"),
        (lambda w, x: (x.view(-1)[0].zero_(), x * w)[1], [leaf(3), torch.ones(3)], {}, "args[1]"),
        (lambda w, x: (x.mul_(2) * w).sum(), [leaf(3)], {"x": torch.ones(3)}, "kwargs['x']"),
        (lambda w, many: (many["y"][0].add_(1) * w).sum(), [leaf(3)], {"many": {"y": [torch.ones(3)]}},
         "kwargs['many']['y'][0]"),
        (lambda x: (x * 2, x.data.add_(1))[0], [leaf(3)], {}, None),
    ],
    ids=["first", "through a view", "keyword", "nested", "behind autograd"],
)
def test_inputs_that_are_changed(function, inputs, named, what):
    if what is None:
        before = inputs[0].detach().clone()
        with pytest.raises((CaptureError, RuntimeError)):
            graph.rematerialize(Function(function))(*inputs)
        assert torch.equal(inputs[0].detach(), before)
        return
    assert str(refused(function, *inputs, **named)) == (
        "rematerialize(): the call changes an input in place, so it cannot be recomputed\n"
        f"  received: {what} is changed in place\n"
        "  works:    x = x + 1 in place of x.add_(1); or x = x.clone() first"
    )


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_torch_that_lacks_something(monkeypatch, inner):
    lacking = Feature("graph", "2.11", ("torch:no_such_name",), "")
    monkeypatch.setattr("torchckpt.graph.trace.capture.GRAPH", lacking)
    name = "GRAPH" if inner == "eager" else "INDUCTOR"
    monkeypatch.setattr(sys.modules["torchckpt.graph.run.backend"], name, lacking)
    wrong = "rematerialize(): this torch lacks what graph needs and torch 2.11 to "
    assert str(refused(torch.sin, leaf(3))).startswith(wrong)
    with pytest.raises(CaptureError, match="without torch:no_such_name"):
        graph.backend(inner=inner)


@pytest.mark.parametrize("error", [KeyError("k"), RuntimeError("of mine"), ArgumentError("of ours"), StopIteration()])
def test_error_of_the_function_passes_as_it_is(error):
    def function(x):
        raise error

    with pytest.raises(type(error)) as caught:
        capture(function, leaf(3))
    assert caught.value is error
    assert local.thread.tracing is None


def test_error_of_shapes_is_that_of_torch():
    with pytest.raises(RuntimeError, match="must have same reduction dim"):
        capture(lambda x: x @ torch.ones(5, 5), leaf(3, 3))


def test_what_needs_the_data_is_refused_with_its_place():
    error = refused(lambda x: x.sum() + float(x.detach().numpy().sum()), leaf(3))
    assert "the call asks for the data of a tensor, and tensors of a trace have none" in str(error)
    assert "test_capture.py" in str(error)
    assert "torch.library.custom_op()" in str(error)
