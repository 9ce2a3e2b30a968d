"""``keep``: what a replay finds of it, which is results, changes in place, buffers and random numbers."""
from __future__ import annotations

import dataclasses
import functools
import gc
import weakref
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from tests.helpers import assert_equal, assert_program_transparent, gradients, leaf, plain, prefetched
from torchckpt import checkpoint, keep
from torchckpt.errors import ArgumentError

torch_region = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)


def test_one_result_in_two_places_is_one_tensor_and_what_is_no_tensor_is_as_it_is():
    seen = []

    def block(x):
        result = keep(lambda x: {"y": (y := x.exp()), "again": [y, None], "of": "experts"}, x.tanh())
        seen.append(result)
        return (result["y"] * result["again"][0]).sin().cos()

    checkpoint(block, leaf(3)).sum().backward()
    forward, replay = seen
    assert replay["again"][0] is replay["y"]
    assert replay["again"][1] is None
    assert replay["of"] == "experts"
    assert torch.equal(replay["y"], forward["y"])


def test_results_that_are_parameters_arguments_or_views_of_arguments():
    weight = nn.Parameter(torch.randn(3))

    def block(call, x):
        h = x.tanh() * 2
        same, view, parameter, detached = call(lambda h: (h, h[1:], weight, h.detach()), h)
        return (same * parameter).sin() * view.exp().sum() * detached

    for _ in range(2):
        expected = torch.autograd.grad(block(plain, x := leaf(3)).sum(), [x, weight])
        torch_x = x
        received = torch.autograd.grad(checkpoint(functools.partial(block, keep), torch_x).sum(), [x, weight])
        assert_equal(received, expected)


@pytest.mark.parametrize("layout", ["jagged", "sparse", "conjugated"])
def test_results_of_other_layouts(layout):
    """What is made of them for a replay is nothing that the region saves: later tensors keep their slots."""
    offsets = torch.tensor([0, 1, 4])

    def made(h):
        if layout == "sparse":
            return (h * (h > 0)).to_sparse()
        return torch.nested.nested_tensor_from_jagged(h, offsets) if layout == "jagged" else torch.fft.fft(h).conj()

    def block(call, x):
        h = x.sin()
        y = call(made, h)
        if layout == "sparse":
            return torch.sparse.mm(y, h.cos()).sin()
        y = (y * y.sin()).cos()
        return y.values() if layout == "jagged" else y.abs()

    x = leaf(4, 4)
    expected = torch.autograd.grad(block(plain, x).sum(), x)
    assert_equal(torch.autograd.grad(checkpoint(functools.partial(block, keep), x).sum(), x), expected)


def test_attributes_of_results_are_there_in_the_replay():
    seen = []

    def route(x):
        y = x.exp()
        y.expert = 3
        return y

    def block(x):
        y = keep(route, x.tanh())
        seen.append(y.expert)
        return (y * y).sin().cos()

    checkpoint(block, leaf(3)).sum().backward()
    assert seen == [3, 3]


@pytest.mark.parametrize("route", [torch.exp, lambda x: x.detach().exp().requires_grad_(), lambda _: OUTSIDE.exp()])
def test_a_hook_on_a_result_is_called_once(route):
    called = []

    def block(x):
        y = keep(route, x.tanh())
        y.register_hook(lambda gradient: called.append(1) or gradient * 2)
        return (y * x).sin().cos()

    x = leaf(3)
    prefetched(block, x).sum().backward()
    assert called == [1]


OUTSIDE = leaf(3)


def test_what_modules_and_variables_hold_later_does_not_matter():
    class Layer(nn.Module):
        def route(self, x):
            self.loss = x.sum()
            return x.exp()

        def forward(self, x):
            return keep(self.route, x.tanh()).sin().cos()

    later = torch.ones(3)
    layer = Layer()
    y = checkpoint(layer, leaf(3)) + checkpoint(lambda x: keep(lambda x: x + later, x.tanh()).sin().cos(), leaf(3))
    later = None
    y.sum().backward()


def test_tensors_inside_of_other_objects_are_an_error():
    class Routed:
        def __init__(self, x) -> None:
            self.x = x

    with pytest.raises(ArgumentError, match=r"keep: .*Routed' returned tensors in an object(.|\n)*register_dataclass"):
        checkpoint(lambda x: keep(Routed, x.sin()).x.cos(), leaf(3))
    assert keep(Routed, torch.ones(1)).x == 1


def test_an_argument_may_have_any_name():
    def routed(x, function):
        return function(x)

    checkpoint(lambda x: keep(routed, x.sin(), function=torch.exp).cos(), leaf(3)).sum().backward()


