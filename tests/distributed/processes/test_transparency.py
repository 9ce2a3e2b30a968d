"""A schedule that recomputes ahead is torch's own without checkpointing, to the bit: losses, outputs, gradients."""
from __future__ import annotations

import functools
import logging

import pytest
import torch
from torch import nn

from tests.distributed.ranks import attempted, on_ranks
from tests.distributed.stages import (
    BEFORE_2_13,
    NAMES,
    OLD,
    SIZE,
    TWO_STAGES,
    Blocks,
    batch,
    equal,
    events,
    gradients_of,
    not_before_2_13,
    not_on_old_stages,
    parameters_of,
    run,
    schedule_on,
    stages_of,
    step,
    train,
)
from tests.settings import with_gloo
from tests.slow import few, rarely, selected, slow
from torchckpt import checkpoint_module
from torchckpt.distributed import recompute_ahead
from torchckpt.features import release_of
from torchckpt.planning import Block, Link
from torchckpt.testing import count_recomputes

pytestmark = with_gloo

MODES = {
    "default": {},
    "nothing exempt": {"exempt": "none"},
    "some exempt": {"exempt": {(0, 1), (0, 2)}},
    "all exempt but one": {"exempt": {(0, 1), (0, 2), (0, 3)}},
    "no segment": {"segments": 0},
    "one segment": {"segments": 1},
    "one segment, nothing exempt": {"segments": 1, "exempt": "none"},
    "both segments": {"segments": 2},
    "costs": {"exempt": "none", "costs": Block(), "link": Link(5.0)},
    "costs measured": {"costs": "measured"},
}
FEW = {name: MODES[name] for name in ("default", "nothing exempt", "one segment")}
ON_TWO_RANKS = ("default", "one segment", "costs")
MEASURED = ("Schedule1F1B", "ScheduleInterleavedZeroBubble", "ScheduleDualPipeV", "compute_comms")
MEASURED_STEPS = 5  # one more than recomputes stay where they are

NO_NONE = not_before_2_13("an argument None fails where the backward is split")

UNDIVIDED = {"Schedule1F1B": 5, "ScheduleInterleaved1F1B": 3, "ScheduleZBVZeroBubble": 5, "ScheduleDualPipeV": 7}
"""Numbers of micro-batches that torch takes on two ranks."""


def assert_same(name, modes=FEW, **kwargs):
    """In all ``modes``, and that something was recomputed in one of them."""
    expected = run(name, None, **kwargs)
    with count_recomputes() as recomputes:
        for label, mode in modes.items():
            assert equal(run(name, mode, **kwargs), expected), label
    assert recomputes.total > 0


# all schedules, all modes ---------------------------------------------------------------------------------------------


def same_as_torch(name, modes=tuple(MODES), steps=3):
    """Per mode, whether all is equal."""
    found, expected = {}, {}
    for label in modes:
        own = MEASURED_STEPS if MODES[label].get("costs") == "measured" else steps
        drive = functools.partial(train, steps=own)
        if own not in expected:
            expected[own] = run(name, None, drive)
        found[label] = equal(run(name, MODES[label], drive), expected[own])
    return found


@few(1)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", rarely(["compute_comms", "ScheduleLoopedBFS", "ScheduleDualPipeV"], NAMES))
def test_all_stages_on_one_rank(name):
    assert same_as_torch(name) == dict.fromkeys(MODES, True)


@pytest.mark.parametrize("pair", [*NAMES[1::2], *slow(NAMES[::2])])
def test_two_ranks(reported, pair):
    for report in reported:
        assert report[pair] == dict.fromkeys(ON_TWO_RANKS, True)


@pytest.mark.parametrize("measured", [*MEASURED[1:3], *slow([MEASURED[0], MEASURED[3]])])
def test_two_ranks_that_move_recomputes_by_what_they_measured(reported, measured):
    for report in reported:
        assert report["measured"][measured] == {"costs measured": True}


@pytest.mark.parametrize("undivided", [*list(UNDIVIDED)[:3], *slow(list(UNDIVIDED)[3:])])
def test_a_number_of_micro_batches_that_the_ranks_do_not_divide(reported, undivided):
    for report in reported:
        assert report["undivided"][undivided] is True


@pytest.mark.skipif(
    release_of(torch.__version__) == (2, 12), reason="torch 2.12 alone: some inputs have no gradient to send"
)
def test_two_ranks_with_several_inputs_and_outputs(reported):
    for report in reported:
        assert report["several"] is True


