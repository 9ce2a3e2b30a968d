"""What the steps of a plan must have alike, and an error that shows what differs."""
from __future__ import annotations

import functools
import re

import pytest
import torch
from torch import nn

from tests.distributed.ranks import attempted, on_ranks
from tests.distributed.stages import Blocks, batch, not_on_old_stages, schedule_on, stages_of, step
from tests.settings import with_gloo
from tests.slow import few, slow
from torchckpt.distributed import recompute_ahead
from torchckpt.errors import ScheduleError
from torchckpt.measuring.remembered import Signature, shapes_of

pytestmark = with_gloo

NEW = "new stages of the same modules, and with a schedule of these stages: recompute_ahead(schedule, budget=...)"


def within(name="ScheduleGPipe", make=Blocks, steps=6, **mode):
    """A schedule after these steps, and its stages."""
    stages = stages_of(name, make)
    schedule = recompute_ahead(schedule_on(stages, name, 4), **(mode or {"budget": "1GB"}))
    for _ in range(steps):
        step(schedule, stages, *batch(4))
    return schedule, stages


# settings -------------------------------------------------------------------------------------------------------------


def frozen(stage):
    blocks = Blocks(stage)
    blocks.blocks[0].requires_grad_(False)
    return blocks.eval()


CHANGES = {
    "unfreeze": (lambda module: module.requires_grad_(True),
                 "stage 0, parameter 'blocks.0.first.weight' is trained, and 3 more; planned: not trained"),
    "freeze": (lambda module: module.blocks[1].first.bias.requires_grad_(False),
               "stage 0, parameter 'blocks.1.first.bias' is not trained; planned: trained"),
    "train": (lambda module: module.blocks.train(),
              "stage 0, module 'blocks' is in training, and 6 more; planned: in evaluation"),
    "add": (lambda module: module.blocks[0].add_module("third", nn.Tanh()),
            "stage 0, module 'blocks.0.third' is in training, and 1 more; planned: absent"),
}


@few(1)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("steps", [2, *slow([4]), 6])
@pytest.mark.parametrize("change", CHANGES)
def test_settings_that_change_are_an_error_before_the_first_action(change, steps):
    schedule, stages = within(make=frozen, steps=steps)
    module = stages[0].submod
    call, received = CHANGES[change]
    call(module)
    what = "the same modes, and the same parameters trained, in every step; for others, "
    text = (
        "a step has other settings than the one that was counted for the plan\n"
        f"  received: {received}\n  works:    {what}{NEW}"
    )
    for _ in range(2):
        with pytest.raises(ScheduleError, match=f"^{re.escape(text)}$"):
            step(schedule, stages, *batch(4))
    again = stages_of("ScheduleGPipe", lambda stage: module)
    other = recompute_ahead(schedule_on(again, "ScheduleGPipe", 4), budget="1GB")
    for _ in range(6):
        step(other, again, *batch(4))
    assert other.report().measured_peak_bytes <= other.report().planned_peak_bytes


@pytest.mark.usefixtures("alone")
def test_settings_that_come_back_are_those_of_the_plan():
    schedule, stages = within(make=frozen)
    module = stages[0].submod
    module.requires_grad_(True)
    with pytest.raises(ScheduleError, match="other settings"):
        step(schedule, stages, *batch(4))
    module.blocks[0].requires_grad_(False)
    for is_training in (True, False):  # of an evaluation between steps
        module.train(is_training)
        schedule.eval(batch(4)[0], target=batch(4)[1])
    step(schedule, stages, *batch(4))


@pytest.mark.usefixtures("alone")
def test_settings_may_change_before_the_counted_step():
    schedule, stages = within(make=frozen, steps=1)
    stages[0].submod.requires_grad_(True)
    for _ in range(6):
        step(schedule, stages, *batch(4))


@pytest.mark.usefixtures("alone")
def test_a_given_plan_is_for_the_settings_of_its_counted_step():
    plan = within(steps=4)[0].plan
    schedule, stages = within(steps=3, make=frozen, plan=plan)
    stages[0].submod.requires_grad_(True)
    with pytest.raises(ScheduleError, match="other settings"):
        step(schedule, stages, *batch(4))


