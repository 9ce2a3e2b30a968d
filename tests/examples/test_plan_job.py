"""The example that plans the job beside published runs: README has its table, and it stands near what was measured."""
from __future__ import annotations

from dataclasses import replace

import pytest

from examples import plan_job
from tests.scripts import ROOT, run
from torchckpt.jobs import memory_of


@pytest.fixture(scope="module")
def plans():
    return plan_job.plans()


def test_its_table_is_that_of_readme():
    printed = run("examples/plan_job.py", cwd=ROOT).stdout
    assert len(printed.splitlines()) == 5
    assert printed in (ROOT / "README.md").read_text()


def test_planned_tokens_a_second_are_near_the_published_ones(plans):
    for name, plan in plans.items():
        published = plan_job.PUBLISHED[name].partition(",")[0]
        assert published == "none" or plan.tokens_per_second == pytest.approx(float(published), rel=0.04)


def test_the_memory_of_the_published_layout_is_near_what_was_in_use(plans):
    plan = plans["64 H100"]
    assert 0.85 < plan.peak_bytes / 2**30 / 55 < 1.05
    assert plan.recomputed_share == 0


@pytest.mark.slow
def test_it_prints_the_best_of_all_layouts(capsys, monkeypatch):
    monkeypatch.setattr(plan_job, "LAYOUT", replace(plan_job.LAYOUT, global_batch=64))
    plan_job.main(["--best"])
    text = capsys.readouterr().out
    assert text.count("the best of 64 x ") == text.count(": llama3-70b: 70.55 G parameters on 64 x ") == 2


def test_64_a100_take_twice_as_long(plans):
    first, second = plans["64 H100"], plans["64 A100"]
    assert 2 < second.step_seconds / first.step_seconds < 2.5
    assert [rank.total for rank in memory_of(first.job)] == [rank.total for rank in memory_of(second.job)]
