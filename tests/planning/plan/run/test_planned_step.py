"""Steps of a plan beside the plan."""
from __future__ import annotations

import re
from dataclasses import replace

import pytest

from torchckpt.planning import Block, Stage, one_f_one_b
from torchckpt.planning.plan import plan_pipeline
from torchckpt.planning.plan.run.fit_measured import PlannedStep

PLAN = plan_pipeline(one_f_one_b(2, 4), [Stage((Block(saved_bytes=1e6, boundary_bytes=6e4),) * 4)] * 2, "60%")
SLOWER = replace(
    PLAN.timeline,
    events=tuple(
        replace(event, start_seconds=2 * event.start_seconds, end_seconds=2 * event.end_seconds)
        for event in PLAN.timeline.events
    ),
    memory=(),
)


def step(**changed):
    given = {
        "plan": PLAN,
        "measured": SLOWER,
        "steps_seconds": (1.0, 2 * PLAN.step_seconds, 1e9),
        "budget_bytes": (6e6, 6e6),
        "planned_peak_bytes": (5.9e6, 4.5e6),
        "measured_peak_bytes": (5.8e6, 4.4e6),
    }
    return PlannedStep(**{**given, **changed})


def test_the_step_is_the_median():
    assert step().step_seconds == 2 * PLAN.step_seconds
    assert step().deviation == pytest.approx(1.0)


def test_the_table():
    over, bound = (f"{PLAN.overhead(seconds) * 100:.1f}" for seconds in (PLAN.step_seconds, PLAN.bound_seconds))
    lines = str(step()).splitlines()
    assert lines[0].split() == ["step", "overhead", "bound", "hidden", "peak"]
    assert re.fullmatch(rf"planned +\d+ ms +{over} % +{bound} % +0\.\d\d  5.9 MB", lines[1])
    assert re.fullmatch(rf"measured +\d+ ms +[\d.]+ % +{bound} % +-\d\.\d\d  5.8 MB", lines[2])
    assert lines[4:7] == [
        "rank  planned peak  measured peak  budget",
        "0           5.9 MB         5.8 MB    6 MB",
        "1           4.5 MB         4.4 MB    6 MB",
    ]
    assert lines[-1] == PLAN.summary


def test_bytes_that_were_not_counted():
    assert str(step(measured_peak_bytes=None)).splitlines()[5] == "0           5.9 MB              -    6 MB"
