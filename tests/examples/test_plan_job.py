"""The example that plans a published job stands near what was measured."""
from __future__ import annotations

from dataclasses import replace

import pytest

from examples import plan_job
from torchckpt.jobs import memory_of


def test_the_published_layout_is_planned_near_its_figures():
    plan = plan_job.planned("h100")
    assert plan.tokens_per_second == pytest.approx(plan_job.PUBLISHED, rel=0.06)
    assert 0.85 < plan.peak_bytes / 2**30 / 55 < 1.05
    assert plan.recomputed_share == 0


@pytest.mark.slow
def test_it_prints_the_best_of_all_layouts(capsys, monkeypatch):
    monkeypatch.setattr(plan_job, "LAYOUT", replace(plan_job.LAYOUT, global_batch=64))
    plan_job.main()
    text = capsys.readouterr().out
    assert text.count("the best of all layouts: llama3-70b") == 2
    assert "published: 851 tokens a second and GPU; planned: " in text


def test_64_a100_take_twice_as_long():
    first, second = plan_job.planned("h100"), plan_job.planned("a100")
    assert 2 < second.step_seconds / first.step_seconds < 2.5
    assert [rank.total for rank in memory_of(first.job)] == [rank.total for rank in memory_of(second.job)]
