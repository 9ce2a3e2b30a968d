"""What a trace depends on beside the values of tensors: who changes it gets another trace, or an error."""
from __future__ import annotations

import enum
import re
import warnings
from collections import deque
from dataclasses import dataclass
from functools import partial
from types import MethodType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tests.graph.eager import compare
from tests.helpers import assert_equal, leaf
from tests.settings import default_dtype
from tests.slow import few, rarely
from torchckpt import graph
from torchckpt.errors import CaptureError


class Net(nn.Module):
    """All kinds of attributes that a forward may read."""

    def __init__(self):
        super().__init__()
        self.rise, self.act, self.drop, self.fall = nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 4)
        self.temperature, self.powers, self.function = 1.0, [1, 2], torch.sin
        self.words, self.table, self.config = ["word"] * 100, {"scale": 2.0}, SimpleNamespace(shift=0.0)

    def forward(self, x):
        h = self.function(self.drop(self.act(self.rise(x)))) * self.table["scale"] + self.config.shift
        return sum(self.fall(h) ** power for power in self.powers) / self.temperature


CHANGES = {
    "a partial function": lambda net: setattr(net, "function", partial(nn.functional.softplus, beta=2.0)),
    "a method": lambda net: setattr(net.act, "forward", MethodType(lambda self, x: x * 2, net.act)),
    "a dict": lambda net: net.table.update(scale=3.0),
    "an object in place of another": lambda net: setattr(net, "config", SimpleNamespace(shift=1.0)),
    "a constant": lambda net: setattr(net, "temperature", 0.5),
    "a list of constants": lambda net: net.powers.append(3),
    "a function": lambda net: setattr(net, "function", torch.cos),
    "a constant of a layer of torch's": lambda net: setattr(net.drop, "p", 0.6),
    "an activation": lambda net: setattr(net, "act", nn.GELU()),
    "a hook": lambda net: net.fall.register_forward_hook(lambda module, inputs, output: output * 3),
    "a hook before": lambda net: net.fall.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 3,)),
    "a hook of the backward": lambda net: net.fall.register_full_backward_hook(lambda module, into, of: (into[0] * 3,)),
    "the mode of a part": lambda net: net.drop.eval(),
    "a part that was not there": lambda net: setattr(net, "fall", nn.Sequential(net.fall, nn.Linear(4, 4))),
}


ALIKE = ("a partial function", "an object in place of another", "a list of constants", "an activation", "a hook before")


@few(1)
@pytest.mark.parametrize("change", rarely(ALIKE, CHANGES))
def test_what_the_forward_reads_and_that_changes_is_traced_anew(change, traces):
    net, x = Net(), torch.randn(5, 4)
    step = graph.rematerialize(net, x, keep="memory")
    CHANGES[change](net)
    compare(net, step, x)
    compare(net, step, x)
    assert len(traces) == 2


