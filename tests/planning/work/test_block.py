"""Stages, and every way in which they can be wrong."""
from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest

from tests.planning.policies import early
from torchckpt.errors import ArgumentError
from torchckpt.planning import Block, Stage, fixed, one_f_one_b
from torchckpt.planning.plan import plan_pipeline
from torchckpt.planning.work.block import restaged

STAGE = Stage((Block(boundary_bytes=0.06),) * 8, fixed(0.1, 0.0, 0.1, 0.02), fixed(1.0, 1.0, 1.0, 2.0))


def test_sums():
    assert STAGE.forward_seconds == pytest.approx(9.1)
    assert (STAGE.input_grad_seconds, STAGE.weight_grad_seconds) == (9.0, pytest.approx(9.1))
    assert STAGE.recompute_seconds == 8.0
    assert STAGE.saved_bytes == pytest.approx(10.02)
    assert STAGE.least_bytes == pytest.approx(2.5)
    assert STAGE.arriving_bytes == 0.06
    assert replace(STAGE, message_bytes=0.5).arriving_bytes == 0.5


def test_blocks_move_in_their_order():
    stages = [Stage(tuple(Block(float(at)) for at in own)) for own in ([1, 2], [3], [4, 5, 6])]
    found = restaged(stages, [1, 3, 2])
    assert [[block.forward_seconds for block in stage.blocks] for stage in found] == [[1], [2, 3, 4], [5, 6]]


def planned(stages, schedule=one_f_one_b(2, 4), budget="50%", link=0.0):  # noqa: B008  # frozen
    return plan_pipeline(schedule, stages, budget, link)


def test_blocks_are_a_tuple():
    assert Stage([Block(), Block()]) == Stage((Block(), Block()))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"blocks is not a tuple of Block\n  received: blocks=8\n"):
        Stage(8)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([STAGE], "one for each of the schedule's 2\n  received: 1 of 2"),
        (8, "stages is not a Stage or a Block, or a list"),
        ([STAGE, 8], r"received: stages\[1\]=8"),
        ([STAGE, Stage((Block(), 8))], r"stages\[1\].blocks\[1\]=8"),
        ([Stage((Block(forward_seconds=0.0),))] * 2, "takes no time, or it saves nothing|takes no time"),
        ([Stage((Block(recompute_seconds=nan),))] * 2, "not a finite number >= 0\n  received: .*recompute_seconds=nan"),
        ([Stage((Block(saved_bytes=-1.0),))] * 2, "saved_bytes=-1.0"),
        ([Stage((Block(saved_bytes=inf),))] * 2, "saved_bytes=inf"),
        ([Stage((Block(saved_bytes=10**400),))] * 2, "saved_bytes=1000"),
        ([Stage((Block(forward_seconds=True),))] * 2, "forward_seconds=True"),
        ([Stage((Block(boundary_bytes=2.0),))] * 2, "a block saves less than its boundary"),
        ([Stage((Block(input_grad_seconds=0.0, weight_grad_seconds=0.0),))] * 2, "backward of a block takes no time"),
        ([STAGE, Stage(())], "the forward of a stage takes no time\n  received: stages\\[1\\]: 0 seconds"),
        ([Stage((), fixed(1.0))] * 2, "no stage has blocks"),
        ([STAGE, replace(STAGE, after=1.0)], r"made by fixed\(\)"),
        ([STAGE, replace(STAGE, after=fixed(saved_bytes=nan))], r"stages\[1\].after.saved_bytes=nan"),
        ([STAGE, replace(STAGE, message_bytes=-1.0)], "message_bytes=-1.0"),
    ],
)
def test_a_wrong_stage_is_told(stages, message):
    with pytest.raises(ArgumentError, match=message):
        planned(stages)


def test_equal_faults_are_told_once():
    with pytest.raises(ArgumentError) as caught:
        planned([Stage((Block(boundary_bytes=2.0),) * 8)] * 2)
    assert str(caught.value).count("received") == 1


def test_what_else_is_wrong_is_told():
    with pytest.raises(ArgumentError, match="the schedule has R already"):
        planned([STAGE] * 2, early(one_f_one_b(2, 4)))
    with pytest.raises(ArgumentError, match="latency_seconds=-1"):
        planned([STAGE] * 2, link=-1.0)
    with pytest.raises(ArgumentError, match="one Link"):
        planned([STAGE] * 2, link="fast")
    with pytest.raises(ArgumentError, match="the schedule is not a Schedule"):
        planned([STAGE] * 2, "1f1b")