def test_an_iterator_is_an_error():
    with pytest.raises(ArgumentError, match=r"at its end in .*(.|\n)*received: a generator\n(.|\n)*list\(parts"):
        checkpoint(lambda x: sum(keep(lambda x: (x * i for i in range(3)), x.sin())).cos(), leaf(3))


@dataclasses.dataclass
class Data:
    number: float


@pytest.mark.parametrize(
    ("made", "change", "number"),
    [
        (lambda: Data(2.0), lambda data: setattr(data, "number", 3.0), lambda data: data.number),
        (lambda: SimpleNamespace(number=2.0), lambda data: setattr(data, "number", 3.0), lambda data: data.number),
        (lambda: {2, 3}, lambda data: data.discard(3), len),
        (lambda: bytearray(b"ab"), lambda data: data.pop(), len),
        (lambda: Counter("ab"), lambda data: data.update("ab"), lambda data: data["a"]),
        (lambda: torch.arange(3.0).numpy(), lambda data: data.fill(5), lambda data: float(data.sum())),
        (lambda: [[1]], lambda data: data[0].append(1), lambda data: len(data[0])),
    ],
)
def test_data_that_the_region_changes_is_unchanged_in_the_replay(made, change, number):
    def block(call, x):
        data = call(made)
        before = number(data)
        change(data)
        return (x * before).sin() * (x * number(data)).sin()

    x = leaf(3)
    expected = torch.autograd.grad(block(plain, x).sum(), x)
    y = checkpoint(functools.partial(block, keep), x)
    received = [torch.autograd.grad(y.sum(), x, retain_graph=True) for _ in range(2)]
    assert_equal(received, [expected] * 2)


def test_what_is_no_function_is_an_error():
    with pytest.raises(ArgumentError, match=r"keep: the function is not callable(.|\n)*keep\(router, x\), not"):
        keep(torch.ones(3))


# in place -------------------------------------------------------------------------------------------------------------


def test_a_result_that_the_region_changes_in_place_is_an_error():
    def block(x):
        weights = keep(torch.exp, x.tanh())
        weights.div_(2)
        return weights.sin().cos()

    y = checkpoint(block, leaf(3))
    with pytest.raises(RuntimeError, match=r"a result of torchckpt\.keep, .* is at version 1; expected version 0"):
        y.sum().backward()


def test_a_result_that_is_changed_in_place_behind_the_region_is_an_error_only_where_the_replay_needs_it():
    def block(x):
        y = keep(torch.exp, x.tanh())
        return y, y.sin().cos()

    changed, other = checkpoint(block, leaf(3))
    changed.add_(1)
    with pytest.raises(RuntimeError, match=r"a result of torchckpt\.keep"):
        other.sum().backward()

    def ends_with_it(x):
        return keep(lambda x: x.exp() * 1, x.tanh().sin())

    def run(call, x):
        y = call(ends_with_it if call is checkpoint else lambda x: x.tanh().sin().exp() * 1, x)
        y += 1
        return y

    assert_program_transparent(checkpoint, run, leaf(3))


class Refused(Exception):
    def __init__(self, *, reason) -> None:
        super().__init__(f"refused: {reason}")
        self.reason = reason


@pytest.mark.parametrize("region", [checkpoint, torch_region])
def test_what_it_raises_it_raises_again(region):
    """Having changed an argument, a random number and a buffer. It is not called again, and leaves no cycle."""
    calls, said, layer = [], [], nn.Linear(3, 3)
    layer.register_buffer("count", torch.zeros(3))

    def refuse(h):
        calls.append(weakref.ref(h))
        layer.count.add_(1)
        h.mul_(torch.rand(3))
        raise Refused(reason="no")

    def block(call, x):
        h = layer(x) * 2
        try:
            h = call(refuse, h)
        except Refused as refused:
            said.append((refused.reason, str(refused)))
            h = h + call(torch.rand, 3)
        return (h * torch.rand(3) * layer.count.clone()).sin()

    x = leaf(3)
    torch.manual_seed(1)
    expected = torch.autograd.grad(block(plain, x).sum(), x)
    layer.count.zero_()
    torch.manual_seed(1)
    gc.collect()
    gc.disable()
    try:
        y = region(functools.partial(block, keep), x)
        assert_equal(torch.autograd.grad(y.sum(), x), expected)
        assert (len(calls), calls[1]()) == (2, None)
        assert said == [("no", "refused: no")] * 3
    finally:
        gc.enable()
    assert torch.equal(layer.count, torch.ones(3))


