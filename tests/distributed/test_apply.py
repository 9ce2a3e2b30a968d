"""The call: every fault of it has its text, and faults are told all at once."""
from __future__ import annotations

import functools
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.distributed.stages import (
    ROWS,
    SIZE,
    Blocks,
    batch,
    equal,
    not_on_old_stages,
    parameters_of,
    run,
    schedule_on,
    stages_of,
    step,
)
from tests.scripts import ROOT
from tests.slow import few
from torchckpt import checkpoint_module
from torchckpt.distributed import RecomputeAhead, recompute_ahead
from torchckpt.errors import ArgumentError, RegionError, ScheduleError, kind
from torchckpt.planning import Block, Link

pytestmark = pytest.mark.usefixtures("alone")

WORKS = "recompute_ahead(Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn))"


def plain(name="ScheduleInterleaved1F1B", make=Blocks, m=4):
    """Of two stages and four micro-batches."""
    return schedule_on(stages_of(name, make), name, m)


def error_of(*args, **options):
    with pytest.raises(ArgumentError) as caught:
        recompute_ahead(*args, **options)
    return str(caught.value)


def fault(rule, received, works):
    return f"recompute_ahead(): {rule}\n  received: {received}\n  works:    {works}"


def test_it_returns_a_schedule_of_its_own():
    schedule = recompute_ahead(plain())
    assert type(schedule) is RecomputeAhead
    assert schedule.schedule.micro_batches == 4
    assert schedule.schedule.stages == 2


@pytest.mark.parametrize("one", [None, 3, "Schedule1F1B", nn.Linear(2, 2), RecomputeAhead], ids=str)
def test_what_is_no_schedule(one):
    assert error_of(one) == fault("the schedule is none of torch.distributed.pipelining", kind(one), WORKS)


def test_a_stage_is_no_schedule():
    (stage, _) = stages_of("ScheduleInterleaved1F1B", Blocks)
    assert error_of(stage) == fault("the schedule is none of torch.distributed.pipelining", "Stage", WORKS)


def test_twice():
    rule = "the schedule recomputes ahead already"
    text = fault(rule, "what recompute_ahead() returned", "schedule.step(x, target=y)")
    assert error_of(recompute_ahead(plain())) == text


@pytest.fixture
def no_numpy(monkeypatch):
    def missing(tensor):
        raise RuntimeError("Numpy is not available")

    monkeypatch.setattr(torch.Tensor, "numpy", missing)