@not_before_2_13("all ranks abort at a shorter micro-batch")
def test_rows_that_the_micro_batches_do_not_divide_fail_in_torch_as_well(reported):
    """torch receives the last, shorter, micro-batch in a buffer for the others, part of which nobody wrote to."""
    first, last = (report["uneven"] for report in reported)
    assert all("Mismatch in shape: grad_output[0] has a shape of torch.Size([2, 8])" in text for text in first)
    assert last == ["nothing", "nothing"]


@pytest.fixture(scope="module")
def reported(request, tmp_path_factory):
    names = {parameter: selected(request, parameter) for parameter in ("pair", "measured", "undivided")}
    return on_ranks(functools.partial(report_of_rank, **names), tmp_path_factory.mktemp("ranks"))


def report_of_rank(rank, pair, measured, undivided):
    logging.getLogger("torch.distributed.pipelining").disabled = True  # prints the schedule where a step fails
    report = {name: attempted(same_as_torch, name, ON_TWO_RANKS, 2) for name in pair}
    report["measured"] = {name: attempted(same_as_torch, name, ["costs measured"]) for name in measured}
    report["undivided"] = {name: attempted(same, name, train, Blocks, UNDIVIDED[name]) for name in undivided}
    report["several"] = attempted(same, "Schedule1F1B", train, Several)
    modes = [] if BEFORE_2_13 else [None, MODES["nothing exempt"]]
    report["uneven"] = [attempted(step_of_uneven_rows, mode) for mode in modes]
    return report


def same(name, drive=train, make=Blocks, m=4):
    expected = run(name, None, drive, make, m)
    return all(equal(run(name, mode, drive, make, m), expected) for mode in FEW.values())


def step_of_uneven_rows(mode):
    def drive(schedule, stages, m):
        x, target = batch(m)
        step(schedule, stages, x[1:], target[1:])
        return "nothing"

    return run("Schedule1F1B", mode, drive)


# what runs in a stage -------------------------------------------------------------------------------------------------


class Inside(nn.Module):
    """Blocks, and something of a subclass's around them."""

    def __init__(self, stage, regions):
        super().__init__()
        self.blocks, self.stage = Blocks(stage, regions=regions).blocks, stage


class Several(Inside):
    """Two inputs, one of which nothing differentiates, and two outputs."""

    def forward(self, x, mask=None):
        mask = (x[:, :1] > 0).float() if mask is None else mask
        x = self.blocks[1](self.blocks[0](x) * (1 + mask))
        return (x, mask.detach()) if self.stage == 0 else x


class TwoDifferentiable(Inside):
    """Between the stages, two tensors that gradients come back for."""

    def forward(self, x, y=None):
        x = self.blocks[0](x if y is None else x * y.tanh())
        y = self.blocks[1](x)
        return (x, y) if self.stage == 0 else x + y


class Ignoring(Inside):
    """The second stage does not use its second input, so there is no gradient to hand back."""

    def forward(self, x, y=None):
        x = self.blocks[1](self.blocks[0](x))
        return (x, x.tanh()) if self.stage == 0 else x


class Skip(Inside):
    """The input of the stage goes around its first block."""

    def forward(self, x):
        return x + self.blocks[1](self.blocks[0](x))


class Mixed(Inside):
    """bfloat16 in the stage."""

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.blocks[1](self.blocks[0](x)).float()


class Scaled(Inside):
    """Takes keyword arguments: a tensor that is split, one that is none, and something else."""

    def forward(self, x, scale=None, shift=None, power=1):
        for block in self.blocks:
            x = block(x * scale**power) + (0 if shift is None else shift)
        return x


class Normed(Inside):
    """Running statistics."""

    def __init__(self, stage, regions):
        super().__init__(stage, regions)
        self.norm, self.blocks = nn.Sequential(nn.BatchNorm1d(SIZE), nn.Tanh()), self.blocks[:1]
        if regions == "ours":
            checkpoint_module(self.norm)

    def forward(self, x):
        return self.norm(self.blocks[0](x))


@few(1)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"])
@pytest.mark.parametrize("make", [Several, Skip, *slow([TwoDifferentiable, Mixed])])
def test_stage(name, make):
    assert_same(name, make=make)


@few(1)
@not_before_2_13("a gradient that is missing fails")
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"])
def test_an_input_that_a_stage_does_not_use(name):
    assert_same(name, make=Ignoring)


