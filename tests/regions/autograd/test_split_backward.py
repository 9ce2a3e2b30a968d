"""Backward split into input and weight gradients, as zero-bubble schedules do it: one replay serves both halves."""
from __future__ import annotations

import pytest
import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from tests.helpers import Block, assert_equal, gradients, leaf, parameters_of, plain, replays
from tests.slow import few
from torchckpt import Checkpointing, checkpoint, is_recomputing
from torchckpt.testing import count_recomputes


class Stage:
    """A stage of a pipeline, whose middle block is a region of ``call``, after its forward."""

    def __init__(self, call, device) -> None:
        torch.manual_seed(1)
        blocks = [Block().to(device) for _ in range(3)]
        self.parameters = parameters_of(blocks)
        self.x, self.cotangent = leaf(3, 4, device=device), torch.randn(3, 4, device=device)
        self.output = blocks[2](call(blocks[1], blocks[0](self.x)))

    def backward_input(self):
        _, groups = stage_backward_input([self.output], [self.cotangent], [self.x], iter(self.parameters))
        return groups

    def backward_weight(self, groups):
        stage_backward_weight(iter(self.parameters), groups)
        return gradients(self.x, *self.parameters)


def split(stage):
    return stage.backward_weight(stage.backward_input())


def whole(stage):
    stage.output.backward(stage.cotangent)
    return gradients(stage.x, *stage.parameters)


def test_split_backward(call, device):
    expected, stage = split(Stage(plain, device)), Stage(call, device)
    with count_recomputes() as recomputes:
        received = split(stage)
    assert_equal(received, expected)
    assert recomputes.total == replays(call, 1)


def test_split_backward_is_the_whole_backward(device):
    assert_equal(split(Stage(checkpoint, device)), whole(Stage(plain, device)))


def test_input_half_replays_and_weight_half_does_not(call, device):
    with count_recomputes() as forward:
        stage = Stage(call, device)
    with count_recomputes() as input_half:
        groups = stage.backward_input()
    with count_recomputes() as weight_half:
        stage.backward_weight(groups)
    totals = [forward.total, input_half.total, weight_half.total]
    assert totals == ([1, 0, 0] if call.__name__ == "prefetched" else [0, 1, 0])


@few(6)
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]], ids=str)
def test_weight_halves_of_several_micro_batches_in_any_order(call, device, order):
    def gradients_of(call):
        stages = [Stage(call, device) for _ in range(3)]
        groups = [stage.backward_input() for stage in stages]
        return [stages[place].backward_weight(groups[place]) for place in order]

    expected = gradients_of(plain)
    with count_recomputes() as recomputes:
        received = gradients_of(call)
    assert_equal(received, expected)
    assert recomputes.total == 3


def test_stage_that_is_one_region(call, device):
    def gradients_of(call):
        torch.manual_seed(1)
        block, x = Block().to(device), leaf(3, 4, device=device)
        output = call(block, x)
        cotangent = torch.ones_like(output)
        _, groups = stage_backward_input([output], [cotangent], [x], block.parameters())
        stage_backward_weight(block.parameters(), groups)
        return gradients(x, *block.parameters())

    assert_equal(gradients_of(call), gradients_of(plain))


def test_nested_regions_are_replayed_once_each(device):
    def gradients_of(call):
        torch.manual_seed(1)
        inner, outer, x = Block().to(device), Block().to(device), leaf(3, 4, device=device)
        output = call(lambda x: outer(call(inner, x)).exp(), x)
        cotangent, parameters = torch.ones_like(output), parameters_of([inner, outer])
        _, groups = stage_backward_input([output], [cotangent], [x], iter(parameters))
        stage_backward_weight(iter(parameters), groups)
        return gradients(x, *parameters)

    expected = gradients_of(plain)
    with count_recomputes() as recomputes:
        received = gradients_of(checkpoint)
    assert_equal(received, expected)
    assert recomputes.total == 2


def test_slots_live_until_the_weight_half(device):
    torch.manual_seed(1)
    block, x, replays = Block().to(device), leaf(3, 4, device=device), []

    def function(x):
        replays.append(is_recomputing())
        return block(x)

    region = Checkpointing(function, x)
    output = region.recompute(region.checkpoint())
    _, groups = stage_backward_input([output], [torch.ones_like(output)], [x], block.parameters())
    assert region.is_recomputed
    assert replays == [False, True]
    stage_backward_weight(block.parameters(), groups)
    assert replays == [False, True]
