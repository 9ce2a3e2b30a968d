"""``context_fn`` with torch's selective checkpointing: equal, and what the policy saves does not run again."""
from __future__ import annotations

import contextlib
import functools
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from tests.helpers import Block, assert_equal, assert_program_transparent, assert_transparent, in_thread, leaf
from torchckpt import Checkpointing, checkpoint, is_recomputing, keep
from torchckpt.errors import ArgumentError, RecomputationError
from torchckpt.testing import flops

aten = torch.ops.aten


class CountOps(TorchDispatchMode):
    """How often each operator runs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[object] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


def saving(*ops):
    """A ``context_fn`` that saves the results of ``ops``."""

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in ops else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


def by_hand(function, *args, context_fn):
    region = Checkpointing(function, *args, context_fn=context_fn)
    return region.recompute(region.checkpoint())


POLICIES = {
    "nothing": [],
    "matrix products": [aten.addmm.default, aten.mm.default],
    "activations": [aten.tanh.default, aten.sigmoid.default],
    "all of them": [aten.addmm.default, aten.mm.default, aten.tanh.default, aten.sigmoid.default],
}


@pytest.mark.parametrize("call", [checkpoint, by_hand], ids=["checkpoint", "by_hand"])
@pytest.mark.parametrize("ops", POLICIES.values(), ids=POLICIES)
def test_selective_checkpointing(call, device, ops):
    block = Block().to(device)
    selective = functools.partial(call, context_fn=saving(*ops))
    assert_transparent(selective, block, leaf(3, 4, device=device), modules=[block])


@torch.library.custom_op("torchckpt_tests::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(x)


noise.register_autograd(lambda ctx, gradient: None)


class Drawing(nn.Module):
    """Draws numbers that a policy saves, some that it does not, and some that are kept."""

    def forward(self, x):
        noisy = x * torch.rand_like(x)  # tagged as what draws
        kept = keep(nn.functional.dropout, noisy.tanh(), 0.3)
        inner = checkpoint(nn.functional.dropout, kept * torch.rand_like(x), 0.3)
        return nn.functional.dropout(inner.sin() * noise(x).exp(), 0.3) * x


SAVED_DRAWS = [aten.rand_like.default, torch.ops.torchckpt_tests.noise.default]


@pytest.mark.parametrize("call", [checkpoint, by_hand], ids=["checkpoint", "by_hand"])
@pytest.mark.parametrize(
    "ops", [SAVED_DRAWS[:1], SAVED_DRAWS[1:], SAVED_DRAWS, []], ids=["tagged", "own", "both", "none"]
)
def test_numbers_drawn_behind_a_draw_that_is_saved(call, device, ops):
    selective = functools.partial(call, context_fn=saving(*ops))
    assert_transparent(selective, Drawing(), leaf(3, 4, device=device))


def test_their_values_are_those_of_the_forward(device):
    selective = functools.partial(checkpoint, context_fn=saving(*SAVED_DRAWS), determinism_check="values")
    assert_transparent(selective, Drawing(), leaf(3, 4, device=device))


class Keeps(TorchDispatchMode):
    """A context of the user's own: the first of two keeps what an operator returns, the second hands it out."""

    def __init__(self, op, kept, hands_out):
        super().__init__()
        self.op, self.kept, self.hands_out = op, kept, hands_out

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is self.op and self.hands_out:
            return self.kept.pop(0)
        result = func(*args, **(kwargs or {}))
        if func is self.op:
            self.kept.append(result.detach())
        return result


def test_numbers_drawn_behind_a_draw_that_a_context_of_the_users_own_keeps(device):
    def contexts():
        kept = []
        return tuple(Keeps(aten.rand_like.default, kept, hands_out) for hands_out in (False, True))

    assert_transparent(functools.partial(checkpoint, context_fn=contexts), Drawing(), leaf(3, 4, device=device))


def runs_of(op, device, **options):
    block = Block().to(device)
    with CountOps() as ops:
        checkpoint(block, leaf(3, 4, device=device), **options).sum().backward()
    return ops.counts[op]


def test_saved_operators_do_not_run_again(device):
    assert runs_of(aten.addmm.default, device) == 4
    assert runs_of(aten.addmm.default, device, context_fn=saving(aten.addmm.default)) == 2


