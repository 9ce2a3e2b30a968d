"""The search: the best of all layouts, what fell out and why."""
from __future__ import annotations

from dataclasses import replace

import pytest

from torchckpt.errors import ArgumentError
from torchckpt.jobs import MACHINES, MODELS, Layout, search_layouts
from torchckpt.jobs import search as module
from torchckpt.jobs.job import Job
from torchckpt.jobs.plan import JobPlan

BASE = Layout(gpus=4, global_batch=16, sequence=4096)
MODEL = replace(MODELS["llama3-8b"], layers=8)
H100 = MACHINES["h100"]


@pytest.fixture(scope="module")
def found():
    return search_layouts(MODEL, H100, BASE)


def test_the_best_come_first_and_all_fit(found):
    steps = [plan.step_seconds for plan in found.best]
    assert steps == sorted(steps)
    assert len(steps) == 20
    assert all(plan.peak_bytes < plan.device_bytes for plan in found.best)
    assert found.is_whole


def test_every_layout_is_accounted_for(found):
    early = sum(found.reasons.values()) - found.reasons["the activations do not fit"]
    early -= found.reasons["the micro-batches do not suit the schedule"]
    assert found.layouts == found.simulated + found.pruned + early
    assert found.pruned > 0


def test_no_layout_that_was_pruned_is_better(found):
    """The twenty best steps of all layouts, each simulated."""
    best = []
    for layout in module._layouts(MODEL, BASE, 8):
        if not list(layout.faults(MODEL)):
            try:
                plan = JobPlan(Job(MODEL, layout, H100), 80e9)
                best.append((plan.step_seconds, plan.peak_bytes < 76e9))
            except ArgumentError:
                continue
    steps = sorted(step for step, fits in best if fits)
    assert steps[:20] == [plan.step_seconds for plan in found.best]


def test_experts_are_spread():
    model = replace(MODELS["mixtral-8x7b"], layers=4)
    found = search_layouts(model, H100, BASE)
    assert {plan.job.layout.ep for plan in found.best} > {1}


def test_an_interrupted_search_has_what_it_found():
    def interrupt(done, of):
        if done == 3:
            raise KeyboardInterrupt

    found = search_layouts(MODEL, H100, BASE, progress=interrupt)
    assert 0 < len(found.best) <= 3
    assert str(found).endswith("; interrupted")


def test_nothing_fits():
    with pytest.raises(ArgumentError, match=r"no layout fits.*\n.*the state does not fit.*\n.*gpus=8"):
        search_layouts(MODELS["llama3-405b"], H100, BASE)


def test_table_and_numbers(found):
    lines = str(found).split("\n")
    assert lines[0].split()[:4] == ["tp", "cp", "ep", "pp"]
    assert len(lines) == 23
    numbers = found.as_json()
    assert [row["step"] for row in numbers["best"]] == [plan.step_seconds for plan in found.best]
    assert numbers["whole"]
