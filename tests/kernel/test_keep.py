"""``keep``: a part of a region that runs once, against the program without the library."""
from __future__ import annotations

import functools
import gc
import random
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import torchckpt
from tests.helpers import (
    assert_equal,
    assert_program_transparent,
    assert_transparent,
    clear_gradients,
    gradients,
    in_thread,
    leaf,
    plain,
)
from torchckpt import Checkpointing, Pipe, checkpoint, checkpoint_module, is_checkpointing, is_recomputing, keep
from torchckpt.errors import ArgumentError, RecomputationError, TransformError
from torchckpt.testing import count_recomputes, flops, saved_bytes

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


# random programs ----------------------------------------------------------------------------------------------------


class Program:
    """A random program of nested regions and kept parts. ``run`` is the one that the library is held to."""

    STEPS = ("tanh", "dropout", "product", "in place", "noise", "halves", "matrix", "region", "keep", "keep")
    REGIONS = (
        checkpoint,
        functools.partial(checkpoint, early_stop=False, determinism_check="values"),
        functools.partial(torch_checkpoint.checkpoint, use_reentrant=False),
    )
    KEPT = ("plain", "counts", "dict", "changes its argument", "view", "argument", "no grad", "closed over")

    def __init__(self, seed: int) -> None:
        chosen = random.Random(seed)
        torch.manual_seed(seed)
        self.weights = [leaf(4, 4) for _ in range(3)]
        self.steps = self._steps(chosen, 0)

    def _steps(self, chosen, depth):
        return [self._step(chosen, chosen.choice(self.STEPS), depth) for _ in range(chosen.randint(1, 5))]

    def _step(self, chosen, kind, depth):
        inner = self._steps(chosen, depth + 1) if depth < 3 and kind in ("region", "keep") else [("tanh", None, [])]
        of = {"region": self.REGIONS, "keep": self.KEPT}
        return kind, chosen.choice(of.get(kind, range(3))), inner

    def run(self, with_library: bool, backward):
        torch.manual_seed(7)
        self.calls, self.is_regions = 0, with_library
        x = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()
        for tensor in self.weights:
            tensor.grad = None
        y = self._region(self.REGIONS[0], functools.partial(self._body, self.steps), x.sin()).cos()
        calls = self.calls
        found = backward(y, [x, *self.weights])
        assert self.calls == calls
        return [y.detach(), calls, torch.rand(2), *found]

    def _region(self, call, function, x):
        return call(function, x) if self.is_regions else function(x)

    def _body(self, steps, x):
        for kind, how, inner in steps:
            x = self._done(kind, how, functools.partial(self._body, inner), x)
        return x

    def _done(self, kind, how, inner, x):
        if kind == "region":
            return self._region(how, inner, x)
        if kind == "keep":
            return self._kept(how, inner, x)
        if kind == "in place":
            return (x.clone().add_(1.0) * 1.5).sin_()
        simple = {
            "tanh": torch.tanh,
            "dropout": lambda x: nn.functional.dropout(x, 0.3),
            "product": lambda x: x * x.sin(),
            "noise": lambda x: x + torch.rand(4),
            "halves": lambda x: torch.cat([x[2:].cos(), x[:2]]),
            "matrix": lambda x: x @ self.weights[how],
        }
        return simple[kind](x)

    def _kept(self, how, inner, x):
        kept = keep if self.is_regions else plain
        if how == "counts":
            return kept(self._counted, inner, x)
        if how == "dict":
            found = kept(lambda x: {"a": (inner(x), None), "i": x.argmax(-1), "n": 3}, x)
            return found["a"][0].cos() * found["n"] + found["i"].unsqueeze(-1)
        if how == "changes its argument":
            x = x.clone()
            result = kept(lambda x: x.mul_(torch.rand(4) + 0.5).add_(1), x)
            return x.sin() + result
        if how == "closed over":
            y, other = x.clone(), x * 2
            kept(lambda: (y.mul_(torch.rand(4)), other.add_(1), 0)[2])
            return y * other
        if how == "view":
            return x * kept(lambda x: x.t(), x).t()
        if how == "argument":
            return x * kept(lambda x: x, x)
        if how == "no grad":
            with torch.no_grad():
                (result,) = kept(lambda x: (inner(x),), x)
            return x.tanh() + result
        return kept(inner, x)

    def _counted(self, inner, x):
        self.calls += 1
        return inner(x) * self.calls