def test_other_operators_run_again(device):
    assert runs_of(aten.tanh.default, device, context_fn=saving(aten.addmm.default)) == 2


def test_flops_are_those_of_the_plain_call(device):
    block, x = Block().to(device), leaf(3, 4, device=device)
    with flops() as of_plain:
        block(x).sum().backward()
    with flops() as of_region:
        checkpoint(block, x).sum().backward()
    with flops() as of_selective:
        checkpoint(block, x, context_fn=saving(aten.addmm.default)).sum().backward()
    # 2 products forward, 4 backward; the replay adds 2, each of 2 * 3 * 4 * 4 operations
    assert [of_plain.total, of_region.total, of_selective.total] == [6 * 96, 8 * 96, 6 * 96]


def test_contexts_are_around_forward_and_replay(device):
    events = []

    @contextlib.contextmanager
    def noted(name):
        events.append(f"enter {name}")
        try:
            yield
        finally:
            events.append(f"leave {name}")

    def function(x):
        events.append("function")
        return x.exp()

    output = checkpoint(function, leaf(3, device=device), context_fn=lambda: (noted("forward"), noted("replay")))
    events.append("backward")
    output.sum().backward()
    assert events == [
        *("enter forward", "function", "leave forward"),
        "backward",
        *("enter replay", "function", "leave replay"),
    ]


def test_contexts_are_made_anew_for_each_call():
    made = []

    def context_fn():
        made.append((contextlib.nullcontext(), contextlib.nullcontext()))
        return made[-1]

    for _ in range(3):
        checkpoint(torch.exp, leaf(3), context_fn=context_fn)
    assert len(made) == 3


def test_selective_checkpointing_of_nested_regions(device):
    inner, outer, option = Block().to(device), Block().to(device), saving(aten.addmm.default)

    def program(call, x):
        return call(lambda x: outer(call(inner, x.exp())).exp(), x)

    selective = functools.partial(checkpoint, context_fn=option)
    assert_program_transparent(selective, program, leaf(3, 4, device=device), modules=[inner, outer])


def test_selective_checkpointing_with_backward_in_another_thread(device):
    block, x = Block().to(device), leaf(3, 4, device=device)

    def gradients_of(**options):
        torch.manual_seed(1)
        loss = checkpoint(block, x, **options).sum()
        return in_thread(torch.autograd.grad, loss, [x, *block.parameters()])

    assert_equal(gradients_of(context_fn=saving(aten.addmm.default)), gradients_of())


@pytest.mark.parametrize("made", [None, (contextlib.nullcontext(),), [contextlib.nullcontext()] * 2, (1, 2)], ids=repr)
def test_context_fn_that_returns_something_else(made):
    with pytest.raises(ArgumentError, match="context_fn did not return two context managers, one around the"):
        checkpoint(torch.exp, leaf(3), context_fn=lambda: made)


def test_a_replay_that_raised_is_not_tried_again_where_its_context_is_used_up():
    def context_fn():
        return contextlib.nullcontext(), contextlib.nullcontext()

    def function(x):
        if is_recomputing():
            raise ZeroDivisionError
        return x.exp().sin()

    loss = checkpoint(function, leaf(3), context_fn=context_fn).sum()
    with pytest.raises(ZeroDivisionError):
        loss.backward(retain_graph=True)
    with pytest.raises(RecomputationError) as caught:
        loss.backward()
    name = "'test_a_replay_that_raised_is_not_tried_again_where_its_context_is_used_up.<locals>.function'"
    assert str(caught.value) == (
        "the context of a replay was entered before, and is entered once\n"
        f"  received: a second replay of region {name}, whose first one raised\n"
        "  works:    a new forward; or context_fn=None"
    )


@pytest.mark.parametrize("momentum", [None, 0.1])
def test_statistics_of_batch_norm_are_no_operators_of_the_region(momentum):
    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=momentum), nn.ReLU(), nn.BatchNorm1d(4))

    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    plain, ours = net(), net()
    plain(torch.ones(3, 4)).square().sum().backward()
    checkpoint(ours, torch.ones(3, 4), context_fn=contexts).square().sum().backward()
    assert_equal([*ours.buffers(), ours[0].bias.grad], [*plain.buffers(), plain[0].bias.grad])
