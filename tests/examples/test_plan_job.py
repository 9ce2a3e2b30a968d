"""The example that plans the job beside published runs: README has its table."""
from __future__ import annotations

from tests.scripts import ROOT, run


def test_its_table_is_that_of_readme():
    printed = run("examples/plan_job.py", cwd=ROOT).stdout
    assert len(printed.splitlines()) == 5
    assert printed in (ROOT / "README.md").read_text()


def test_planned_tokens_a_second_are_near_the_published_ones():
    from examples.plan_job import PUBLISHED, plans

    for name, plan in plans().items():
        published = PUBLISHED[name].partition(",")[0]
        assert published == "none" or abs(plan.tokens_per_second / float(published) - 1) < 0.04
