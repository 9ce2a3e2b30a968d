"""Early stop: a replay ends with the last tensor that is needed, counted in FLOPs."""
from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torchs_checkpoint

from tests.helpers import plain
from torchckpt import checkpoint, checkpoint_module
from torchckpt.testing import flops

D = 16
UNIT = 2 * D * D * D  # FLOPs of one D x D x D matrix product


class TransformerBlock(nn.Module):
    """Pre-norm, one head, no dropout, on D tokens of width D: 14 units forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(2))
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, dim=-1)  # 3 units
        attention = (q @ k.t() / D**0.5).softmax(dim=-1) @ v  # 1 + 1
        x = x + self.proj(attention)  # 1
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))  # 4 + 4


def units(call, blocks=1):
    """Of a step, forward and backward, through ``blocks`` regions."""
    torch.manual_seed(0)
    model, x = [TransformerBlock() for _ in range(blocks)], torch.randn(D, D, requires_grad=True)
    with flops() as counted:
        for block in model:
            x = call(block, x)
        x.sum().backward()
    return counted.total / UNIT


ours_to_the_end = functools.partial(checkpoint, early_stop=False)
theirs = functools.partial(torchs_checkpoint, use_reentrant=False)
theirs_reentrant = functools.partial(torchs_checkpoint, use_reentrant=True)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (plain, 42),  # 14 forward, 28 backward
        (checkpoint, 42 + 10),  # the last product, of 4 units, is not needed again
        (ours_to_the_end, 42 + 14),
        (theirs, 42 + 10),
        (theirs_reentrant, 42 + 14),
    ],
)
def test_units_of_one_transformer_block(call, expected):
    assert units(call) == expected


def test_units_of_three_transformer_blocks():
    assert units(checkpoint, blocks=3) == 3 * units(checkpoint) == 3 * 52


def test_units_of_a_checkpointed_module():
    def call(block, x):
        checkpoint_module(block)
        return block(x)

    assert units(call) == 52


def test_units_of_a_region_around_a_region():
    # The outer replay ends at the boundary of the inner region, before any product; the inner one does its ten.
    assert units(lambda block, x: checkpoint(lambda x: checkpoint(block, x.sin()), x)) == 52
    assert units(lambda block, x: theirs(lambda x: theirs(block, x.sin()), x)) >= 52


@pytest.mark.parametrize(("options", "expected"), [({}, ["first"]), ({"early_stop": False}, ["first", "last"])])
def test_what_comes_after_the_last_saved_tensor_runs_in_the_forward_only(options, expected):
    ran = []

    def function(x):
        ran.append("first")
        y = x.sin()
        ran.append("last")
        return y + 1

    loss = checkpoint(function, torch.ones(3, requires_grad=True), **options).sum()
    ran.clear()
    loss.backward()
    assert ran == expected


def test_replay_ends_inside_a_loop_as_well():
    ran = []

    def function(x):
        for step in range(4):
            ran.append(step)
            x = x.sin() if step < 2 else x * 2
        return x

    loss = checkpoint(function, torch.ones(3, requires_grad=True)).sum()
    ran.clear()
    loss.backward()
    assert ran == [0, 1]


def test_region_that_saves_nothing_is_not_replayed():
    ran = []

    def function(x):
        ran.append(True)
        return x + 1

    checkpoint(function, torch.ones(3, requires_grad=True)).sum().backward()
    assert len(ran) == 1


def test_early_stop_unwinds_the_users_contexts():
    entered = []

    class Context:
        def __enter__(self):
            entered.append(self)

        def __exit__(self, *_):
            entered.remove(self)

    def function(x):
        with Context():
            return x.sin() + 1

    checkpoint(function, torch.ones(3, requires_grad=True)).sum().backward()
    assert entered == []
