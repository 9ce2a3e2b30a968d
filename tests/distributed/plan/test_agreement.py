"""What processes know of each other, in a group of one; two of them are in test_within."""
from __future__ import annotations

import re

import pytest

from torchckpt.distributed.plan.agreement import all_gather, broadcast, check_the_same, digest_of
from torchckpt.errors import ScheduleError
from torchckpt.model import gpipe
from torchckpt.model.plan import Block, Stage, plan_pipeline


@pytest.mark.usefixtures("alone")
def test_one_process_knows_itself():
    assert all_gather({"a": 1}) == [{"a": 1}]
    assert broadcast((1, "b")) == (1, "b")


def test_the_same():
    check_the_same("plan", ["a"] * 3)


def test_not_the_same():
    text = (
        "all ranks must have the same plan\n  received: a on rank 0, b on rank 2\n"
        "  works:    recompute_ahead() with the same arguments on every rank"
    )
    with pytest.raises(ScheduleError, match=f"^{re.escape(text)}$"):
        check_the_same("plan", ["a", "a", "b"])


def test_digests_tell_plans_apart():
    stages = [Stage((Block(boundary_bytes=0.1),) * 2)]
    plans = [plan_pipeline(gpipe(1, m), stages, budget) for m, budget in ((4, "60%"), (4, "70%"), (5, "60%"))]
    assert len({digest_of(plan) for plan in plans}) == 3
    assert digest_of(plans[0]) == digest_of(type(plans[0]).from_json(plans[0].to_json()))
