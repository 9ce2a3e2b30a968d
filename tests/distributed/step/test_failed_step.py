"""A step that fails on this rank: what is raised, and that the next one is as if it had not been."""
from __future__ import annotations

import re
import weakref
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from tests.distributed.stages import (
    Blocks,
    batch,
    equal,
    gradients_of,
    not_on_old_stages,
    parameters_of,
    schedule_on,
    stages_of,
    step,
)
from tests.helpers import Probe
from tests.settings import without_collector
from torchckpt import is_recomputing
from torchckpt.distributed import recompute_ahead
from torchckpt.errors import RecomputationError, ScheduleError
from torchckpt.regions.flags import local

pytestmark = pytest.mark.usefixtures("quiet")

NAME, M = "ScheduleInterleaved1F1B", 4


class Fault(nn.Module):
    """Raises ``error`` in the third "forward", "replay" or "backward"; with "rows" a replay has fewer of them."""

    def __init__(self, block: nn.Module, when: str = "", error: BaseException | None = None) -> None:
        super().__init__()
        self.block, self.when, self.error, self.calls = block, when, error, 0

    def forward(self, x):
        self.now("replay" if is_recomputing() else "forward")
        x = self.block(x[:1] if self.when == "rows" and is_recomputing() else x)
        return Probe.apply(x * 1.5, lambda: self.now("backward"))

    def now(self, kind):
        self.calls += kind == self.when
        if self.calls == 3 and self.error is not None:
            self.error, error = None, self.error
            raise error


def faulty(stage, when="", error=None, kind=Fault):
    """Two blocks, the first of which may fail; on stage 0 none does."""
    made = Blocks(stage, 2, "none")
    made.blocks[0] = kind(made.blocks[0], when if stage == 1 else "", error)
    made.regions = "ours"
    return made.checkpointed()


def prepared(when="", error=None, **options):
    """A schedule whose stages know their metadata, so that the third call is in the third micro-batch."""
    static = torch.zeros(2, 8, requires_grad=True)
    stages = stages_of(NAME, lambda stage: faulty(stage, when, error), input_args=static, output_args=static)
    return recompute_ahead(schedule_on(stages, NAME, M), **options), stages


def seen_in_a_step(schedule, stages):
    for parameter in parameters_of(stages):
        parameter.grad = None
    torch.manual_seed(1)
    return [*step(schedule, stages, *batch(M)), *gradients_of(stages), torch.rand(2)]