def test_defaults_that_are_changed():
    def block(call, x):
        h, g = x * 2, x * 3

        def double(h=h, *, g=g) -> None:
            h.mul_(2)
            g.mul_(2)

        call(double)
        return h.sin() * g.sin()

    x = leaf(3)
    expected = torch.autograd.grad(block(plain, x).sum(), x)
    assert_equal(torch.autograd.grad(checkpoint(functools.partial(block, keep), x).sum(), x), expected)


def test_an_argument_that_comes_to_require_grad():
    def block(call, x):
        total = torch.zeros(3)
        call(lambda total, x: (total.add_(x.tanh()), 0)[1], total, x)
        return (total * total).sin()

    x = leaf(3)
    expected = torch.autograd.grad(block(plain, x).sum(), x)
    assert_equal(torch.autograd.grad(checkpoint(functools.partial(block, keep), x).sum(), x), expected)


def test_a_tensor_from_outside_of_the_region_is_changed_once():
    count = torch.zeros(2)

    def block(x):
        h = keep(lambda: count.add_(1).clone()) * x.tanh()
        return h.sin().cos()

    x = leaf(2)
    first, second = checkpoint(block, x), checkpoint(block, x)
    gradients_of_both = torch.autograd.grad(second.sum() + first.sum(), x)
    expected = torch.autograd.grad((2 * x.tanh()).sin().cos().sum() + (1 * x.tanh()).sin().cos().sum(), x)
    assert torch.allclose(gradients_of_both[0], expected[0])
    assert torch.equal(count, torch.full((2,), 2.0))


class Balanced(nn.Module):
    """A router that counts what it sends where, in a buffer that the block reads before it and behind it."""

    def __init__(self, how) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.gate, self.how = nn.Linear(4, 4), how
        self.register_buffer("load", torch.zeros((4096, 4) if how == "large" else 4))

    def route(self, x):
        picked = self.gate(x).softmax(-1)
        if self.how == "another":
            self.load = self.load + picked.detach().sum(0)
        else:
            self.load.add_(picked.detach().sum(0))
        return picked

    def forward(self, x, kept=keep):
        x = x * (1 + self.load.view(-1, 4)[0])
        return ((kept(self.route, x) + self.load.view(-1, 4)[-1]).sin() * x).tanh().cos()


class Centered(nn.Module):
    """Reads the running mean that a kept norm layer has moved."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    load = property(lambda self: self.norm.running_mean)

    def forward(self, x, kept=keep):
        return (kept(self.norm, x) + self.norm.running_mean.clone()).sin().exp().tanh()


class Around(nn.Module):
    """``inner``, called by ``call``, and something behind it."""

    def __init__(self, inner, call) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, x, kept=keep):
        return self.call(self.inner, x, kept=kept).exp().sin()


@pytest.mark.parametrize("how", ["in place", "another", "large", "norm"])
@pytest.mark.parametrize("inner", [plain, checkpoint])
def test_buffers_change_once_and_are_read_as_they_were(how, inner):
    x = torch.randn(3, 4)

    def steps(call, inner, kept):
        module, seen = Centered() if how == "norm" else Balanced(how), []
        around = Around(module, inner)
        for _ in range(3):
            outputs = [call(module, x, kept=kept), call(around, x, kept=kept), call(module, x, kept=kept)]
            sum(output.sum() for output in outputs).backward()
            seen += [output.detach() for output in outputs]
        return [*seen, module.load.clone(), *gradients(*module.parameters())]

    assert_equal(steps(checkpoint, inner, keep), steps(plain, plain, plain))


# random numbers -------------------------------------------------------------------------------------------------------


def test_random_numbers_behind_it_are_those_of_the_forward(device):
    named = torch.Generator(device).manual_seed(5)

    def block(kept, x):
        x = nn.functional.dropout(x, 0.5)
        x = x * kept(lambda: torch.rand(3, device=device) + torch.rand(3, device=device, generator=named))
        return nn.functional.dropout(x.sin(), 0.5) * torch.rand(3, device=device, generator=named)

    def run(call, kept):
        torch.manual_seed(1)
        named.manual_seed(5)
        x = torch.ones(3, device=device, requires_grad=True)
        y = call(functools.partial(block, kept), x).exp()
        found = [y.detach(), *torch.autograd.grad(y.sum(), x)]
        return [*found, torch.rand(3, device=device), torch.rand(3), named.get_state()]

    expected = run(plain, plain)
    assert_equal(run(functools.partial(checkpoint, generators=(named,)), keep), expected)


def test_without_a_snapshot_of_the_region_there_is_none_of_keep(monkeypatch):
    def block(x):
        return (keep(torch.rand_like, x.tanh()) * x).sin()

    y = checkpoint(block, leaf(3), preserve_rng_state=False)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    y.sum().backward()
    assert torch.equal(torch.rand(2), expected)
