"""``keep``: a part of a region that runs once, against the program without the library."""
from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from tests.helpers import assert_equal, assert_transparent, clear_gradients, gradients, in_thread, leaf, plain
from torchckpt import (
    Checkpointing,
    Pipe,
    checkpoint,
    checkpoint_module,
    is_checkpointing,
    is_recomputing,
    keep,
    testing,
)
from torchckpt.errors import RecomputationError, TransformError

aten = torch.ops.aten


class Experts(nn.Module):
    """A mixture of experts whose router counts its calls, and picks by that count and by noise."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(size, 3)
        self.experts = nn.ModuleList(nn.Linear(size, size) for _ in range(3))
        self.calls = 0

    def route(self, x):
        self.calls += 1
        noise = torch.rand(3, device=x.device) + self.calls * torch.arange(3, device=x.device) % 2
        return (self.gate(x) + noise).softmax(-1).topk(2)

    def mixed(self, x, kept):
        h = nn.functional.dropout(x.tanh(), 0.3)
        weights, picked = kept(self.route, h)
        weights = weights / weights.sum(-1, keepdim=True)
        y = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            row, choice = torch.where(picked == number)  # of other shapes where other experts are picked
            y = y.index_add(0, row, expert(h[row]) * weights[row, choice, None])
        return nn.functional.dropout(y, 0.3).sin()

    def forward(self, x):
        return self.mixed(x, keep)


def without_keep(experts):
    """A call of ``experts`` as it would be without the library."""
    return functools.partial(experts.mixed, kept=plain)


@pytest.fixture
def experts(device):
    return Experts().to(device)


def trained(experts, call, x):
    """Output, gradients, and the next random number."""
    torch.manual_seed(2)
    experts.calls = 0
    clear_gradients(*experts.parameters())
    x = x.detach().requires_grad_()
    y = call(x)
    y.sin().sum().backward()
    found = [y.detach(), *gradients(x, *experts.parameters()), torch.rand(3)]
    assert experts.calls == 1
    return found


def nested(function):
    return lambda x: checkpoint(lambda x: checkpoint(lambda x: checkpoint(function, x) * 2, x).cos(), x)


def by_hand(function):
    def run(x):
        region = Checkpointing(function, x)
        return region.recompute(region.checkpoint())

    return run


def prefetched(function):
    def run(x):
        region = Checkpointing(function, x)
        y = region.checkpoint()
        region.prefetch()
        return y

    return run


CALLS = {
    "checkpoint": (lambda function: functools.partial(checkpoint, function), lambda function: function),
    "by hand": (by_hand, lambda function: function),
    "prefetched": (prefetched, lambda function: function),
    "to its end": (lambda f: functools.partial(checkpoint, f, early_stop=False), lambda function: function),
    "values": (lambda f: functools.partial(checkpoint, f, determinism_check="values"), lambda function: function),
    "nested": (nested, lambda function: lambda x: (function(x) * 2).cos()),
    "torch's around": (
        lambda f: functools.partial(torch_checkpoint.checkpoint, functools.partial(checkpoint, f), use_reentrant=False),
        lambda function: function,
    ),
    "torch's inside": (
        lambda f: functools.partial(
            checkpoint, lambda x: torch_checkpoint.checkpoint(f, x.cos(), use_reentrant=False).exp().sin()
        ),
        lambda f: lambda x: f(x.cos()).exp().sin(),
    ),
    "torch's": (
        lambda f: functools.partial(torch_checkpoint.checkpoint, f, use_reentrant=False),
        lambda function: function,
    ),
}


@pytest.mark.parametrize(("region", "same"), CALLS.values(), ids=CALLS)
def test_a_router_that_would_pick_other_experts(experts, device, region, same):
    x = torch.randn(6, 4, device=device)
    expected = trained(experts, same(without_keep(experts)), x)
    assert_equal(trained(experts, region(experts), x), expected)


def test_without_keep_it_is_an_error(experts, device):
    y = checkpoint(without_keep(experts), leaf(6, 4, device=device))
    with pytest.raises(RecomputationError, match="did not save what its forward saved"):
        y.sum().backward()


# where it is ----------------------------------------------------------------------------------------------------------


def test_what_is_kept_runs_once_whatever_replays():
    events = []

    def route(x):
        events.append(("route", is_checkpointing(), is_recomputing()))
        return checkpoint(inner, x)

    def inner(x):
        events.append(("inner", is_checkpointing(), is_recomputing()))
        return keep(note, x.exp()).sin()

    def note(x):
        events.append(("note", is_checkpointing(), is_recomputing()))
        return x.cos()

    y = checkpoint(lambda x: checkpoint(lambda x: keep(route, x.tanh()).sin(), x).cos(), leaf(3))
    assert events == [("route", True, False), ("inner", True, False), ("note", True, False)]
    with testing.count_recomputes() as recomputes:
        y.sum().backward()
    assert events[3:] == [("inner", False, True)]
    assert recomputes.total == 3


def test_inside_of_keep_and_outside_of_regions_it_is_the_plain_call():
    calls = []

    def note(x):
        calls.append(1)
        return x.sin()

    x = leaf(3)
    assert torch.equal(keep(note, x), x.sin())
    with torch.no_grad():
        assert torch.equal(checkpoint(lambda x: keep(note, x), x), x.sin())
    checkpoint(lambda x: keep(lambda x: keep(note, x).cos(), x).exp().sin(), x).sum().backward()
    assert len(calls) == 3


def test_a_backward_inside_of_what_is_kept():
    def route(x):
        with torch.enable_grad():
            h = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(checkpoint(lambda h: keep(torch.exp, h).sin().cos(), h).sum(), h)
        return gradient

    def block(kept, x):
        return (kept(route, x.tanh()) * x).sin().cos()

    x = leaf(3)
    expected = torch.autograd.grad(block(plain, x).sum(), x)
    assert_equal(torch.autograd.grad(checkpoint(functools.partial(block, keep), x).sum(), x), expected)


def test_a_backward_inside_of_the_region():
    def block(kept, x):
        y = kept(lambda x: x.tanh() * 2, x)
        (gradient,) = torch.autograd.grad(y.sin().sum(), y, create_graph=True)
        return (gradient * y).cos()

    x = leaf(3)
    expected = torch.autograd.grad(block(plain, x).sum(), x)
    assert_equal(torch.autograd.grad(checkpoint(functools.partial(block, keep), x).sum(), x), expected)


@pytest.mark.parametrize("allow_unused", [False, True])
def test_a_backward_inside_of_the_region_through_what_is_kept_is_an_error(allow_unused):
    def block(x):
        x = x * 1
        y = keep(lambda x: x.tanh() * x, x)
        (gradient,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True, allow_unused=allow_unused)
        return (gradient + y).sin()

    y = checkpoint(block, leaf(3))
    with pytest.raises(RecomputationError, match=r"a backward inside of a region cannot go through what torchckpt"):
        y.sum().backward()


def forward_mode(x):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        return forward_ad.unpack_dual(keep(torch.sin, dual)).tangent.cos()


def test_a_transform_inside_of_a_region_is_an_error():
    with pytest.raises(TransformError, match=r"nothing can be kept under vmap(.|\n)*keep\(torch\.vmap\(router\), x\)"):
        checkpoint(lambda x: torch.vmap(lambda x: keep(torch.sin, x))(x).cos(), leaf(3, 2))
    with pytest.raises(TransformError, match="nothing can be kept under vmap"):
        checkpoint(forward_mode, leaf(3, 2))
    x = leaf(3, 2)
    assert torch.equal(torch.vmap(lambda x: keep(torch.sin, x))(x), x.sin())
    assert_transparent(checkpoint, lambda x: keep(torch.vmap(torch.sin), x.tanh()).cos().exp(), x)


def test_hooks_of_others(device):
    seen = []

    def pack(tensor):
        seen.append(tensor.shape)
        return tensor.cpu()

    def block(kept, x):
        x = x.tanh()
        return kept(lambda x: x.exp().view(3, 1), x).sin().cos()

    x = leaf(3, device=device)
    expected = torch.autograd.grad(block(plain, x).sum(), x)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor.to(device)):
        y = checkpoint(functools.partial(block, keep), x)
    assert seen == [(3,), (3,), (3, 1)]  # the argument of the region, what exp saves, the result
    assert_equal(torch.autograd.grad(y.sum(), x), expected)


def saving(*operators):
    def policy(_, operator, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if operator in operators else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


@pytest.mark.parametrize("operators", [[], [aten.mm.default], [aten.sigmoid.default, aten.view.default]])
def test_selective_contexts_do_not_count_what_is_kept(operators):
    weight = leaf(4, 4)

    def block(kept, x):
        h = (x @ weight).tanh()
        gate = kept(lambda h: ((h @ weight).sigmoid() @ weight + torch.rand(4)).view(-1, 4), h)
        return ((gate @ weight).sigmoid() * h @ weight).tanh().view(-1).sin()

    x = leaf(3, 4)
    torch.manual_seed(1)
    expected = torch.autograd.grad(block(plain, x).sum(), [x, weight])
    torch.manual_seed(1)
    y = checkpoint(functools.partial(block, keep), x, context_fn=saving(*operators))
    assert_equal(torch.autograd.grad(y.sum(), [x, weight]), expected)


def test_a_module_in_another_thread_and_a_pipe():
    experts, x = Experts(), torch.randn(6, 4)
    expected = trained(experts, without_keep(experts), x)
    with checkpoint_module(experts):
        assert_equal(in_thread(trained, experts, experts, x), expected)
    assert_equal(trained(experts, Pipe(nn.Sequential(experts), chunks=1, checkpoint="always"), x), expected)


@pytest.mark.accelerator
def test_a_pipeline_on_two_devices(two_accelerators):
    stages = [Experts().to(device) for device in two_accelerators]

    def train(mode, kept):
        for stage in stages:
            stage.calls = 0
            stage.forward = functools.partial(stage.mixed, kept=kept)
        torch.manual_seed(2)
        pipe = Pipe(nn.Sequential(*stages), [1, 1], list(two_accelerators), chunks=3, checkpoint=mode)
        x = torch.linspace(-1, 1, 24, device=two_accelerators[0]).view(6, 4).requires_grad_()
        clear_gradients(*pipe.parameters())
        y = pipe(x)
        y.sin().sum().backward()
        assert [stage.calls for stage in stages] == [3, 3]
        return [y.detach(), *gradients(x, *pipe.parameters())]

    assert_equal(train("always", keep), train("never", plain))


def test_it_is_transparent(device):
    block = nn.Linear(4, 4).to(device)
    testing.assert_transparent(lambda x: (keep(nn.functional.dropout, block(x)) * x).sin(), leaf(3, 4, device=device))


# replays that differ --------------------------------------------------------------------------------------------------


def fewer(x):
    return x if is_recomputing() else keep(torch.sin, x)


def more(x):
    return keep(torch.sin, x) if is_recomputing() else x


def another(x):
    return keep(torch.cos, x) if is_recomputing() else keep(torch.sin, x)


def later(x):
    return keep(torch.sin, x.exp() if is_recomputing() else x)


def caught(x):
    try:
        return another(x)
    except RecomputationError:
        return x


ENDINGS = {
    fewer: (r"'.*\.sin', after 1 saved tensors", "nothing there"),
    more: ("nothing", r"'.*\.sin'"),
    another: (r"'.*\.sin', after 1 saved tensors", r"'.*\.cos', after 1 saved tensors"),
    later: (r"'.*\.sin', after 1 saved tensors", r"'.*\.sin', after 2 saved tensors"),
    caught: (r"'.*\.sin', after 1 saved tensors", r"'.*\.cos', after 1 saved tensors"),
}


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize(("function", "words"), ENDINGS.items(), ids=[f.__name__ for f in ENDINGS])
def test_a_replay_that_keeps_something_else(function, words, early_stop):
    y = checkpoint(lambda x: function(x.tanh()).sin().cos(), leaf(3), early_stop=early_stop)
    text = rf"did not call torchckpt\.keep as its forward did: call 1\n.*{words[0]}\n.*keeps: +{words[1]}\n"
    with pytest.raises(RecomputationError, match=text):
        y.sum().backward()


def test_a_replay_that_is_not_checked_may_keep_something_else():
    x = leaf(3)
    checkpoint(lambda x: another(x.tanh()).sin().cos(), x, determinism_check="none").sum().backward()
    assert_equal(x.grad, torch.autograd.grad(x.tanh().sin().sin().cos().sum(), x)[0])


def test_a_replay_that_keeps_on_other_arguments():
    def block(x):
        x = x.tanh()
        y = keep(lambda *tensors: tensors[0].exp(), *([x] if is_recomputing() else [x, x + 1]))
        return y.sin().cos()

    with pytest.raises(RecomputationError, match=r"called torchckpt\.keep on other tensors than its forward"):
        checkpoint(block, leaf(3)).sum().backward()


def test_a_backward_can_be_tried_again():
    is_wrong = [True]

    def block(x):
        x = x.tanh()
        return keep(torch.cos if is_recomputing() and is_wrong[0] else torch.sin, x).sin().cos()

    x = leaf(3)
    y = checkpoint(block, x).sum()
    with pytest.raises(RecomputationError):
        y.backward(retain_graph=True)
    is_wrong.clear(), is_wrong.append(False)
    y.backward()
    assert_equal(x.grad, torch.autograd.grad(x.tanh().sin().sin().cos().sum(), x)[0])