@pytest.mark.usefixtures("alone")
@not_on_old_stages("a shorter micro-batch is refused")
@pytest.mark.parametrize("is_given", [False, True])
def test_shapes_of_a_first_step_that_has_failed_are_none_to_keep_to(is_given):
    schedule, stages = within(steps=0, **({"plan": within(steps=4)[0].plan} if is_given else {}))
    with pytest.raises(ScheduleError, match="other shapes or regions than"):
        step(schedule, stages, *(tensor.repeat(2, 1)[:10] for tensor in batch(4)))  # 3, 3, 2 and 2 rows
    for _ in range(5):
        step(schedule, stages, *batch(4))


@pytest.mark.usefixtures("alone")
def test_autocast_is_a_setting():
    schedule, stages = within()
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(ScheduleError, match=r"stage 0, autocast of cpu is torch\.bfloat16; planned: None"):
            step(schedule, stages, *batch(4))


def unfrozen_on(rank, changed):
    schedule, stages = within("Schedule1F1B", frozen)
    if rank in changed:
        stages[0].submod.requires_grad_(True)
    return attempted(step, schedule, stages, *batch(4))


@pytest.mark.parametrize("changed", [(0, 1), (0,), (1,)], ids=str)
def test_two_ranks(tmp_path, changed):
    """A rank with other settings begins no step; one without hears that another has failed when it has ended."""
    for rank, said in enumerate(on_ranks(functools.partial(unfrozen_on, changed=changed), tmp_path, timeout=60)):
        if rank in changed:
            assert f"stage {rank}, parameter 'blocks.0.first.weight' is trained" in said
        else:
            assert "another rank failed before, and says at what itself" in said


# shapes and flags -----------------------------------------------------------------------------------------------------


class Scaled(Blocks):
    """Takes any value beside its input."""

    def forward(self, x, by=1, more=None):
        return super().forward(x) * float(by)


def differ(*keywords):
    """Five steps with the first keywords, and one with the others."""
    stages = stages_of("ScheduleGPipe", Scaled)
    schedule = recompute_ahead(schedule_on(stages, "ScheduleGPipe", 4), budget="1GB")
    for number in range(6):
        step(schedule, stages, *batch(4), **keywords[number == 5])


@few(1)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "keywords",
    [
        ({"by": 1}, {"by": 0.9}),
        ({"by": 1}, {"by": "2"}),
        ({"by": 0.5}, {}),
        ({}, {"more": {"epoch": 1, "log": None}}),
        ({"more": [1, 2]}, {"more": None}),
        ({"by": True}, {"by": True}),
    ],
    ids=str,
)
def test_a_value_of_another_type_is_no_other_shape(keywords):
    differ(*keywords)


@few(1)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("keywords", "received", "planned"),
    [
        (({"by": True}, {"by": 0.5}), "[2, 8]", "[2, 8], True, at [0], ['by']"),
        (({"by": True}, {"by": False}), "[2, 8], False, at [0], ['by']", "[2, 8], True, at [0], ['by']"),
        (({}, {"more": torch.ones(4, 3)}), "[2, 8], [1, 3], at [0], ['more']", "[2, 8]"),
    ],
    ids=str,
)
def test_what_differs_is_shown(keywords, received, planned):
    output = "output float32 [2, 8]"
    text = (
        "a micro-batch has other shapes or regions than those that the plan is for\n"
        f"  received: micro-batch 0 of stage 0: 2 regions, input {received}, {output}; "
        f"planned: 2 regions, input {planned}, {output}\n  works:    the same shapes and flags in every step; "
        f"for others, {NEW}"
    )
    with pytest.raises(ScheduleError, match=f"^{re.escape(text)}$"):
        differ(*keywords)


@pytest.mark.parametrize(
    ("other", "shown"),
    [
        (torch.ones(2, dtype=torch.float64), "float64 [2] on cpu without a gradient"),
        (torch.ones(2, requires_grad=True), "float32 [2] on cpu with a gradient"),
        (torch.ones(2, device="meta"), "float32 [2] on meta without a gradient"),
    ],
    ids=["dtype", "gradient", "device"],
)
def test_all_is_shown_where_sizes_are_equal(other, shown):
    planned = Signature(1, shapes_of(torch.ones(2)), ())
    text = f"1 regions, input {shown}, output unknown; planned: 1 regions, input float32 [2] on cpu without a gradient"
    with pytest.raises(ScheduleError, match=re.escape(f"  received: here: {text}, output unknown\n")):
        Signature(1, shapes_of(other), ()).check(planned, "here")
    planned.check(Signature(1, shapes_of(torch.zeros(2)), ()), "here")