def whole(y, leaves):
    return torch.autograd.grad(y.sum(), leaves, allow_unused=True)


def double(y, leaves):
    first = torch.autograd.grad(y.sum(), leaves, allow_unused=True, create_graph=True)
    squares = sum((gradient**2).sum() for gradient in first if gradient is not None)
    return [*first, *torch.autograd.grad(squares, leaves, allow_unused=True)] if squares.requires_grad else first


def retained(y, leaves):
    first = torch.autograd.grad(y.sum(), leaves, allow_unused=True, retain_graph=True)
    return [*first, *torch.autograd.grad(y.cos().sum(), leaves, allow_unused=True)]


def split(y, leaves):
    _, groups = stage_backward_input([y], [torch.ones_like(y)], leaves[:1], iter(leaves[1:]))
    stage_backward_weight(iter(leaves[1:]), groups)
    return gradients(*leaves)


@pytest.mark.parametrize("backward", [whole, double, retained, split])
@pytest.mark.parametrize("first", range(0, 60, 20))
def test_random_programs(backward, first):
    done = 0
    for seed in range(first, first + 20):
        program = Program(seed)
        try:
            expected = program.run(False, backward)
        except RuntimeError:  # not every graph can be split
            continue
        assert_equal(program.run(True, backward), expected)
        done += 1
    assert done >= 10


# results ------------------------------------------------------------------------------------------------------------


def test_one_result_in_two_places_is_one_tensor_and_what_is_no_tensor_is_as_it_is():
    seen = []

    def block(x):
        result = keep(lambda x: {"y": (y := x.exp()), "again": [y, None], "of": "experts"}, x.tanh())
        seen.append(result)
        return (result["y"] * result["again"][0]).sin().cos()

    checkpoint(block, leaf(3)).sum().backward()
    forward, replay = seen
    assert replay["again"][0] is replay["y"] and replay["again"][1] is None and replay["of"] == "experts"
    assert_equal({**replay, "y": replay["y"].detach(), "again": []}, {**forward, "y": forward["y"].detach(), "again": []})


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


def test_tensors_inside_of_other_objects_are_an_error():
    class Routed:
        def __init__(self, x) -> None:
            self.x = x

    with pytest.raises(ArgumentError, match=r"keep: .*Routed' must return tensors in pytrees(.|\n)*register_dataclass"):
        checkpoint(lambda x: keep(Routed, x.sin()).x.cos(), leaf(3))
    assert keep(Routed, torch.ones(1)).x == 1


def test_what_is_no_function_is_an_error():
    with pytest.raises(ArgumentError, match=r"keep: the function must be callable(.|\n)*keep\(router, x\), not"):
        keep(torch.ones(3))


# in place -----------------------------------------------------------------------------------------------------------


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


class Around(nn.Module):
    """``inner``, called by ``call``, and something behind it."""

    def __init__(self, inner, call) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, x, kept=keep):
        return self.call(self.inner, x, kept=kept).exp().sin()


@pytest.mark.parametrize("how", ["in place", "another", "large"])
@pytest.mark.parametrize("inner", [plain, checkpoint])
def test_buffers_change_once_and_are_read_as_they_were(how, inner):
    x = torch.randn(3, 4)

    def steps(call, inner, kept):
        module, seen = Balanced(how), []
        around = Around(module, inner)
        for _ in range(3):
            outputs = [call(module, x, kept=kept), call(around, x, kept=kept), call(module, x, kept=kept)]
            sum(output.sum() for output in outputs).backward()
            seen += [output.detach() for output in outputs]
        return [*seen, module.load.clone(), *gradients(*module.parameters())]

    assert_equal(steps(checkpoint, inner, keep), steps(plain, plain, plain))


# random numbers -----------------------------------------------------------------------------------------------------


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
        return [y.detach(), *torch.autograd.grad(y.sum(), x), torch.rand(3, device=device), torch.rand(3), named.get_state()]

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


# where it is --------------------------------------------------------------------------------------------------------


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
    with count_recomputes() as recomputes:
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
    with pytest.raises(RecomputationError, match=r"a backward inside of a region cannot go through what torchckpt\.keep"):
        y.sum().backward()