@pytest.fixture
def first_of_two(alone):
    """This process is the first rank of two, of which the other is not there."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)


@pytest.mark.usefixtures("no_numpy", "first_of_two")
@pytest.mark.parametrize("name", ["Schedule1F1B", "ScheduleInterleaved1F1B"])
def test_torch_would_need_numpy_for_shapes(name):
    total = len(stages_of(name, Blocks)) * 2
    assert error_of(plain(name)) == fault(
        "NumPy is missing: with it, torch tells each rank the shapes that its stages take and give",
        f"no NumPy, and stage 0 of {total} without input_args and output_args",
        "pip install numpy, which comes with 'torchckpt[distributed]'; or "
        f"PipelineStage(module, 0, {total}, device, input_args=x, output_args=y) on all ranks, with tensors of one "
        "micro-batch that require gradients where those of a step do",
    )


@pytest.mark.usefixtures("no_numpy", "first_of_two")
@pytest.mark.parametrize("name", ["Schedule1F1B", "ScheduleInterleaved1F1B"])
def test_shapes_that_are_given_need_no_numpy(name):
    row = torch.empty(ROWS, SIZE, device="meta", requires_grad=True)
    stages = stages_of(name, Blocks, input_args=row, output_args=row)
    assert recompute_ahead(schedule_on(stages, name, 4)).schedule.stages == 2 * len(stages)


@pytest.mark.usefixtures("no_numpy")
def test_one_rank_needs_no_numpy():
    stages = stages_of("Schedule1F1B", Blocks)
    schedule = recompute_ahead(schedule_on(stages, "Schedule1F1B", 4))
    step(schedule, stages, *batch(4))
    assert schedule.report().measured.step_seconds > 0


def test_the_extra_that_the_error_names_has_numpy():
    project = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'^distributed = \["numpy"\]', project, re.MULTILINE)


@pytest.mark.parametrize("segments", [-1, True, False, 1.0, "1", (1,)])
def test_segments(segments):
    rule = "segments is not a number of regions, 0 or more, or None for all"
    assert error_of(plain(), segments=segments) == fault(rule, f"segments={segments!r}", "segments=1")


@pytest.mark.parametrize("exempt", [None, 3, True])
def test_exempt_of_another_type(exempt):
    rule = "exempt is not 'auto', 'none', or a set of (stage, micro-batch)"
    assert error_of(plain(), exempt=exempt) == fault(rule, repr(exempt), "exempt={(1, 0)}")


@pytest.mark.parametrize(("exempt", "close"), [("Auto", "auto"), ("non", "none"), ("nothing", "none"), ("", "none")])
def test_exempt_that_is_another_word(exempt, close):
    rule = "exempt is not 'auto', 'none', or a set of (stage, micro-batch)"
    assert error_of(plain(), exempt=exempt) == fault(rule, repr(exempt), f"exempt={close!r}")


@pytest.mark.parametrize(
    ("exempt", "named"),
    [
        ([(2, 0)], "(2, 0)"),
        ([(0, 4)], "(0, 4)"),
        ([(-1, 0)], "(-1, 0)"),
        ([(0, 1), (0, -1)], "(0, -1)"),
        ([(0, 0, 0)], "(0, 0, 0)"),
        ([0], "0"),
        (["last_stage"], "'last_stage'"),
        ([[0, 1]], "[0, 1]"),
        ([(0, 1.0)], "(0, 1.0)"),
        ([(7, 0), (0, 0), (0, 9)], "(7, 0), (0, 9)"),
    ],
)
def test_exempt_that_is_not_there(exempt, named):
    rule = "the schedule has no such visit: its stages are 0 to 1, its micro-batches 0 to 3"
    assert error_of(plain(), exempt=exempt) == fault(rule, f"exempt with {named}", "exempt={(1, 0)}")


@pytest.mark.parametrize("costs", ["guess", "Measured", ""])
def test_costs_that_are_another_word(costs):
    text = fault("costs is neither 'measured' nor blocks or stages", repr(costs), "costs='measured'")
    assert error_of(plain(), costs=costs) == text


ONE_EACH = "stages is not a Stage or a Block, or a list with one for each of the schedule's 2"


@pytest.mark.parametrize(
    ("costs", "rule", "received"),
    [
        ([Block()] * 3, ONE_EACH, "3 of 2"),
        ([], ONE_EACH, "0 of 2"),
        ([Block(), 1.0], ONE_EACH, "stages[1]=1.0"),
        (3, ONE_EACH, "stages=3"),
        (Block(forward_seconds=-1.0), "seconds or bytes are not a finite number >= 0", "stages.forward_seconds=-1.0"),
    ],
)
def test_costs(costs, rule, received):
    assert error_of(plain(), costs=costs).startswith(f"recompute_ahead(): {rule}\n  received: {received}\n  works:    ")


@pytest.mark.parametrize(
    ("link", "rule", "received"),
    [
        ([Link()] * 2, "link is not one Link, or one for each of 1 pairs of neighbouring stages", "2 of 1"),
        ("fast", "link is not one Link, or one for each of 1 pairs of neighbouring stages", "link='fast'"),
        (-1.0, "seconds or bytes are not a finite number >= 0", "link.latency_seconds=-1.0"),
        (Link(-1.0), "seconds or bytes are not a finite number >= 0", "link.latency_seconds=-1.0"),
    ],
)
def test_link(link, rule, received):
    text = f"recompute_ahead(): {rule}\n  received: {received}\n  works:    "
    assert error_of(plain(), costs=Block(), link=link).startswith(text)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"link": Link(1.0)}, "link is given without costs in numbers\n  received: link=Link("),
        ({"link": Link(1.0), "costs": "measured"}, "link is given without costs in numbers\n  received: link=Link("),
        ({"segments": 0, "costs": "measured"}, "but no segments to recompute early\n  received: costs='measured'"),
        ({"segments": 0, "costs": Block()}, "but no segments to recompute early\n  received: costs=Block("),
    ],
)
def test_what_would_be_ignored(options, text):
    assert text in error_of(plain(), **options)


def test_several_faults_are_told_at_once():
    text = error_of(plain(), segments=-1, exempt={(5, 5)}, costs="guess")
    assert text == (
        "recompute_ahead(): 3 faults\n"
        "segments is not a number of regions, 0 or more, or None for all\n"
        "  received: segments=-1\n  works:    segments=1\n"
        "the schedule has no such visit: its stages are 0 to 1, its micro-batches 0 to 3\n"
        "  received: exempt with (5, 5)\n  works:    exempt={(1, 0)}\n"
        "costs is neither 'measured' nor blocks or stages\n  received: 'guess'\n  works:    costs='measured'"
    )


@pytest.mark.parametrize("options", [{"exempt": "none"}, {}, {"segments": 1}, {"segments": 0}], ids=str)
def test_stage_without_regions_is_an_error_at_the_first_step(options):
    stages = stages_of("ScheduleInterleaved1F1B", lambda stage: Blocks(stage, regions="none" if stage else "ours"))
    schedule = recompute_ahead(schedule_on(stages, "ScheduleInterleaved1F1B", 4), **{"exempt": "none", **options})
    text = (
        "a stage that is to be recomputed has no region\n  received: stage 1, whose forward entered none\n"
        "  works:    for block in stage_module.layers: torchckpt.checkpoint_module(block); or "
        "recompute_ahead(schedule, exempt={(1, micro_batch), ...})"
    )
    with pytest.raises(RegionError, match=f"^{re.escape(text)}$"):
        step(schedule, stages, *batch(4))


def test_stage_without_regions_may_be_exempt():
    stages = stages_of("ScheduleInterleaved1F1B", lambda stage: Blocks(stage, regions="none" if stage else "ours"))
    exempt = {(1, i) for i in range(4)}
    schedule = recompute_ahead(schedule_on(stages, "ScheduleInterleaved1F1B", 4), exempt=exempt)
    hooked = []
    for stage in stages:
        linear = stage.submod.blocks[0].first
        linear.register_forward_hook(lambda linear, *_: hooked.append(len(linear._forward_pre_hooks)))
    for _ in range(2):
        step(schedule, stages, *batch(4))
    assert sum(hooked) == 2  # in the first forward of each stage, a look for regions of torch


class Drops(Blocks):
    """Passes its blocks by in every second micro-batch, as stages with layer drop do now and then."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) if self.calls % 2 else x * 1.5


