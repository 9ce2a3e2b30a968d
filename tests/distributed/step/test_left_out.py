"""Tensors that are trained and are no parameters of the stage that uses them, where backwards are split."""
from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.distributed.stages import (
    ROWS,
    SIZE,
    Blocks,
    batch,
    equal,
    gradients_of,
    loss_of,
    not_on_old_stages,
    schedule_on,
    stages_of,
    step,
)
from tests.helpers import Mark
from tests.slow import few
from torchckpt.distributed import recompute_ahead
from torchckpt.distributed.private import split_at

pytestmark = [pytest.mark.usefixtures("alone", "quiet"), not_on_old_stages("gloo cannot send to itself")]

NAME, M, STEPS = "ScheduleInterleavedZeroBubble", 4, 6  # of these, a whole backward is in the second with a budget
MODES = [{}, {"budget": "1GB"}]
TEXT = (
    "recompute_ahead: split backwards, as in torch, give no gradient to what is no parameter of the stage; "
    "whole ones, which a plan may do in their place, give it\n"
    "  received: stage 1, with a tensor of shape {}\n"
    "  works:    stage_module.scale = torch.nn.Parameter(scale), and stage_module.scale where it is used"
)


class Scaled(nn.Module):
    """Blocks whose output is multiplied with ``factor``, or with the keyword."""

    def __init__(self, stage, factor=None, regions="ours"):
        super().__init__()
        self.blocks, self.factor = Blocks(stage, regions=regions), factor

    def forward(self, x, factor=None):
        factor = self.factor if factor is None else factor
        return self.blocks(x) if factor is None else self.blocks(x) * factor


def leaf(*shape):
    return torch.full(shape, 1.5, requires_grad=True)


def texts_of(make, mode, loss=loss_of, name=NAME, **kwargs):
    """The warnings of some steps, and the gradients that they leave."""
    stages = stages_of(name, make)
    schedule = schedule_on(stages, name, M, loss)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        schedule = schedule if mode is None else recompute_ahead(schedule, **mode)
        for _ in range(STEPS):
            for stage in stages:
                stage.submod.zero_grad()
            torch.manual_seed(0)
            step(schedule, stages, *batch(M), **kwargs)
    return [str(each.message) for each in caught], gradients_of(stages)


@few(1)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_what_a_split_backward_leaves_out_is_named_once(mode):
    scale, rows = leaf(1), leaf(M * 2, 1)

    def scaled(stage):
        return Scaled(stage, scale if stage else None)

    def loss(output, target):
        return loss_of(output, target) * rows.mean()

    assert texts_of(scaled, mode)[0] == [TEXT.format("[1]")]
    assert texts_of(scaled, mode, loss)[0] == [TEXT.format("[8, 1], and 1 more")]
    assert texts_of(Scaled, mode, factor=rows)[0] == [TEXT.format("[8, 1]")]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_stage_behind_a_frozen_one_is_named_once(mode):
    def make(stage):
        return Scaled(stage).requires_grad_(stage > 0)

    text = (
        "recompute_ahead: split backwards, as in torch, give no gradient to a stage whose inputs need none; whole "
        "ones, which a plan may do in their place, give it\n"
        "  received: stage 1, behind frozen ones\n"
        "  works:    ScheduleInterleaved1F1B(stages, ...), whose backwards are whole; or train what is before this "
        "stage"
    )
    assert texts_of(make, mode)[0] == [text]
    assert texts_of(make, mode, name="ScheduleInterleaved1F1B")[0] == []


@few(1)
@pytest.mark.parametrize("name", ["ScheduleInterleaved1F1B", NAME])
def test_first_stages_and_whole_backwards_leave_nothing_out(name):
    at, found = 0 if name == NAME else 1, []
    for mode in (None, *MODES):
        scale = leaf(1)
        texts, gradients = texts_of(lambda stage, it=scale: Scaled(stage, it if stage == at else None), mode, name=name)
        assert texts == []
        found.append([scale.grad, *gradients])
    assert all(torch.equal(a, b) for one in found[1:] for a, b in zip(one, found[0]))


def test_what_works_works():
    """The factor of a loss, of a stage, and of both."""
    seen = {}
    for name in ("ScheduleInterleaved1F1B", NAME):
        for mode in (None, *MODES):
            modules = []

            def make(stage, modules=modules):
                modules.append(Scaled(stage, nn.Parameter(leaf(1))))
                return modules[-1]

            def loss(output, target, modules=modules):
                return loss_of(output, target) * modules[1].factor.sum()

            texts, seen[name, str(mode)] = texts_of(make, mode, loss, name)
            assert texts == []
    first, *others = seen.values()
    assert all(torch.allclose(a, b) for one in others for a, b in zip(one, first, strict=True))


@few(1)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_leaf_that_is_made_in_the_forward_is_nobodys(mode):
    class WithDummy(Scaled):
        def forward(self, x):
            return super().forward(x + torch.zeros(1, requires_grad=True))

    assert texts_of(WithDummy, mode)[0] == []


@few(1)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_each_of_several_losses_counts(mode):
    """Also where a plan does a backward whole, of which torch leaves out all of them."""
    found, example = [], torch.empty(ROWS, SIZE, requires_grad=True)
    for each in (None, mode):
        stages = stages_of(NAME, Blocks, input_args=example, output_args=example)
        schedule = schedule_on(stages, NAME, M, lambda *both: (loss_of(*both), both[0].abs().mean()))
        schedule = schedule if each is None else recompute_ahead(schedule, **each)
        found.append([])
        for number in range(STEPS):
            torch.manual_seed(number)
            schedule.step(batch(M)[0], target=batch(M)[1])
            found[-1] += gradients_of(stages)
            for stage in stages:
                stage.submod.zero_grad()
    assert equal(found[1], found[0])


def test_a_backward_of_the_callers_own_is_no_split_one():
    stage = SimpleNamespace(is_first=False, dw_builder=lambda: None)
    assert split_at(stage, 0, []) == ([], [])


class Marked(nn.Module):
    """Blocks behind a Function that keeps something as ``ctx.name``, which nodes have a method of."""

    def __init__(self, stage):
        super().__init__()
        self.blocks = Blocks(stage)

    def forward(self, x):
        return Mark.apply(self.blocks(x), "mark", [])


@few(1)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_function_of_the_callers_may_keep_anything(mode):
    texts, gradients = texts_of(Marked, mode)
    assert texts == []
    assert all(map(torch.equal, gradients, texts_of(Blocks, mode)[1]))