@few(1)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "name",
    [TWO_STAGES[0], *(pytest.param(name, marks=NO_NONE) for name in TWO_STAGES[1:-1]), TWO_STAGES[-1]],
)
def test_keyword_arguments(name):
    def drive(schedule, stages, m):
        x, target = batch(m)
        seen = step(schedule, stages, x, target, scale=target.abs(), shift=None, power=2)
        return [*seen, *gradients_of(stages)]

    assert_same(name, drive=drive, make=Scaled)


@few(1)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["ScheduleGPipe", *TWO_STAGES])
def test_running_statistics(name):
    """The metadata are given: to find them, torch runs stages on memory that nobody wrote to, statistics included."""
    static = torch.zeros(2, SIZE, requires_grad=True)

    def drive(schedule, stages, m):
        return [*train(schedule, stages, m), *(buffer for stage in stages for buffer in stage.submod.buffers())]

    assert_same(name, drive=drive, make=Normed, input_args=static, output_args=static)


# what runs around a step ----------------------------------------------------------------------------------------------


@few(1)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["Schedule1F1B", *TWO_STAGES])
def test_autocast_around_a_step(name):
    def drive(schedule, stages, m):
        with torch.autocast("cpu", torch.bfloat16):
            return train(schedule, stages, m)

    assert_same(name, {"nothing exempt": MODES["nothing exempt"]}, drive=drive)


@few(1)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["ScheduleGPipe", *TWO_STAGES])
def test_gradients_of_several_steps_add_up(name):
    def drive(schedule, stages, m):
        for _ in range(3):
            seen = step(schedule, stages, *batch(m))
        return [*seen, *gradients_of(stages)]

    assert_same(name, drive=drive)


@few(1)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["ScheduleGPipe", *TWO_STAGES])
@pytest.mark.parametrize("m", [5, *slow([7])])
def test_other_numbers_of_micro_batches(name, m):
    assert_same(name, m=m)


@few(1)
@not_on_old_stages("a shorter micro-batch is refused")
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["ScheduleGPipe", *TWO_STAGES])
def test_rows_that_the_micro_batches_do_not_divide_on_one_rank(name):
    def drive(schedule, stages, m):
        x, target = batch(m)
        return [*step(schedule, stages, x[1:], target[1:]), *gradients_of(stages)]

    assert_same(name, drive=drive)


@few(1)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["ScheduleGPipe", *TWO_STAGES])
def test_metadata_that_the_stages_are_given(name):
    """torch runs no forward to find them."""

    def drive(schedule, stages, m):
        assert OLD or all(stage._user_meta.inputs for stage in stages)
        events.clear()
        seen = train(schedule, stages, m, 1)
        assert sum(not event.startswith("replay") for event in events) == 2 * m * len(stages)
        return seen

    static = torch.zeros(2, SIZE, requires_grad=True)
    assert_same(name, drive=drive, input_args=static, output_args=static)


@few(1)
@not_on_old_stages("the first step draws random numbers for metadata")
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["ScheduleGPipe", *TWO_STAGES])
def test_first_step_infers_metadata_and_leaves_no_trace(name):
    """Gradients and random numbers of a first step are those of a later one."""

    def drive(schedule, stages, m):
        seen = []
        for _ in range(2):
            torch.manual_seed(3)
            seen.append([*step(schedule, stages, *batch(m)), *gradients_of(stages), torch.rand(2)])
            for parameter in parameters_of(stages):
                parameter.grad = None
        assert equal(*seen)
        return seen[0]

    assert_same(name, drive=drive)


@few(1)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["ScheduleGPipe", *TWO_STAGES])
def test_outputs_that_nobody_wants(name):
    def drive(schedule, stages, m):
        seen = step(schedule, stages, *batch(m), return_outputs=False)
        assert len(seen) == m
        return [*seen, *gradients_of(stages)]

    assert_same(name, drive=drive)


@few(1)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["ScheduleGPipe", *TWO_STAGES])
def test_sums_of_losses_are_not_scaled(name):
    """``scale_grads=False``."""
    expected, received = (scaled(name, mode) for mode in (None, {"exempt": "none"}))
    assert equal(received, expected)


def scaled(name, mode):
    stages = stages_of(name, functools.partial(Blocks, regions="none" if mode is None else "ours"))
    schedule = schedule_on(stages, name, 4)
    schedule.scale_grads = False
    return train(schedule if mode is None else recompute_ahead(schedule, **mode), stages, 4)
