"""Regions inside regions, ours and torch's: equal, and each body runs as often as the theory says."""
from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from tests.helpers import Block, assert_program_transparent, by_hand, doing, leaf, plain, run
from torchckpt import checkpoint
from torchckpt.testing import count_recomputes


def torchs(function, *args, **kwargs):
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


class Levels(nn.Module):
    """Three blocks, each inside the one before; ``calls`` picks the way each level calls the next."""

    def __init__(self, inner_is_last: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.inner_is_last = inner_is_last
        self.runs: Counter[int] = Counter()
        self.events: list[str] = []

    def body(self, x, depth, calls):
        self.runs[depth] += 1
        self.events.append(f"{depth} {doing()}")
        hidden = self.blocks[depth - 1](x)
        if depth < 3:
            hidden = calls[0](self.body, hidden, depth + 1, calls[1:])
        return hidden if self.inner_is_last else hidden.cos().exp()

    def forward(self, x, calls):
        return calls[0](self.body, x, 1, calls[1:])


WAYS = {
    "ours": [checkpoint, checkpoint, checkpoint],
    "by hand": [by_hand, by_hand, by_hand],
    "ours in torch's in ours": [checkpoint, torchs, checkpoint],
    "torch's in ours in torch's": [torchs, checkpoint, torchs],
    "ours in torch's": [torchs, torchs, checkpoint],
    "torch's in ours": [checkpoint, checkpoint, torchs],
    "with a plain call between": [checkpoint, plain, checkpoint],
}


@pytest.mark.parametrize("inner_is_last", [False, True], ids=["inner in the middle", "inner last"])
@pytest.mark.parametrize("calls", WAYS.values(), ids=WAYS)
def test_three_levels(device, calls, inner_is_last):
    levels = Levels(inner_is_last).to(device)

    def program(call, x):
        return levels(x, [plain] * 3 if call is plain else calls)

    assert_program_transparent(None, program, leaf(3, 4, device=device), modules=[levels])


def runs_of(levels, calls, device):
    levels = levels.to(device)
    run(levels, leaf(3, 4, device=device), calls)
    return dict(levels.runs)


def test_body_of_depth_d_runs_d_plus_one_times(device):
    # Its forward, its own replay, and once in the replay of each level around it.
    assert runs_of(Levels(), [checkpoint] * 3, device) == {1: 2, 2: 3, 3: 4}


def test_each_level_is_replayed_once(device):
    with count_recomputes() as recomputes:
        runs_of(Levels(), [checkpoint] * 3, device)
    assert recomputes.by_region == {"'Levels.body'": 3}


def test_inner_region_that_comes_last_is_not_entered_by_the_replay_around_it(device):
    # The last that an outer level saves is the boundary of the inner one: there its replay ends.
    assert runs_of(Levels(inner_is_last=True), [checkpoint] * 3, device) == {1: 2, 2: 2, 3: 2}


def test_plain_level_between_two_regions(device):
    assert runs_of(Levels(), [checkpoint, plain, checkpoint], device) == {1: 2, 2: 2, 3: 3}


def test_ours_in_torchs_runs_as_often_as_torchs_in_torchs(device):
    theirs = runs_of(Levels(), [torchs, torchs, torchs], device)
    assert theirs == {1: 2, 2: 3, 3: 4}
    assert runs_of(Levels(), [torchs, torchs, checkpoint], device) == theirs
    assert runs_of(Levels(), [torchs, checkpoint, torchs], device) == theirs
    assert runs_of(Levels(), [checkpoint, torchs, checkpoint], device) == theirs


def test_order_of_replays(device):
    levels = Levels().to(device)
    run(levels, leaf(3, 4, device=device), [checkpoint] * 3)
    assert levels.events == [
        "1 forward",
        "2 forward",
        "3 forward",
        # backward: the outermost comes first, as the boundary of each level is saved in the one around it
        "1 replay",
        "2 forward in a replay",
        "3 forward in a replay",
        "2 replay",
        "3 forward in a replay",
        "3 replay",
    ]


def test_double_backward_of_nested_regions(device):
    levels = Levels().to(device)

    def gradients_of(calls):
        torch.manual_seed(1)
        x = leaf(3, 4, device=device)
        (first,) = torch.autograd.grad(levels(x, calls).sum(), x, create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), [x, *levels.parameters()], allow_unused=True)

    expected, received = gradients_of([plain] * 3), gradients_of([checkpoint] * 3)
    assert all(torch.equal(a, b) if a is not None else b is None for a, b in zip(expected, received))


def test_two_regions_side_by_side_in_one(device):
    blocks = nn.ModuleList(Block() for _ in range(3)).to(device)

    def program(call, x):
        def outer(x):
            return call(blocks[0], x) * call(blocks[1], x.exp())

        return blocks[2](call(outer, x))

    with count_recomputes() as recomputes:
        assert_program_transparent(checkpoint, program, leaf(3, 4, device=device), modules=[blocks])
    assert recomputes.total == 3


def test_loss_that_uses_an_inner_output_only(device):
    inner, outer = Block().to(device), Block().to(device)

    def program(call, x):
        def function(x):
            hidden = call(inner, x.exp())
            return outer(hidden), hidden

        return call(function, x)[1]

    assert_program_transparent(checkpoint, program, leaf(3, 4, device=device), modules=[inner, outer])


def test_recursion_of_a_region_into_itself(device):
    block = Block().to(device)

    def program(call, x):
        def function(x, times):
            hidden = block(x)
            return call(function, hidden, times - 1).sin() if times else hidden

        return call(function, x, 4)

    assert_program_transparent(checkpoint, program, leaf(3, 4, device=device), modules=[block])