WHERE = {
    "forward": "stage 1, micro-batch 2, forward (1F2)",
    "replay": "stage 1, micro-batch 2, recompute (1R2)",
    "backward": "stage 1, micro-batch 2, backward (1B2)",
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("when", WHERE)
def test_failure_of_the_callers_code_says_where_and_leaves_nothing(when):
    schedule, stages = prepared(when, ValueError("no more"), exempt="none")
    text = f"a step of the pipeline failed on rank 0 of 1: {WHERE[when]}\n  received: ValueError: no more\n  works:    "
    with pytest.raises(ScheduleError, match=f"^{re.escape(text)}") as caught:
        seen_in_a_step(schedule, stages)
    assert causes(caught.value)[-1] == "ValueError('no more')"
    assert_clean(schedule, stages)
    assert equal(seen_in_a_step(schedule, stages), seen_in_a_step(*prepared(when, exempt="none")))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("when", ["forward", "replay"])
def test_interrupt_reaches_the_caller_as_it_is(when):
    schedule, stages = prepared(when, KeyboardInterrupt(), exempt="none")
    with pytest.raises(KeyboardInterrupt):
        seen_in_a_step(schedule, stages)
    assert_clean(schedule, stages)
    assert equal(seen_in_a_step(schedule, stages), seen_in_a_step(*prepared(when, exempt="none")))


@pytest.mark.usefixtures("alone")
def test_failure_in_an_evaluation():
    schedule, stages = prepared("forward", ValueError("no more"), exempt="none")
    x, target = batch(M)
    with pytest.raises(ScheduleError, match=re.escape("stage 1, micro-batch 2, forward (1F2)")):
        schedule.eval(x, target=target)
    assert_clean(schedule, stages)
    assert equal(seen_in_a_step(schedule, stages), seen_in_a_step(*prepared("forward", exempt="none")))


@pytest.mark.usefixtures("alone")
def test_failure_before_the_first_action():
    schedule, stages = prepared()
    x, target = batch(M)
    text = "failed on rank 0 of 1: preparing its stages, before the first action\n  received: TypeError: losses must be"
    with pytest.raises(ScheduleError, match=re.escape(text)):
        schedule.step(x, target=target, losses=())
    assert_clean(schedule, stages)
    assert equal(seen_in_a_step(schedule, stages), seen_in_a_step(*prepared()))


class NotInEvaluation(Blocks):
    def forward(self, x):
        if not torch.is_grad_enabled():
            raise ValueError("no more")
        return super().forward(x)


@pytest.mark.usefixtures("alone")
@not_on_old_stages("its stages find their metadata elsewhere")
def test_an_evaluation_that_fails_while_its_stages_are_prepared_leaves_those_of_steps():
    """Else the first stages would be for an evaluation, and take no gradients."""
    seen = []
    for fails in (False, True):
        stages = [PipelineStage((Blocks, NotInEvaluation)[i > 1](i), i, 3, torch.device("cpu")) for i in range(3)]
        schedule = recompute_ahead(schedule_on(stages, NAME, M))
        seen_in_a_step(schedule, stages)
        if fails:
            with pytest.raises(ScheduleError, match="preparing its stages, before the first action"):
                schedule.eval(batch(M)[0], target=batch(M)[1])
        seen.append(seen_in_a_step(schedule, stages))
    assert equal(*seen)


@pytest.mark.usefixtures("alone")
def test_failure_after_the_last_action():
    class Full(list):
        def extend(self, losses):
            raise ValueError("no more")

    schedule, stages = prepared()
    x, target = batch(M)
    where = "after its last action, where torch waits for the end of its sends, and lists the losses"
    text = f"failed on rank 0 of 1: {where}\n  received: ValueError: no more\n"
    for call in (schedule.step, schedule.eval):
        with pytest.raises(ScheduleError, match=re.escape(text)):
            call(x, target=target, losses=Full())
        assert_clean(schedule, stages)
    assert equal(seen_in_a_step(schedule, stages), seen_in_a_step(*prepared()))


@pytest.mark.usefixtures("alone")
def test_block_whose_replay_differs():
    schedule, stages = prepared("rows", exempt="none")
    text = "stage 1, micro-batch 0, recompute (1R0)\n  received: RecomputationError: the replay of region "
    with pytest.raises(ScheduleError, match=re.escape(text)) as caught:
        seen_in_a_step(schedule, stages)
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert lines[2].startswith("forward saved: float32 (")
    assert lines[3].startswith("replay saved:  float32 (")
    assert lines[4].startswith("likely: ")
    assert lines[5].startswith("works: ")
    assert isinstance(caught.value.__cause__, RecomputationError)
    assert_clean(schedule, stages)


@pytest.mark.usefixtures("alone")
def test_step_without_gradients_is_torchs_own_error():
    schedule, stages = prepared()
    with torch.no_grad(), pytest.raises(RuntimeError, match="requires gradients to be enabled"):
        step(schedule, stages, *batch(M))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("error", [ValueError, torch.OutOfMemoryError])
def test_what_has_failed_is_freed_with_its_error(error):
    """Not by the garbage collector: after a lack of memory nobody wants to wait for it."""
    made = []

    class Watched(Fault):
        def now(self, kind):
            if kind == "replay":
                hidden = torch.ones(3)
                made.append(weakref.ref(hidden))
                raise error("no more")

    stages = stages_of(NAME, lambda stage: faulty(stage, kind=Watched))
    schedule = recompute_ahead(schedule_on(stages, NAME, M), exempt="none")
    with without_collector():
        with suppress(ScheduleError, torch.OutOfMemoryError):
            seen_in_a_step(schedule, stages)
        assert made[-1]() is None


def causes(error):
    found = []
    while (error := error.__cause__) is not None:
        found.append(repr(error))
    return found


def assert_clean(schedule, stages):
    assert local.thread.scope is None
    assert tuple(local.thread.flags[:2]) == (False, False)
    assert schedule._frames._waiting == {}
    assert schedule._internal_losses == []
    assert not any(name.endswith("_one_chunk") for stage in stages for name in vars(stage))
