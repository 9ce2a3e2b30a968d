"""The runtime: torch's, with recomputes among its actions; and what becomes of ``eval()``."""
from __future__ import annotations

import copy
import functools
import inspect
import warnings

import pytest
import torch
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.schedules import _ComputationType

from tests.distributed.stages import (
    NAMES,
    OLD,
    SIZE,
    TWO_STAGES,
    Blocks,
    ahead,
    batch,
    equal,
    events_of_step,
    gradients_of,
    loss_of,
    not_on_old_stages,
    noted,
    parameters_of,
    run,
    schedule_on,
    stages_of,
    step,
)
from tests.slow import few, slow_but
from torchckpt import checkpoint
from torchckpt.distributed import recompute_ahead, runtime
from torchckpt.testing import count_recomputes


def one_block(stage):
    return Blocks(stage, count=1)


# actions --------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
def test_recompute_is_an_action_right_before_the_backward():
    schedule, stages = ahead("ScheduleInterleaved1F1B", one_block, 2, exempt="none")
    assert events_of_step(noted(schedule), stages, 2) == [
        *("0UNSHARD", "1UNSHARD"),
        *("0F0", "forward 0.0", "1F0", "forward 1.0", "1R0", "replay 1.0", "1B0"),
        *("0F1", "forward 0.0", "0R0", "replay 0.0", "0B0"),
        *("1F1", "forward 1.0", "1R1", "replay 1.0", "1B1", "1REDUCE_GRAD", "1RESHARD"),
        *("0R1", "replay 0.0", "0B1", "0REDUCE_GRAD", "0RESHARD"),
    ]


@pytest.mark.usefixtures("alone")
def test_recompute_stands_before_a_pair_that_torch_runs_as_one_action():
    schedule, stages = ahead("ScheduleDualPipeV", one_block, 2, exempt="none")
    assert [event for event in events_of_step(noted(schedule), stages, 2) if event[0] in "01("] == [
        *("0UNSHARD", "1UNSHARD", "0F0", "1F0", "0F1", "1R0", "1B0"),
        *("0R0", "(1F1;0B0)OVERLAP_F_B", "1R1", "1B1", "1REDUCE_GRAD", "1RESHARD"),
        *("0R1", "0I1", "0W1", "0REDUCE_GRAD", "0RESHARD"),
    ]
    order = " ".join(map(str, schedule.schedule.ranks[0]))
    assert order == "0F0 1F0 0F1 1R0 1B0 0R0 1F1 0B0 1R1 1B1 0R1 0I1 0W1"


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", NAMES)
def test_schedule_is_what_runs(name, tmp_path):
    stages = stages_of(name, one_block)
    schedule = recompute_ahead(schedule_on(stages, name, 4, folder=tmp_path), exempt="none")
    computations = []
    computing, recompute = schedule.computing, schedule.recompute
    schedule.computing = lambda action, outputs: (computations.append(action), computing(action, outputs))[1]
    schedule.recompute = lambda action: (computations.append(action), recompute(action))[1]
    step(schedule, stages, *batch(4))
    assert tuple(computations) == schedule.schedule.ranks[0]


@pytest.mark.usefixtures("alone")
def test_functions_that_the_caller_registered_run_as_before():
    stages = stages_of("ScheduleDualPipeV", one_block)
    plain, called = schedule_on(stages, "ScheduleDualPipeV", 4), []
    plain.register_custom_function(_ComputationType.REDUCE_GRAD, lambda action, context: called.append(str(action)))
    schedule = recompute_ahead(plain, exempt="none")
    step(schedule, stages, *batch(4))
    assert called == ["1REDUCE_GRAD", "0REDUCE_GRAD"]
    assert list(plain._comp_type_to_function_map) == [_ComputationType.REDUCE_GRAD]


@pytest.mark.usefixtures("alone")
def test_schedule_of_torch_is_left_as_it_was():
    stages = stages_of("ScheduleZBVZeroBubble", Blocks)
    plain = schedule_on(stages, "ScheduleZBVZeroBubble", 4)
    before = copy.deepcopy(plain.pipeline_order_with_comms)
    schedule = recompute_ahead(plain)
    step(schedule, stages, *batch(4))
    assert plain.pipeline_order_with_comms == before
    assert type(plain) is schedules.ScheduleZBVZeroBubble


def test_noted_actions_are_a_list_that_tells_of_each():
    seen = []
    actions = runtime._Noted([1, 2], seen.append, lambda: seen.append("end"))
    assert next(iter(actions)) == 1
    assert seen == ["1"]
    seen.clear()
    assert list(actions) == [1, 2]
    assert seen == ["1", "2", "end"]
    assert type(copy.deepcopy(actions)) is list
    assert copy.deepcopy(actions) == [1, 2]
    assert seen == ["1", "2", "end"]


