"""The plan that all ranks follow."""
from __future__ import annotations

from torchckpt.measuring.remembered import digest
from torchckpt.planning import Block, Stage, gpipe
from torchckpt.planning.plan import plan_pipeline


def test_digests_tell_plans_apart():
    stages = [Stage((Block(boundary_bytes=0.1),) * 2)]
    plans = [plan_pipeline(gpipe(1, m), stages, budget) for m, budget in ((4, "60%"), (4, "70%"), (5, "60%"))]
    assert len({digest(plan.to_json()) for plan in plans}) == 3
    assert plans[0].to_json() == type(plans[0]).from_json(plans[0].to_json()).to_json()