def test_deterministic_algorithms_and_the_default_dtype_are_traced_anew(traces):
    class Made(nn.Linear):
        def forward(self, x):
            return super().forward(x) + torch.ones(2)

    net, x = Made(3, 2), torch.randn(4, 3)
    step = graph.rematerialize(net, x)
    with default_dtype(torch.float64):
        compare(net, step, x)
        assert step(x).dtype == torch.float64
    torch.use_deterministic_algorithms(True)
    try:
        compare(net, step, x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(traces) == 3


def test_autocast_of_any_accelerator_is_traced_anew(traces, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    net, x = Net(), torch.randn(5, 4)
    step = graph.rematerialize(net, x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is none here
        torch.set_autocast_enabled("xpu", True)
        try:
            compare(net, step, x)
        finally:
            torch.set_autocast_enabled("xpu", False)
    assert len(traces) == 2


def test_a_counter_of_flops_is_no_reason_to_trace_again(traces):
    """It has hooks on all modules."""
    net, x = Net(), torch.randn(5, 4)
    step = graph.rematerialize(net, x)
    totals = []
    for call in (net, step):
        with FlopCounterMode(display=False) as counter:
            call(x).sum().backward()
        totals.append(counter.get_total_flops())
    assert totals[0] == totals[1]
    assert len(traces) == 1


def test_a_hook_of_all_modules_is_traced_anew(traces):
    net, x = Net(), torch.randn(5, 4)
    step = graph.rematerialize(net, x)

    def tripled(module, inputs, output):
        return output * 3 if module is net.fall else output

    hook = nn.modules.module.register_module_forward_hook(tripled)
    try:
        compare(net, step, x)
        compare(net, step, x)
    finally:
        hook.remove()
    compare(net, step, x)
    assert len(traces) == 2


def test_another_default_device_is_traced_anew(traces):
    class Made(nn.Linear):
        def forward(self, x):
            return super().forward(x) + torch.ones(2).to("cpu")

    net, x = Made(3, 2), torch.randn(4, 3)
    step = graph.rematerialize(net, x)
    with torch.device("meta"), pytest.raises(NotImplementedError):
        step(x)  # as the model does
    assert len(traces) == 2


def test_an_argument_that_lies_in_a_buffer_is_traced_anew(traces):
    """The forward changes both."""
    class Shifting(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.register_buffer("seen", torch.zeros(3, 4))

        def forward(self, x, shift):
            self.seen.add_(1)
            return super().forward(x) + shift.detach().clone()

    class Normed(nn.BatchNorm1d):
        def forward(self, x, shift):
            return super().forward(x) + shift

    x = torch.randn(5, 4)
    net = Normed(4)
    step = graph.rematerialize(net)
    for shift in (torch.ones(4), net.running_mean[:], torch.ones(4), net.running_mean[:]):
        compare(net, step, x, shift)
    assert len(traces) == 2
    net = Shifting()
    step = graph.rematerialize(net)
    compare(net, step, x, torch.ones(4))
    for shift in (net.seen[0], net.seen[2], net.seen.detach()[0], net.seen):
        with pytest.raises(CaptureError, match="the call changes"):
            step(x[:3], shift)


def test_what_is_there_again_has_its_trace_still(traces):
    net, x = Net(), torch.randn(5, 4)
    step = graph.rematerialize(net, x)
    for temperature in (1.0, 2.0, 1.0, 2.0):
        net.temperature = temperature
        compare(net, step, x)
    assert len(traces) == 2


def test_what_the_forward_itself_counts_is_no_reason_to_trace_again(traces):
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls, self.rows = self.calls + 1, len(x)
            return super().forward(x)

    net, x = Counting(3, 2), torch.randn(4, 3)
    step = graph.rematerialize(net, x)
    for _ in range(3):
        compare(net, step, x)
    assert len(traces) == 1


class Frozen(nn.Module):
    """Sets the mode of a part at each call, and a name that another module has for something else."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop, self.scale = nn.BatchNorm1d(4), nn.Dropout(0.5), 1.0

    def forward(self, x):
        self.norm.eval()
        self.norm.scale = len(x)
        return self.drop(self.norm(x)) * self.scale


def test_what_a_forward_sets_on_one_module_counts_on_others(traces):
    net, x = Frozen(), torch.randn(5, 4)
    step = graph.rematerialize(net, x)
    compare(net, step, x)
    net.scale = 3.0
    compare(net, step, x)
    step.eval()
    compare(net, step, x)
    assert_equal(step(x), step(x))
    assert len(traces) <= 4


# arguments ------------------------------------------------------------------------------------------------------------


@few(1)
@pytest.mark.parametrize("values", [(1, 1.0), (1, True), (0.0, -0.0), (0.5, 0.25)])
def test_constants_that_are_not_the_same(values, traces):
    class Scaled(nn.Linear):
        def forward(self, whole, by):
            return self.weight.sum(), whole * by

    step = graph.rematerialize(Scaled(2, 2))
    whole = torch.tensor([3, 4])
    for by in values:
        assert_equal(step(whole, by)[1], whole * by)
    assert len(traces) == 2


class Kind(enum.Enum):
    SUM = 0
    MEAN = 1


class Reduced(nn.Linear):
    def forward(self, x, how=None):
        y = super().forward(x)
        return {Kind.MEAN: torch.mean, torch.float64: torch.sum, torch.amax: torch.amax}.get(how, torch.sum)(y)


@few(1)
@pytest.mark.parametrize("how", [Kind.MEAN, torch.float64, torch.amax, None, "sum", float("nan")], ids=str)
def test_constants_of_every_kind_are_traced_once(how, traces):
    net, x = Reduced(3, 2), torch.randn(4, 3)
    step = graph.rematerialize(net, x, how)
    compare(net, step, x, how)
    assert len(traces) == 1


@dataclass
class Batch:
    x: torch.Tensor


@pytest.mark.parametrize(
    ("argument", "received"),
    [(Batch(torch.ones(3)), "Batch"), ({torch.ones(1)}, "set"), (memoryview(b"a"), "memory"), (nn.ReLU(), "ReLU")],
)
def test_argument_that_is_neither_a_tensor_nor_a_constant(argument, received):
    step, text = graph.rematerialize(Reduced(3, 2)), rf"received: args\[1\]\['how'\] is a .*{received}"
    with pytest.raises(CaptureError, match=text) as caught:
        step(torch.randn(4, 3), {"how": argument})
    assert "torch.export.register_dataclass" in str(caught.value)


def test_constant_that_always_changes_is_told_of_once():
    net, x = Reduced(3, 2), torch.randn(4, 3)
    step = graph.rematerialize(net)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for how in range(7):
            step(x, how)
    with pytest.warns(UserWarning, match=r"traced 8 kinds of calls, the last because args\[1\] was 6 and is 7"):
        step(x, 7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for how in range(8, 11):
            step(x, how)


@pytest.mark.slow
def test_attribute_that_always_changes_is_told_of():
    net, x = Net(), torch.randn(5, 4)
    step = graph.rematerialize(nn.Sequential(net), x)
    for net.temperature in range(1, 7):
        step(x)
    net.temperature = 7
    with pytest.warns(UserWarning, match=r"the last because 0.temperature was 6 and is 7; pass"):
        step(x)


@pytest.mark.slow
def test_object_that_is_always_another_is_told_of():
    net, x = Net(), torch.randn(5, 4)
    step = graph.rematerialize(net, x)
    for _ in range(6):
        net.config = SimpleNamespace(shift=0.0)
        step(x)
    net.config = SimpleNamespace(shift=0.0)
    with pytest.warns(UserWarning, match="because config was a SimpleNamespace and is another SimpleNamespace; pass"):
        step(x)


@pytest.mark.slow
def test_batches_of_many_sizes_are_not_told_of():
    step = graph.rematerialize(nn.Linear(4, 4))
    for rows in range(1, 12):
        step(torch.randn(rows, 4))


# tensors on modules ---------------------------------------------------------------------------------------------------


class Leaving(nn.Linear):
    def __init__(self, leave):
        super().__init__(3, 3)
        self.leave, self.seen = leave, []

    def forward(self, x):
        y = super().forward(x)
        self.leave(self, y)
        return y.sin()


LEAVINGS = {
    "itself": ("last", lambda module, y: setattr(module, "last", y)),
    "detached": ("last", lambda module, y: setattr(module, "last", y.detach())),
    "in a dict": ("last", lambda module, y: setattr(module, "last", {"y": [y]})),
    "in a list that there is": ("seen", lambda module, y: module.seen.append(y)),
    "in a set": ("last", lambda module, y: setattr(module, "last", {y})),
    "in a queue": ("last", lambda module, y: setattr(module, "last", deque([y]))),
    "on an object": ("last", lambda module, y: setattr(module, "last", SimpleNamespace(y=y))),
}


@few(1)
@pytest.mark.parametrize(("name", "leave"), LEAVINGS.values(), ids=LEAVINGS)
def test_tensor_that_a_forward_leaves_on_a_module(name, leave):
    net = nn.Sequential(nn.Linear(3, 3), Leaving(leave))
    text = f"received: after the forward, {name} of Leaving '1' holds one\n  works:    return output, {name}"
    with pytest.raises(CaptureError, match=re.escape(text)):
        graph.rematerialize(net, torch.randn(2, 3))


def test_tensor_of_before_that_a_forward_replaces():
    net, x = Leaving(lambda module, y: setattr(module, "last", y)), torch.randn(2, 3)
    net(x)
    with pytest.raises(CaptureError, match="received: after the forward, last of Leaving holds one"):
        graph.rematerialize(net, x)


class Lazy(nn.Linear):
    def __init__(self, make):
        super().__init__(3, 3)
        self.make = make
        self.register_buffer("empty", None)

    def forward(self, x):
        self.make(self)
        return super().forward(x)


MAKINGS = {
    "a buffer": lambda module: module.register_buffer("shift", torch.ones(3), persistent=False),
    "a buffer that was None": lambda module: setattr(module, "empty", torch.ones(3)),
    "a module": lambda module: setattr(module, "inner", nn.Linear(3, 3)),
    "a parameter": lambda module: setattr(module, "gain", nn.Parameter(torch.ones(3))),
}


@few(1)
@pytest.mark.parametrize("make", MAKINGS.values(), ids=MAKINGS)
def test_what_a_forward_makes_on_its_module(make):
    """The model can be called afterwards as before."""
    net, x = nn.Sequential(Lazy(make)), torch.randn(2, 3)
    state = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(CaptureError, match=r"the forward of Lazy makes \w+\n  works:    make it in __init__"):
        graph.rematerialize(net, x)
    assert_equal(dict(net.state_dict()), state)
    assert net[0].empty is None
    assert type(net(x)) is torch.Tensor


def test_parameter_without_a_shape():
    with pytest.raises(CaptureError, match=r"weight has none yet\n  works:    model\(\*inputs\), once"):
        graph.rematerialize(nn.LazyLinear(3), torch.randn(2, 3))


@pytest.mark.parametrize("alone", [True, False])
def test_output_in_what_torch_cannot_look_into(alone):
    class Returning(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return Batch(y) if alone else (y.sum(), Batch(y))

    with pytest.raises(CaptureError, match=r"received: a .*Batch.*\n  works:    torch.export.register_dataclass"):
        graph.rematerialize(Returning(3, 3), torch.randn(2, 3))


@few(1)
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm, nn.utils.parametrizations.weight_norm])
def test_weights_that_are_made_of_parameters(norm):
    net, x = nn.Sequential(norm(nn.Linear(3, 4)), nn.Tanh()), torch.randn(2, 3)
    step = graph.rematerialize(net, x, keep="memory")
    compare(net, step, x)
    compare(net, step, x)


def test_transforms_of_functions_run_the_model_itself():
    net, x = Reduced(3, 2), leaf(4, 3)
    step = graph.rematerialize(net, x)
    assert_equal(torch.func.grad(step)(x), torch.func.grad(net)(x))
    assert_equal(torch.func.vmap(step)(x), torch.func.vmap(net)(x))