def test_a_transform_inside_of_a_region_is_an_error():
    with pytest.raises(TransformError, match=r"nothing can be kept under vmap(.|\n)*keep\(torch\.vmap\(router\), x\)"):
        checkpoint(lambda x: torch.vmap(lambda x: keep(torch.sin, x))(x).cos(), leaf(3, 2))
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


def test_module_and_thread_and_pipe(experts, device):
    if device.type != "cpu":
        pytest.skip("its devices are in tests/pipe")
    x = torch.randn(6, 4)
    expected = trained(experts, without_keep(experts), x)
    with checkpoint_module(experts):
        assert_equal(in_thread(trained, experts, experts, x), expected)
    assert_equal(trained(experts, Pipe(nn.Sequential(experts), chunks=1, checkpoint="always"), x), expected)


# replays that differ ------------------------------------------------------------------------------------------------


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
    text = rf"did not call torchckpt\.keep as its forward did\n.*call 1 of keep\n.*{words[0]}\n.*replay keeps: +{words[1]}\n"
    with pytest.raises(RecomputationError, match=text):
        y.sum().backward()


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


# what it costs ------------------------------------------------------------------------------------------------------


def test_bytes_and_flops():
    weight = nn.Parameter(torch.randn(8, 8))

    def block(kept, x):
        h = (x @ weight).tanh()
        return (kept(lambda h: (h @ weight).exp(), h) @ weight).sin().cos()

    x = leaf(4, 8)
    product, found = 2 * 4 * 8 * 8, {}
    for kept in (plain, keep):
        with saved_bytes() as saved, flops() as counted:
            y = checkpoint(functools.partial(block, kept), x)
        found[kept] = saved.total - x.nbytes
        with flops() as replayed:
            y.sum().backward()
        assert counted.total == 3 * product
        assert replayed.total == (9 if kept is plain else 8) * product
    assert found == {plain: 0, keep: 2 * x.nbytes}  # what is kept is h, and its own result


def test_results_die_with_the_replay_or_with_the_graph():
    results = []

    def block(x):
        def route(x):
            y = x.cos() * 2
            results.append(weakref.ref(y.untyped_storage()))
            return y, {"of": x}

        return keep(route, x.tanh())[0].sin().cos()

    def alive():
        return [reference() is not None for reference in results]

    gc.collect()
    gc.disable()
    try:
        for call in (block, lambda x: checkpoint(block, x).exp().sin()):
            results.clear()
            y = checkpoint(call, leaf(3))
            assert alive() == [True]
            del y
            assert alive() == [False]
            results.clear()
            region = Checkpointing(call, leaf(3))
            y = region.checkpoint()
            y.sum().backward(retain_graph=True)
            y.sum().backward()
            assert alive() == [False]
    finally:
        gc.enable()


def test_a_region_that_saves_nothing_and_a_replay_that_failed_hold_nothing():
    made = []

    def noted(x):
        y = x.exp()
        made.append(weakref.ref(y.untyped_storage()))
        return y

    region = Checkpointing(lambda x: keep(noted, x).sin(), torch.ones(3))
    region.checkpoint()
    assert made[0]() is None

    y = checkpoint(lambda x: another(noted(x)).sin().cos(), leaf(3))
    with pytest.raises(RecomputationError):
        y.sum().backward()
    gc.collect()
    assert made[2]() is None  # of the replay


def test_regions_that_keep_nothing_call_no_more_than_before():
    import sys

    def names(call):
        seen = []

        def note(frame, event, _):
            if event == "call" and "torchckpt" in frame.f_code.co_filename:
                seen.append(frame.f_code.co_filename.rpartition("/")[2])

        sys.setprofile(note)
        try:
            call()
        finally:
            sys.setprofile(None)
        return seen

    x = leaf(3)
    found = names(lambda: checkpoint(lambda x: x.sin().cos(), x).sum().backward())
    assert not {"keep.py", "kept.py", "result.py", "hooks.py"} & set(found)
    assert "keep.py" in names(lambda: checkpoint(lambda x: keep(torch.sin, x).cos(), x))


def test_it_is_public():
    assert torchckpt.keep is keep
