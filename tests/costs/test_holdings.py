"""Whose bytes are whose, where several parts of a stage hold the same storage."""
from __future__ import annotations

import torch
from torch import nn

from tests.costs.models import ROWS, WIDTH
from torchckpt import checkpoint, keep
from torchckpt.costs import pipeline_costs

VECTOR = 4 * ROWS * WIDTH


class Calls(nn.Module):
    """Regions in a row, written as a function of the input and of ``checkpoint``."""

    def __init__(self, call) -> None:
        super().__init__()
        self.call = call
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return self.call(x, self.scale)


def vectors(call):
    """Of the second stage, whose input has a gradient: before, blocks, after."""

    def build():
        return [Calls(lambda x, scale: checkpoint(sine, x * scale)), Calls(call)], torch.randn(ROWS, WIDTH)

    stage = pipeline_costs(build, "h100", kernels="cpu").counted[1]
    assert stage.message_bytes == VECTOR
    return [(part.work.saved_bytes // VECTOR, part.work.boundary_bytes // VECTOR) for part in stage.parts]


def sine(x):
    return x.sin()


def test_a_block_saves_its_input():
    assert vectors(lambda x, _: checkpoint(sine, checkpoint(sine, x))) == [(0, 0), (1, 1), (1, 1), (0, 0)]


def test_an_output_that_is_saved_is_the_boundary_of_the_next_block():
    def tanh(x):
        return x.tanh()

    assert vectors(lambda x, _: checkpoint(sine, checkpoint(tanh, x))) == [(0, 0), (0, 1), (1, 1), (0, 0)]
    assert vectors(lambda x, _: checkpoint(tanh, x)) == [(0, 0), (1, 1), (0, 0)]


def test_what_is_saved_outside_is_there_whatever_becomes_of_a_block():
    assert vectors(lambda x, _: checkpoint(sine, x) * x) == [(0, 0), (0, 0), (2, 0)]
    assert vectors(lambda x, _: checkpoint(sine, x).cos()) == [(0, 0), (1, 1), (1, 0)]


def test_what_several_blocks_are_given_is_the_stages():
    assert vectors(lambda x, _: checkpoint(sine, x) + checkpoint(sine, x)) == [(1, 0), (0, 0), (0, 0), (0, 0)]


def test_what_a_block_closes_over_is_there_whatever_becomes_of_it():
    def call(x, _):
        y = x.detach() + 1.0
        return checkpoint(lambda inner: inner * y, x)

    assert vectors(call) == [(1, 0), (0, 1), (0, 0)]


def test_parameters_do_not_count_and_views_of_them_neither():
    assert vectors(lambda x, scale: checkpoint(lambda inner: inner * scale.view(1, -1), x)) == [(0, 0), (1, 1), (0, 0)]


def test_an_input_that_is_not_saved_is_there_beside_a_recompute_alone():
    def call(x, _):
        return checkpoint(lambda inner: (inner * 2.0).sin().cos(), x)

    def build():
        return [nn.Linear(WIDTH, WIDTH), Calls(call)], torch.randn(ROWS, WIDTH)

    costs = pipeline_costs(build, "h100", kernels="cpu")
    (block,) = costs.counted[1].blocks
    assert (block.work.saved_bytes, block.work.boundary_bytes, block.unsaved_bytes) == (2 * VECTOR, VECTOR, VECTOR)
    assert costs.stages[1].blocks[0].saved_bytes == 3 * VECTOR


def test_what_is_kept_is_there_whatever_becomes_of_a_block():
    def tanh(x):
        return x.tanh()

    assert vectors(lambda x, _: checkpoint(lambda inner: keep(tanh, inner).cos(), x)) == [(0, 0), (1, 2), (0, 0)]
    assert vectors(lambda x, _: checkpoint(lambda inner: keep(sine, inner.exp()).cos(), x)) == [(0, 0), (2, 3), (0, 0)]
    assert vectors(lambda x, _: checkpoint(sine, checkpoint(lambda inner: keep(tanh, inner), x))) == [
        (0, 0), (0, 1), (1, 1), (0, 0)
    ]


def test_what_is_kept_is_not_in_a_replay():
    def call(matrix):
        def product(x):
            return x @ matrix

        return lambda inner: (keep(product, inner) @ matrix).sin() @ matrix

    def build():
        matrix = torch.randn(WIDTH, WIDTH)
        return [nn.Linear(WIDTH, WIDTH), Calls(lambda x, _: checkpoint(call(matrix), x))], torch.randn(ROWS, WIDTH)

    (block,) = pipeline_costs(build, "h100", kernels="cpu").counted[1].blocks
    assert block.replay_flops == block.forward_flops / 3  # the last product saves nothing that is its own
    assert 0 < block.work.recompute_seconds < block.work.forward_seconds / 2