@pytest.mark.usefixtures("alone")
def test_stages_have_nothing_of_ours_afterwards():
    schedule, stages = ahead("ScheduleZBVZeroBubble")
    step(schedule, stages, *batch(4))
    before = [set(vars(stage)) for stage in stages]
    step(schedule, stages, *batch(4))
    schedule.eval(batch(4)[0], target=batch(4)[1])
    assert [set(vars(stage)) for stage in stages] == before
    assert not any(name.endswith("_one_chunk") for names in before for name in names)


def sharded(stage, regions):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(Blocks(stage, regions=regions), mesh=init_device_mesh("cpu", (1,)))


def two_steps_of_one_gradient(schedule, stages, m):
    step(schedule, stages, *batch(m), finalize_gradients=False)
    step(schedule, stages, *batch(m), finalize_gradients=True)
    return [parameter.grad.full_tensor().clone() for parameter in parameters_of(stages)]


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore")  # torch's own, of a mesh of one rank
@pytest.mark.skipif(
    "finalize_gradients" not in inspect.signature(schedules.PipelineScheduleMulti.step).parameters,
    reason="this torch has no step(finalize_gradients=False)",
)
@pytest.mark.parametrize("name", ["ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"])
def test_gradients_of_several_steps_are_finalized_by_the_last(name):
    found = (run(name, mode, two_steps_of_one_gradient, sharded) for mode in ({"exempt": "none"}, None))
    assert equal(*found)


class OfFunctions(Blocks):
    """Whose regions are of functions, or of compiled code: nothing tells which module they call."""

    def checkpointed(self):
        return self

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(lambda x, block=block: block(x), x) if self.regions == "ours" else block(x)
        return x


class Compiled(Blocks):
    def checkpointed(self):
        super().checkpointed()
        for block in self.blocks if self.regions == "ours" else ():
            block.compile(backend="eager")
        return self


def sharded_by_block(make, reshard, stage, regions):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module, mesh = make(stage, regions=regions), init_device_mesh("cpu", (1,))
    for block in module.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(module, mesh=mesh, reshard_after_forward=reshard)


def gradients_of_a_step(schedule, stages, m):
    return [*step(schedule, stages, *batch(m)), *(each.full_tensor() for each in gradients_of(stages))]


SHARDED = [(OfFunctions, True), (OfFunctions, False), (Compiled, True), (Compiled, False)]


@few(1)
@pytest.mark.usefixtures("alone", "fresh_dynamo")
@pytest.mark.filterwarnings("ignore")  # torch's own, of a mesh of one rank
@pytest.mark.parametrize(("make", "reshard"), slow_but(SHARDED[:3], SHARDED))
def test_replays_gather_the_parameters_of_their_own_stage(make, reshard):
    """Where a rank has two: those of the second lost gradients."""
    made = functools.partial(sharded_by_block, make, reshard)
    found = (run("ScheduleInterleaved1F1B", mode, gradients_of_a_step, made) for mode in ({"exempt": "none"}, None))
    assert equal(*found)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"])
@pytest.mark.parametrize(
    ("computed", "dtype"),
    [(torch.bfloat16, None), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (None, torch.float32)],
)
@pytest.mark.parametrize("options", [{}, {"budget": "1GB"}], ids=str)
def test_gradients_that_are_cast_where_backwards_are_whole(name, computed, dtype, options):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy, mesh = MixedPrecisionPolicy(computed, reduce_dtype=dtype), init_device_mesh("cpu", (1,))
    row = torch.empty(2, SIZE, requires_grad=True)

    def made(stage):
        return fully_shard(Blocks(stage), mesh=mesh, mp_policy=policy, reshard_after_forward=False)

    stages = stages_of(name, made, input_args=row, output_args=row)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        recompute_ahead(schedule_on(stages, name, 4), **options)
    texts = [str(warning.message) for warning in caught if warning.filename == __file__]
    is_expected = "Zero" in name and bool(options) and dtype is torch.float32 and computed is not None
    assert ["FSDP2 casts gradients" in t for t in texts if "whole backwards" in t] == [True] * is_expected


@few(1)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"])
@pytest.mark.parametrize("options", [{}, {"budget": "1GB"}], ids=str)
@pytest.mark.parametrize("is_late", [False, True])
def test_hooks_that_run_where_backwards_are_whole(name, options, is_late):
    row = torch.empty(2, SIZE, requires_grad=True)
    stages = stages_of(name, Blocks, input_args=row, output_args=row)

    def hook():
        parameters_of(stages)[0].register_post_accumulate_grad_hook(lambda parameter: None)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if not is_late:
            hook()
        schedule = recompute_ahead(schedule_on(stages, name, 4), **options)
        if is_late:
            schedule.step(batch(4)[0], target=batch(4)[1])
            hook()
        for _ in range(2):
            schedule.step(batch(4)[0], target=batch(4)[1])
    text = "recompute_ahead: a plan may do whole backwards in place of split ones, and gradients differ: in whole "
    texts = [warning.filename for warning in caught if str(warning.message).startswith(text)]
    assert texts == [__file__] * ("Zero" in name and bool(options))


# eval -----------------------------------------------------------------------------------------------------------------


