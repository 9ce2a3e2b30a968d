"""What a stage consists of: bytes by region and beside them, seconds by region."""
from __future__ import annotations

import functools

import torch
from torch import nn

from tests.helpers import leaf
from torchckpt import checkpoint, keep
from torchckpt.distributed.budget.stage_parts import CountingScope, Parts, Seconds, stage_of
from torchckpt.planning import Block, Stage, fixed
from torchckpt.regions.saved import storage_of

ROW = 8 * 4
_NOTHING = nn.Identity()


def counted(function, *before, module=_NOTHING):
    """The parts of a stage that calls ``function``; storages of ``before`` were there before."""
    old = {storage for tensor in before for storage in storage_of(tensor)}
    scopes = []

    def around(region, recomputed):
        return Replayed(scopes[0], region, recomputed)

    scopes.append(CountingScope(module, lambda storage: storage not in old, around))
    with scopes[0].entered(), scopes[0].counting():
        y = function()
    y.sum().backward()
    return scopes[0].parts


class Replayed:
    def __init__(self, scope, region, recomputed):
        self.scope, self.region, self.recomputed = scope, region, recomputed

    def __enter__(self):
        return None

    def __exit__(self, *_):
        self.scope.replayed(self.region, self.recomputed)


def test_before_behind_and_between():
    x = leaf(8)
    parts = counted(lambda: checkpoint(lambda h: h.sin().exp(), checkpoint(torch.exp, x.exp()).sin()).exp(), x)
    # exp saves its output, which the first region has for its input; sin in between its input, the output of the region
    assert parts.before_bytes == ROW
    assert parts.boundary_bytes == [0, ROW]
    assert parts.inner_bytes == [ROW, ROW]
    assert parts.after_bytes == 2 * ROW


def test_what_was_there_before_does_not_count():
    x = leaf(8)
    parts = counted(lambda: checkpoint(torch.exp, x), x)
    assert parts == Parts(boundary_bytes=[0.0], inner_bytes=[ROW])


def test_parameters_do_not_count():
    linear, x = nn.Linear(8, 8), leaf(1, 8)
    parts = counted(lambda: checkpoint(lambda h: linear(h).exp(), x.sin()), x, module=linear)
    assert parts.boundary_bytes == [ROW]
    assert parts.inner_bytes == [ROW]


def test_several_inputs_are_one_boundary_and_one_that_all_have_counts_once():
    x, mask = leaf(8), torch.ones(8)

    def block(h, mask):
        return (h * mask).exp()

    parts = counted(lambda: checkpoint(block, checkpoint(block, x, mask), mask), x)
    assert parts.boundary_bytes == [ROW, ROW]
    assert parts.inner_bytes == [ROW, ROW]


def test_a_region_inside_of_a_region_is_part_of_it():
    x = leaf(8)
    parts = counted(lambda: checkpoint(lambda h: checkpoint(torch.exp, h.exp()).exp(), x), x)
    assert len(parts.boundary_bytes) == len(parts.inner_bytes) == 1


def test_what_is_kept_is_in_memory_where_a_region_is_recomputed():
    x = leaf(8)

    def block(kept, x):
        return kept(lambda h: h.exp().sin(), x.tanh()).cos().sin()

    plain = counted(lambda: checkpoint(functools.partial(block, lambda function, x: function(x)), x), x)
    assert (plain.boundary_bytes, plain.inner_bytes) == ([0.0], [4 * ROW])  # what each operator made
    parts = counted(lambda: checkpoint(functools.partial(block, keep), x), x)
    assert (parts.boundary_bytes, parts.inner_bytes) == ([2 * ROW], [2 * ROW])


def test_seconds_are_medians():
    seconds = Seconds()
    for start, end in ((0.0, 1.0), (5.0, 7.0), (10.0, 19.0)):
        seconds.add(3, 1, start, end)
    seconds.add(3, 0, 0.0, 4.0)
    assert seconds.medians(float) == {3: {1: 2.0, 0: 4.0}}


def test_a_stage():
    parts = Parts(3.0, 5.0, [1.0, 0.0], [8.0, 6.0])
    stage = stage_of(parts, Block(10.0, 6.0, 3.0), {0: 2.0, 1: 4.0})
    assert stage == Stage(
        (Block(2.0, 2.0, 1.0, 2.0, 9.0, 1.0), Block(4.0, 4.0, 2.0, 4.0, 6.0, 0.0)),
        fixed(saved_bytes=3.0),
        fixed(4.0, saved_bytes=5.0),
    )
    assert (stage.forward_seconds, stage.input_grad_seconds, stage.weight_grad_seconds) == (10.0, 6.0, 3.0)


def test_a_stage_without_regions():
    stage = stage_of(Parts(3.0, 0.0), Block(10.0, 6.0, 3.0), {})
    assert stage == Stage((), fixed(saved_bytes=3.0), fixed(10.0, 6.0, 3.0))


def test_a_region_that_saves_nothing_and_takes_no_time_can_be_planned():
    stage = stage_of(Parts(boundary_bytes=[0.0], inner_bytes=[0.0]), Block(1.0, 1.0, 1.0), {})
    (block,) = stage.blocks
    assert block.freed_bytes == 0
    assert block.saved_bytes > 0
    assert block.recompute_seconds > 0
