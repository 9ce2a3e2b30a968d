"""The plan that all ranks follow."""
from __future__ import annotations

from torchckpt.distributed.phases import digest_of
from torchckpt.planning import Block, Stage, gpipe
from torchckpt.planning.plan import plan_pipeline


def test_digests_tell_plans_apart():
    stages = [Stage((Block(boundary_bytes=0.1),) * 2)]
    plans = [plan_pipeline(gpipe(1, m), stages, budget) for m, budget in ((4, "60%"), (4, "70%"), (5, "60%"))]
    assert len({digest_of(plan) for plan in plans}) == 3
    assert digest_of(plans[0]) == digest_of(type(plans[0]).from_json(plans[0].to_json()))