@pytest.mark.parametrize("mode", [{"exempt": "none"}, {"segments": 1}], ids=str)
def test_a_micro_batch_without_regions_in_a_stage_that_has_some(mode):
    shape = torch.zeros(2, SIZE, requires_grad=True)
    name, options = "ScheduleInterleaved1F1B", {"make": Drops, "input_args": shape, "output_args": shape}
    assert equal(run(name, mode, **options), run(name, None, **options))


# shapes ---------------------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    """Has running statistics."""

    def __init__(self, regions="ours"):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE))
        checkpoint_module(self.block)

    def forward(self, x):
        return self.block(x)


NORMED = "ScheduleInterleaved1F1B"


def test_statistics_of_a_stage_that_torch_runs_on_uninitialised_memory():
    text = (
        "recompute_ahead: torch finds the shapes of a later stage by running it on uninitialised memory, which running "
        "statistics take in\n  received: stage 1, with BatchNorm1d 'block.1'\n  works:    PipelineStage(module, index, "
        "stages, device, input_args=example, output_args=example), on every rank, with "
        "example = torch.empty(rows, ..., requires_grad=True) of one micro-batch"
    )
    stages = stages_of(NORMED, lambda stage: Normed())
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$"):
        recompute_ahead(schedule_on(stages, NORMED, 4))


