"""Random steps with blocks that are away: their times and bytes, counted again by other means."""
from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest

from tests.planning.plan.recount_moves import recount
from tests.planning.random_steps import boundary_levels, random_moves
from tests.slow import few, slow
from torchckpt.planning import Host

SEEDS = range(200)


def close(values):
    return pytest.approx(values, abs=1e-9)


@few(9)
@pytest.mark.parametrize("seed", [*SEEDS[:100], *slow(SEEDS[100:])])
def test_times_and_bytes(seed):
    step = random_moves(seed)
    counted = recount(step)
    timeline = step.timeline
    assert step.seconds == close(counted.step_seconds)
    ends = {event.action: event.end_seconds for event in timeline.events}
    assert {action: ends[action] for action in counted.ends if action.kind.value != "R"} == close(
        {action: end for action, end in counted.ends.items() if action.kind.value != "R"}
    )
    copies = {(c.stage, c.micro_batch, c.block, c.is_back): (c.start_seconds, c.end_seconds) for c in timeline.copies}
    assert sorted(copies) == sorted(counted.copies)
    assert all(copies[key] == close(counted.copies[key]) for key in copies)
    for rank, levels in enumerate(counted.levels):
        if step.places[rank]:
            assert boundary_levels(step, rank) == levels
        assert step.peak_bytes[rank] == timeline.peak_bytes[rank] == max(high for high, _ in levels.values())
    assert list(step.host_peak_bytes) == counted.host_bytes
    assert all(curve[-1][1] == 0 for curve in timeline.host_memory)
    for curve, most in zip(timeline.host_memory, counted.host_bytes):
        assert max(amount for _, amount in curve) <= most


@pytest.mark.parametrize("seed", SEEDS[:20])
def test_a_slower_link_costs_seconds_and_never_bytes(seed):
    step = random_moves(seed)
    slow = replace(step, host=Host(1e9, step.host.out_rate / 4, step.host.back_rate / 4, step.host.half_duplex))
    assert slow.peak_bytes == step.peak_bytes
    assert slow.host_peak_bytes == step.host_peak_bytes
    assert slow.seconds >= replace(step, host=replace(step.host, drag=0.0)).seconds - 1e-9


def test_the_random_steps_have_what_is_to_be_tested():
    steps = list(map(random_moves, SEEDS))
    assert sum(len(step.moves) for step in steps) > 500
    assert any(step.host.half_duplex for step in steps)
    assert any(step.host.drag for step in steps)
    assert sum(any(step.timeline.waited_seconds) for step in steps) > 50
    assert any(action.kind.value == "R" for step in steps for action in chain.from_iterable(step.schedule.ranks))
    assert any(step.choice(visit).late and step.choice(visit).away for step in steps for visit in step.choices)
