"""Regions that a stage must not have: those of ``torch.utils.checkpoint`` are named, with the change of one line."""
from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as checkpoint_of_torch

from tests.distributed.stages import Block, Blocks, batch, schedule_on, stages_of, step
from torchckpt import checkpoint
from torchckpt.distributed import recompute_ahead
from torchckpt.distributed.faults import failure_of, plain_regions_refused, raise_without_regions
from torchckpt.errors import RegionError

pytestmark = pytest.mark.usefixtures("quiet")

WORKS = "from torchckpt import checkpoint, for: from torch.utils.checkpoint import checkpoint"
LINEAR = "Linear '1'"
NON_REENTRANT = (
    "a region of torch.utils.checkpoint cannot be recomputed early, only one of torchckpt\n"
    f"  received: stage {{}} runs {{}} inside one of torch.utils.checkpoint\n  works:    {WORKS}"
)
REENTRANT = (
    "a stage that is to be recomputed has no region\n"
    f"  received: stage {{}}, with regions of torch.utils.checkpoint(use_reentrant=True)\n  works:    {WORKS}"
)


def error_of_a_step(make, **options):
    stages = stages_of("ScheduleInterleaved1F1B", make)
    schedule = recompute_ahead(schedule_on(stages, "ScheduleInterleaved1F1B", 4), **options)
    with pytest.raises(RegionError) as caught:
        step(schedule, stages, *batch(4))
    return str(caught.value)


# in a step ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("options", [{}, {"exempt": "none"}, {"segments": 1}], ids=str)
def test_stage_with_regions_of_torch(options):
    text = error_of_a_step(lambda stage: Blocks(stage, regions="torch" if stage else "ours"), **options)
    assert text == NON_REENTRANT.format(1, "Block 'blocks.0'")


class Both(nn.Module):
    """A region of ours, and one of torch's."""

    def __init__(self, stage):
        super().__init__()
        self.first, self.second = Block(f"{stage}.0"), Block(f"{stage}.1")

    def forward(self, x):
        return checkpoint_of_torch(self.second, checkpoint(self.first, x), use_reentrant=False)


@pytest.mark.usefixtures("alone")
def test_stage_with_regions_of_both():
    assert error_of_a_step(Both, exempt="none") == NON_REENTRANT.format(0, "Block 'second'")


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_stage_with_reentrant_regions_of_torch():
    """The second one: torch's own inference of metadata cannot differentiate the input of a reentrant region."""
    static = torch.zeros(2, 8, requires_grad=True)
    make = {0: Blocks(0), 1: Blocks(1, regions="reentrant")}
    stages = stages_of("ScheduleInterleaved1F1B", make.get, input_args=static, output_args=static)
    schedule = recompute_ahead(schedule_on(stages, "ScheduleInterleaved1F1B", 4), exempt="none")
    with pytest.raises(RegionError) as caught:
        step(schedule, stages, *batch(4))
    assert str(caught.value) == REENTRANT.format(1)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("options", [{}, {"exempt": "none"}], ids=str)
def test_regions_of_torch_inside_of_ours_are_ours_to_replay_or_to_keep(options):
    class Stage(nn.Module):
        def __init__(self, stage):
            super().__init__()
            self.block = Block(f"{stage}.0")

        def forward(self, x):
            return checkpoint(lambda x: checkpoint_of_torch(self.block, x, use_reentrant=False), x)

    stages = stages_of("ScheduleInterleaved1F1B", Stage)
    schedule = recompute_ahead(schedule_on(stages, "ScheduleInterleaved1F1B", 4), **options)
    assert len(step(schedule, stages, *batch(4))) == 5


# alone ----------------------------------------------------------------------------------------------------------------


def refused(stage, module, function):
    """Run ``function`` as the forward of ``stage``."""
    with plain_regions_refused(stage, module):
        function()


def region_of_torch(module):
    return checkpoint_of_torch(module, torch.ones(2, 2, requires_grad=True), use_reentrant=False)


def test_first_module_inside_is_named_and_the_hook_is_gone_afterwards():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = dict(nn.modules.module._global_forward_pre_hooks)
    with pytest.raises(RegionError, match=f"^{re.escape(NON_REENTRANT.format(3, LINEAR))}$"):
        refused(3, module, lambda: (module(torch.ones(2, 2)), region_of_torch(module[1]), region_of_torch(module[0])))
    assert dict(nn.modules.module._global_forward_pre_hooks) == before


def test_other_hooks_are_none_of_torchs_checkpointing():
    with plain_regions_refused(0, nn.Identity()), torch.autograd.graph.save_on_cpu():
        nn.Linear(2, 2)(torch.ones(2, 2))


def test_without_gradients_nothing_is_refused():
    with torch.no_grad(), plain_regions_refused(0, nn.Identity()):
        checkpoint_of_torch(nn.Linear(2, 2), torch.ones(2, 2), use_reentrant=False)


def test_error_inside_is_the_error():
    def fails():
        region_of_torch(nn.Linear(2, 2))
        raise ValueError("other")

    with pytest.raises(ValueError, match="other"):
        refused(0, nn.Identity(), fails)


def test_reentrant_regions_are_found_behind_what_follows_them():
    x = torch.ones(2, 2, requires_grad=True)
    y = checkpoint_of_torch(torch.sin, x, use_reentrant=True)
    with pytest.raises(RegionError, match=f"^{re.escape(REENTRANT.format(2))}$"):
        raise_without_regions(2, nn.Identity(), ({"y": y.exp() + x},))


@pytest.mark.parametrize("outputs", [torch.ones(1), (), {"a": [None, 3]}, torch.ones(1, requires_grad=True).exp()])
def test_without_regions(outputs):
    with pytest.raises(RegionError, match="received: stage 2, whose forward entered none"):
        raise_without_regions(2, nn.Identity(), outputs)


def test_a_failed_step_quotes_the_reason_with_its_remedy():
    reason = f"This backward was {'compiled ' * 30} or set donated_buffer=False"
    assert f"received: RuntimeError: {reason}\n" in str(failure_of(RuntimeError(reason), "0 of 1", "0I0", False, ""))
    text = str(failure_of(RuntimeError("x" * 1001 + "\nmore"), "0 of 1", "0I0", False, ""))
    assert re.search(r"RuntimeError: x{1000}\.\.\. \(all of it in __cause__\)\n +more\n", text)