@not_on_old_stages("gloo cannot send to itself")
def test_statistics_of_a_stage_whose_shapes_are_given():
    row = torch.empty(2, SIZE, requires_grad=True)
    stages = stages_of(NORMED, lambda stage: Normed(), input_args=row, output_args=row)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule = recompute_ahead(schedule_on(stages, NORMED, 4))
    step(schedule, stages, *batch(4))
    assert [stage.submod.block[1].num_batches_tracked for stage in stages] == [4, 4]


def split_backwards_of(shard, **options):
    """The gradients of zero bubble where ``shard`` has changed each stage."""
    from torch.distributed.device_mesh import init_device_mesh

    torch.manual_seed(1)
    mesh, row = init_device_mesh("cpu", (1,)), torch.empty(2, SIZE, requires_grad=True)
    stages = stages_of(
        "ScheduleInterleavedZeroBubble", lambda stage: shard(Blocks(stage), mesh), input_args=row, output_args=row
    )
    schedule = schedule_on(stages, "ScheduleInterleavedZeroBubble", 4)
    schedule = recompute_ahead(schedule, **options)
    torch.manual_seed(1)
    step(schedule, stages, *batch(4))
    return [getattr(x.grad, "full_tensor", lambda x=x: x.grad)() for x in parameters_of(stages)]


def sharded(module, mesh, outer=True, **kept):
    for block in module.blocks:
        fully_shard(block, mesh=mesh, **kept)
    return fully_shard(module, mesh=mesh) if outer else module


@few(1)
@pytest.mark.filterwarnings("ignore")  # torch's own, of a mesh of one rank
@pytest.mark.parametrize("options", [{}, {"segments": 1}, {"budget": "1GB"}], ids=str)
def test_split_backwards_of_stages_that_fsdp_gathers_again(options):
    text = r"(?s)a backward that is split loses gradients .*\n  received: \w+, and stage 0 with 'blocks.0' and 1"
    for shard in (sharded, functools.partial(sharded, outer=False)):
        with pytest.raises(ArgumentError, match=text):
            split_backwards_of(shard, **options)
    whole = functools.partial(fully_shard, reshard_after_forward=True)
    with pytest.raises(ArgumentError, match=r"and stage 0 with 'FSDPBlocks'"):
        split_backwards_of(lambda module, mesh: whole(module, mesh=mesh), **options)
    expected = split_backwards_of(lambda module, mesh: module, **options)
    kept = functools.partial(sharded, reshard_after_forward=False)
    for shard in (kept, lambda module, mesh: fully_shard(module, mesh=mesh)):
        assert equal(split_backwards_of(shard, **options), expected)
    assert equal(split_backwards_of(sharded, exempt="none"), expected)  # as the backward does, replays have gathered


@pytest.mark.parametrize("name", ["ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"])
def test_split_backwards_of_replicas(name):
    row = torch.empty(2, SIZE, requires_grad=True)
    stages = stages_of(
        name, lambda stage: nn.parallel.DistributedDataParallel(Blocks(stage)), input_args=row, output_args=row
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        recompute_ahead(schedule_on(stages, name, 4))
    texts = [str(warning.message) for warning in caught if warning.filename == __file__]
    text = "recompute_ahead: DistributedDataParallel does not reduce the gradients of split backwards\n  received: "
    assert [t.startswith(f"{text}{name}, and stage 0\n") for t in texts] == [True] * ("Zero" in name)


class Picky(Blocks):
    """Does not take what is in fresh memory."""

    def forward(self, x):
        raise ValueError("what is this?")


@pytest.mark.usefixtures("quiet")
@not_on_old_stages("its stages find their metadata elsewhere")
def test_a_stage_that_fails_while_torch_finds_its_shapes():
    stages = stages_of(NORMED, lambda stage: Picky(stage) if stage else Blocks(stage))
    schedule = recompute_ahead(schedule_on(stages, NORMED, 4))
    text = r"(?s)preparing its stages, .*what is this.*uninitialised memory to find their shapes, unless .*input_args="
    with pytest.raises(ScheduleError, match=text):
        step(schedule, stages, *batch(4))
