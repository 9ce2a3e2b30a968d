"""The call: every fault of it has its text, and faults are told all at once."""
from __future__ import annotations

import re

import pytest
from torch import nn

from tests.distributed.stages import Blocks, batch, schedule_on, stages_of, step
from torchckpt.distributed import RecomputeAhead, recompute_ahead
from torchckpt.errors import ArgumentError, RegionError, kind
from torchckpt.model import Link, StageCosts

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
    assert error_of(one) == fault("the first argument is a schedule of torch.distributed.pipelining", kind(one), WORKS)


def test_a_stage_is_no_schedule():
    (stage, _) = stages_of("ScheduleInterleaved1F1B", Blocks)
    assert error_of(stage) == fault("the first argument is a schedule of torch.distributed.pipelining", "Stage", WORKS)


def test_twice():
    text = fault("a schedule recomputes ahead once", "what recompute_ahead() returned", "schedule.step(x, target=y)")
    assert error_of(recompute_ahead(plain())) == text


@pytest.mark.parametrize("segments", [-1, True, False, 1.0, "1", (1,)])
def test_segments(segments):
    rule = "segments is how many to recompute early, or None for all"
    assert error_of(plain(), segments=segments) == fault(rule, f"segments={segments!r}", "segments=1")


@pytest.mark.parametrize("exempt", [None, 3, True])
def test_exempt_of_another_type(exempt):
    rule = "exempt is 'auto', 'none', or a set of (stage, micro-batch)"
    assert error_of(plain(), exempt=exempt) == fault(rule, repr(exempt), "exempt={(1, 0)}")


@pytest.mark.parametrize(("exempt", "close"), [("Auto", "auto"), ("non", "none"), ("nothing", "none"), ("", "none")])
def test_exempt_that_is_another_word(exempt, close):
    rule = "exempt is 'auto', 'none', or a set of (stage, micro-batch)"
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
    rule = "stages are 0 to 1, micro-batches 0 to 3"
    assert error_of(plain(), exempt=exempt) == fault(rule, f"exempt with {named}", "exempt={(1, 0)}")


@pytest.mark.parametrize("costs", ["guess", "Measured", ""])
def test_costs_that_are_another_word(costs):
    text = fault("costs are StageCosts, or 'measured'", repr(costs), "costs='measured'")
    assert error_of(plain(), costs=costs) == text


@pytest.mark.parametrize(
    ("costs", "rule", "received"),
    [
        ([StageCosts()] * 3, "one StageCosts, or one for each of 2 stages", "3 of 2"),
        ([], "one StageCosts, or one for each of 2 stages", "0 of 2"),
        ([StageCosts(), 1.0], "one StageCosts, or one for each of 2 stages", "costs[1]=1.0"),
        (3, "one StageCosts, or one for each of 2 stages", "costs=3"),
        (StageCosts(forward_seconds=-1.0), "seconds and bytes are finite numbers >= 0", "costs.forward_seconds=-1.0"),
    ],
)
def test_costs(costs, rule, received):
    assert error_of(plain(), costs=costs).startswith(f"recompute_ahead(): {rule}\n  received: {received}\n  works:    ")


@pytest.mark.parametrize(
    ("link", "rule", "received"),
    [
        ([Link()] * 2, "one Link, or one for each of 1 pairs of neighbouring stages", "2 of 1"),
        (1.0, "one Link, or one for each of 1 pairs of neighbouring stages", "link=1.0"),
        (Link(-1.0), "seconds and bytes are finite numbers >= 0", "link.latency_seconds=-1.0"),
    ],
)
def test_link(link, rule, received):
    text = f"recompute_ahead(): {rule}\n  received: {received}\n  works:    "
    assert error_of(plain(), costs=StageCosts(), link=link).startswith(text)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"link": Link(1.0)}, "a link goes with costs that are given\n  received: link=Link("),
        ({"link": Link(1.0), "costs": "measured"}, "a link goes with costs that are given\n  received: link=Link("),
        ({"segments": 0, "costs": "measured"}, "costs say where to recompute early\n  received: costs='measured', seg"),
        ({"segments": 0, "costs": StageCosts()}, "costs say where to recompute early\n  received: costs=StageCosts("),
    ],
)
def test_what_would_be_ignored(options, text):
    assert text in error_of(plain(), **options)


def test_several_faults_are_told_at_once():
    text = error_of(plain(), segments=-1, exempt={(5, 5)}, costs="guess")
    assert text == (
        "recompute_ahead(): 3 faults\n"
        "segments is how many to recompute early, or None for all\n  received: segments=-1\n  works:    segments=1\n"
        "stages are 0 to 1, micro-batches 0 to 3\n  received: exempt with (5, 5)\n  works:    exempt={(1, 0)}\n"
        "costs are StageCosts, or 'measured'\n  received: 'guess'\n  works:    costs='measured'"
    )


@pytest.mark.parametrize("options", [{"exempt": "none"}, {}, {"segments": 1}, {"segments": 0}], ids=str)
def test_stage_without_regions_is_an_error_at_the_first_step(options):
    stages = stages_of("ScheduleInterleaved1F1B", lambda stage: Blocks(stage, regions="none" if stage else "ours"))
    schedule = recompute_ahead(schedule_on(stages, "ScheduleInterleaved1F1B", 4), **{"exempt": "none", **options})
    text = (
        "a stage that is to be recomputed has a region\n  received: stage 1, whose forward entered none\n"
        "  works:    for block in stage_module.layers: torchckpt.checkpoint_module(block); or "
        "recompute_ahead(schedule, exempt={(1, micro_batch), ...})"
    )
    with pytest.raises(RegionError, match=f"^{re.escape(text)}$"):
        step(schedule, stages, *batch(4))


def test_stage_without_regions_may_be_exempt():
    stages = stages_of("ScheduleInterleaved1F1B", lambda stage: Blocks(stage, regions="none" if stage else "ours"))
    exempt = {(1, i) for i in range(4)}
    schedule = recompute_ahead(schedule_on(stages, "ScheduleInterleaved1F1B", 4), exempt=exempt)
    for _ in range(2):
        step(schedule, stages, *batch(4))
