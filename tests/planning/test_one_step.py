"""A step has one peak: the account by position, the curve over time and a plan say the same."""
from __future__ import annotations

from itertools import product

import pytest

from tests.planning.policies import late
from tests.slow import few
from torchckpt.planning import (
    NAMES,
    Block,
    Choice,
    Link,
    Stage,
    Step,
    first_blocks,
    named_schedule,
    simulate,
    with_recompute,
)

SIZES = [(1, 2), (2, 4), (3, 6), (4, 8)]
LATENCIES = [0.0, 0.25]
BOUNDARIES = [0.0, 0.25, 1.0]
BLOCKS = [(1, 1), (1, 2), (2, 2), (1, 4), (3, 4), (4, 4)]
"""Recomputed early, of so many. All sums are exact in binary."""

every_schedule = pytest.mark.parametrize("name", NAMES)


def cells(name, blocks):
    """Schedules, stages of so many equal blocks, links. Stages differ in what they take, by powers of two."""
    for (p, m), latency, boundary in product(SIZES, LATENCIES, BOUNDARIES):
        schedule = named_schedule(name, p, max(m, 2 * p if name == "dualpipe_v" else 1))
        sizes = [(1.0 if stage % 2 else 2.0) / blocks for stage in range(schedule.stages)]
        each = [Block(size, size / 2, size, size, size, size * boundary) for size in sizes]
        yield schedule, tuple(Stage((block,) * blocks) for block in each), (Link(latency, 2.0),) * (schedule.stages - 1)


def whole(stages):
    """The same stages as one block each, of the same message."""
    for stage in stages:
        block, n = stage.blocks[0], len(stage.blocks)
        seconds = block.forward_seconds, block.input_grad_seconds, block.weight_grad_seconds, block.recompute_seconds
        parts = (*seconds, block.saved_bytes, block.boundary_bytes)
        yield Stage((Block(*(n * part for part in parts)),), message_bytes=stage.arriving_bytes)


def has_one_peak(step):
    timeline = step.timeline
    assert timeline.step_seconds == step.seconds
    assert timeline.peak_bytes == step.peak_bytes
    assert all(curve[-1][1] == 0 for curve in timeline.memory)


@few(2)
@every_schedule
@pytest.mark.parametrize(("early", "total"), BLOCKS)
def test_by_position_and_over_time(name, early, total):
    parts = tuple(range(total))
    choice = Choice((), parts[total - early :], parts[: total - early])
    for schedule, stages, links in cells(name, total):
        visits = list(product(range(schedule.stages), range(schedule.micro_batches)))
        for kept in (None, schedule.stages - 1):
            choices = {visit: choice for visit in visits if visit[0] != kept}
            has_one_peak(Step(with_recompute(schedule, choices), stages, links, choices))


@every_schedule
def test_at_arrival(name):
    for schedule, stages, links in cells(name, 1):
        has_one_peak(Step(schedule, stages, links, late(schedule)))


@every_schedule
def test_kept_blocks_are_as_one(name):
    for schedule, stages, links in cells(name, 2):
        step, one = Step(schedule, stages, links), Step(schedule, tuple(whole(stages)), links)
        has_one_peak(step)
        assert (step.seconds, step.peak_bytes) == (one.seconds, one.peak_bytes)


@few(2)
@every_schedule
def test_early_blocks_are_as_one(name):
    for schedule, stages, links in cells(name, 2):
        choices = {visit: Choice((), (0, 1)) for visit in first_blocks(schedule, stages, 0)}
        ones = {visit: Choice((), (0,)) for visit in choices}
        step = Step(with_recompute(schedule, choices), stages, links, choices)
        one = Step(step.schedule, tuple(whole(stages)), links, ones)
        assert step.seconds == one.seconds
        inputs = schedule.micro_batches * sum(stage.blocks[1].boundary_bytes for stage in stages)  # two blocks keep two
        assert all(two <= single + inputs for two, single in zip(step.peak_bytes, one.peak_bytes))


def test_the_boundary_is_part_of_what_is_saved():
    schedule = named_schedule("1f1b", 4, 8)
    simulated = simulate(schedule, Block(boundary_bytes=0.25), choices=late(schedule))
    assert simulated.peak_bytes == (1.75, 1.5, 1.25, 1.0)  # 3, 2, 1 and 0 boundaries, and one micro-batch