def eval_changes_nothing(name, before, make=Blocks):
    """Whether steps with ``eval()`` before, between and after are those without, and gradients stay as they are."""
    def drive(schedule, stages, m):
        seen = []
        for number in range(2):
            if before:
                evaluated(schedule, stages, m)
            torch.manual_seed(number)
            seen += step(schedule, stages, *batch(m))
        evaluated(schedule, stages, m)
        return [*seen, *gradients_of(stages)]

    static = {"input_args": batch(1)[0], "output_args": batch(1)[0]}
    options = static if OLD else {}
    modes = ({"exempt": "none"}, drive), (None, without_eval)
    return equal(*(run(name, *mode, make, **options) for mode in modes))


def without_eval(schedule, stages, m):
    seen = []
    for number in range(2):
        torch.manual_seed(number)
        seen += step(schedule, stages, *batch(m))
    return [*seen, *gradients_of(stages)]


def evaluated(schedule, stages, m):
    """What ``eval()`` gave; it must leave the gradients alone."""
    x, target = batch(m)
    before = gradients_of(stages)
    losses = []
    kwargs = {"target": target, "losses": losses} if any(stage.is_last for stage in stages) else {}
    inputs = (x,) if any(stage.is_first for stage in stages) else ()
    torch.manual_seed(5)
    with count_recomputes() as recomputes:
        output = schedule.eval(*inputs, **kwargs)
    after = gradients_of(stages)
    assert len(after) == len(before)
    assert all(map(torch.equal, after, before))
    assert recomputes.total == 0
    return [*losses, *([] if output is None else [output])]


@few(1)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("before", [False, True], ids=["after", "before, between and after"])
@pytest.mark.parametrize("name", NAMES)
def test_eval_changes_no_step(name, before):
    assert eval_changes_nothing(name, before)


@few(1)
@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore")  # torch's own, of a mesh of one rank
@pytest.mark.parametrize("before", [False, True])
def test_eval_leaves_gradients_of_sharded_stages(before):
    """torch clears them where a step follows an ``eval()``, or an ``eval()`` a step, with its search for shapes."""
    assert eval_changes_nothing("ScheduleInterleaved1F1B", before, sharded)


@pytest.mark.usefixtures("alone")
def test_eval_is_the_forward_of_the_stages():
    def drive(schedule, stages, m):
        for stage in stages:
            stage.submod.eval()
        return evaluated(schedule, stages, m)

    modules = [Blocks(stage, regions="none").eval() for stage in range(2)]
    for name in TWO_STAGES:
        *losses, output = run(name, {}, drive)
        x, target = batch(4)
        outputs = [modules[1](modules[0](part)) for part in x.chunk(4)]
        assert equal(losses, [loss_of(one, part) for one, part in zip(outputs, target.chunk(4))])
        assert torch.equal(output, torch.cat(outputs))


@pytest.mark.usefixtures("alone")
def test_eval_of_torch_itself_divides_gradients():
    """Why ours takes the reduction of gradients out of an ``eval()``; on one rank torch's V schedules stop in it."""

    def drive(schedule, stages, m):
        step(schedule, stages, *batch(m))
        before = gradients_of(stages)
        x, target = batch(m)
        schedule.eval(x, target=target)
        return [before, gradients_of(stages)]

    before, after = run("ScheduleGPipe", None, drive)
    assert all(torch.equal(one / 4, other) for one, other in zip(before, after))
    with pytest.raises(AssertionError, match="can't steal_bwd_input"):
        run("ScheduleZBVZeroBubble", None, drive)


# forward only ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", TWO_STAGES)
def test_without_a_loss_there_are_forwards_only(name):
    """torch's own schedules stop at their first backward then, where both stages are on one rank."""
    modules = [Blocks(stage, regions="ours") for stage in range(2)]
    stages = stages_of(name, modules.__getitem__)
    schedule = recompute_ahead(schedule_on(stages, name, 4, loss=None))
    x, _ = batch(4)
    torch.manual_seed(2)
    with count_recomputes() as recomputes:
        output = schedule.step(x)
    assert output.shape == x.shape
    assert recomputes.total == 0
    assert gradients_of(stages) == []


@pytest.mark.usefixtures("alone")
@not_on_old_stages("micro-batches of other sizes are refused")
@pytest.mark.parametrize("mode", [{"exempt": "none"}, {"budget": "1GB"}], ids=str)
def test_another_schedule_of_the_same_stages_evaluates_between_steps(mode):
    """It prepares the stages for that, and for other micro-batches. Those of a step have to take gradients."""
    seen = []
    for evaluates in (False, True):
        schedule, stages = ahead("ScheduleInterleaved1F1B", m=4, **mode)
        other = recompute_ahead(schedule_on(stages, "ScheduleLoopedBFS", 2))
        for number in range(3):
            torch.manual_seed(number)
            seen += [*step(schedule, stages, *batch(4)), *gradients_of(stages), torch.rand(2)]
            if evaluates:
                other.eval(batch(4)[0], target=batch(4)[1])
    assert equal(seen[: len(seen) // 2], seen[len(seen) // 2 :])
