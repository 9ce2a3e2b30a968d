"""What ranks tell each other: as JSON, and read back as it was; nothing else can be made of a message."""
from __future__ import annotations

import json
import math

import pytest

from torchckpt.distributed.meeting import read, written
from torchckpt.errors import ArgumentError, BudgetInfeasible, ScheduleError
from torchckpt.planning import Action, Block, Kind, Stage, fixed, one_f_one_b
from torchckpt.planning.plan import plan_pipeline
from torchckpt.planning.step.measured import Span
from torchckpt.planning.step.memory import Level

ACTION = Action(1, Kind.INPUT_GRAD, 2)
STAGES = [Stage((Block(boundary_bytes=0.25),) * 3, before=fixed(0.1))] * 2


def again(value):
    return read(bytearray(written(value)))


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 3, 0.1, -0.0, math.inf, 1e-300, "a {} ü \u2028", "", [], (), {}),
        [1, [2, (3, [4], "tuple")]],
        {"dict": {(1, 2): [3.0]}, 5: ("x",)},
        {ACTION: Level(1.5, 2.0), Action(0, Kind.RECOMPUTE, 0): Level(0.0, 0.0, 7.0)},
        ("host", 12.5, 0, [[Span(ACTION, 0.0, 1.0, math.nan)]], {0: STAGES[0]}),
    ],
    ids=repr,
)
def test_a_value_is_read_as_it_was_written(value):
    assert repr(again(value)) == repr(value)


def test_an_enumeration_is_itself_and_a_dataclass_is_equal():
    assert again(ACTION).kind is Kind.INPUT_GRAD
    assert again(STAGES) == STAGES


def test_errors_have_their_text_with_the_caller_and_what_they_hold():
    error = ArgumentError("the budget is not a size\n  received: '6'")
    error.caller = "recompute_ahead()"
    assert str(again(error)) == str(error)
    assert type(again(ScheduleError("a step failed"))) is ScheduleError
    with pytest.raises(BudgetInfeasible) as caught:
        plan_pipeline(one_f_one_b(2, 4), STAGES, 1)
    found = again(caught.value)
    assert (str(found), found.least_bytes, found.rank) == (str(caught.value), caught.value.least_bytes, 0)
    assert found.plan == caught.value.plan


def test_spaces_at_the_end_do_not_matter():
    assert read(bytearray(written([1]).ljust(64))) == [1]


def test_nothing_but_what_is_written_can_be_made():
    class Other:
        pass

    with pytest.raises(TypeError):
        written([Other()])
    for name in ("Other", "eval", "Fault", "object"):
        with pytest.raises(KeyError, match=name):
            read(bytearray(json.dumps({name: ["1 + 1"]}).encode()))
