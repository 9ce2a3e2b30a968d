"""What a stage consists of: bytes by region and beside them, seconds by region."""
from __future__ import annotations

import functools
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from tests.helpers import leaf
from torchckpt import checkpoint, keep
from torchckpt.measuring.saved import CountingScope, RegionBytes
from torchckpt.planning import Block, Stage, fixed
from torchckpt.planning.step.measured import measured_stage
from torchckpt.regions.saved import storage_of

ROW = 8 * 4
_NOTHING = nn.Identity()


def counted(function, *before, module=_NOTHING, keep=False):
    """The bytes of a stage that calls ``function``; storages of ``before`` were there before."""
    old = {storage for tensor in before for storage in storage_of(tensor)}

    @contextmanager
    def around(region, frame):
        yield
        scope.saved.replayed(region, frame)

    scope = CountingScope(keep, around, RegionBytes([module], lambda storage: storage not in old))
    with scope.entered():
        y = function()
    y.sum().backward()
    return scope.stage


def boundaries(stage):
    return [block.boundary_bytes for block in stage.blocks]


def inner(stage):
    return [block.freed_bytes for block in stage.blocks]


def test_before_behind_and_between():
    x = leaf(8)
    stage = counted(lambda: checkpoint(lambda h: h.sin().exp(), checkpoint(torch.exp, x.exp()).sin()).exp(), x)
    # exp saves its output, which the first region has for its input; sin in between its input, the output of the region
    assert stage.before.saved_bytes == ROW
    assert boundaries(stage) == [0, ROW]
    assert inner(stage) == [ROW, ROW]
    assert stage.after.saved_bytes == 2 * ROW


def test_what_was_there_before_does_not_count():
    x = leaf(8)
    stage = counted(lambda: checkpoint(torch.exp, x), x)
    assert (boundaries(stage), inner(stage), stage.saved_bytes) == ([0.0], [ROW], ROW)


def test_parameters_do_not_count():
    linear, x = nn.Linear(8, 8), leaf(1, 8)
    stage = counted(lambda: checkpoint(lambda h: linear(h).exp(), x.sin()), x, module=linear)
    assert boundaries(stage) == [ROW]
    assert inner(stage) == [ROW]


@pytest.mark.parametrize(("is_cached", "inner_bytes"), [(True, 0), (False, 8 * 8 * 2 + ROW / 2 - ROW)])
def test_what_others_hold_until_the_replay_is_of_no_region(is_cached, inner_bytes):
    linear, x = nn.Linear(8, 8, bias=False), leaf(1, 8)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=is_cached):
        stage = counted(lambda: checkpoint(linear, x.sin()), x, module=linear)
    assert boundaries(stage) == [ROW]
    assert inner(stage) == [inner_bytes]  # the weight and the input, cast, in place of the boundary


def test_several_inputs_are_one_boundary_and_one_that_all_have_counts_once():
    x, mask = leaf(8), torch.ones(8)

    def block(h, mask):
        return (h * mask).exp()

    stage = counted(lambda: checkpoint(block, checkpoint(block, x, mask), mask), x)
    assert boundaries(stage) == [ROW, ROW]
    # Kept, the second one holds its output in place of its input, which it does not save and nobody else holds.
    assert inner(stage) == [ROW, 0]


def test_a_region_inside_of_a_region_is_part_of_it():
    x = leaf(8)
    stage = counted(lambda: checkpoint(lambda h: checkpoint(torch.exp, h.exp()).exp(), x), x)
    assert len(stage.blocks) == 1


def test_what_is_kept_is_in_memory_where_a_region_is_recomputed():
    x = leaf(8)

    def block(kept, x):
        return kept(lambda h: h.exp().sin(), x.tanh()).cos().sin()

    plain = counted(lambda: checkpoint(functools.partial(block, lambda function, x: function(x)), x), x)
    assert (boundaries(plain), inner(plain)) == ([0.0], [4 * ROW])  # what each operator made
    stage = counted(lambda: checkpoint(functools.partial(block, keep), x), x)
    assert (boundaries(stage), inner(stage)) == ([2 * ROW], [2 * ROW])


def test_a_stage_that_is_kept_is_one_block():
    stage = counted(lambda: checkpoint(torch.exp, checkpoint(torch.exp, leaf(8)).sin()), keep=True)
    assert stage.blocks == (Block(0.0, 0.0, 0.0, 0.0, 2 * ROW),)
    assert stage.saved_bytes == 2 * ROW


def bytes_only(saved, boundary, replay=0.0):
    return Block(0.0, 0.0, 0.0, replay, saved, boundary)


def test_a_stage():
    blocks = bytes_only(9.0, 1.0, 2.0), bytes_only(6.0, 0.0, 4.0)
    sized = Stage(blocks, fixed(saved_bytes=3.0), fixed(saved_bytes=5.0))
    stage = measured_stage(sized, Block(10.0, 6.0, 3.0, 1.0))
    assert stage == Stage(
        (Block(2.0, 2.0, 1.0, 2.0, 9.0, 1.0), Block(4.0, 4.0, 2.0, 4.0, 6.0, 0.0)),
        fixed(saved_bytes=3.0),
        fixed(4.0, saved_bytes=5.0),
    )
    assert (stage.forward_seconds, stage.input_grad_seconds, stage.weight_grad_seconds) == (10.0, 6.0, 3.0)


def test_blocks_whose_replays_were_not_timed_take_equally_long():
    stage = measured_stage(Stage((bytes_only(9.0, 1.0), bytes_only(6.0, 0.0))), Block(3.0, 6.0, 2.0, 4.0))
    assert stage.blocks == (Block(1.5, 3.0, 1.0, 2.0, 9.0, 1.0), Block(1.5, 3.0, 1.0, 2.0, 6.0, 0.0))


def test_a_stage_without_regions():
    stage = measured_stage(Stage((), fixed(saved_bytes=3.0)), Block(10.0, 6.0, 3.0, 10.0))
    assert stage == Stage((), fixed(saved_bytes=3.0), fixed(10.0, 6.0, 3.0))


def test_a_region_that_saves_nothing_and_takes_no_time_can_be_planned():
    stage = measured_stage(Stage((fixed(),)), Block(1.0, 1.0, 1.0, 0.0))
    (block,) = stage.blocks
    assert block.freed_bytes == 0
    assert block.saved_bytes > 0
    assert block.recompute_seconds > 0
