"""torch's CSV, there and back."""
from __future__ import annotations

import re

import pytest

from tests.planning.policies import early
from torchckpt.errors import ArgumentError
from torchckpt.planning.order.csv_format import from_csv, to_csv
from torchckpt.planning.order.schedules import NAMES, named_schedule, one_f_one_b, zbv


@pytest.mark.parametrize("name", NAMES)
def test_there_and_back(name):
    schedule = early(named_schedule(name, 3, 6))
    assert from_csv(to_csv(schedule), name) == schedule


def test_what_is_written():
    assert to_csv(one_f_one_b(2, 2)) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_torch_reads_what_is_written():
    _Action = pytest.importorskip("torch.distributed.pipelining.schedules")._Action
    schedule = zbv(2, 4)
    read = [[_Action.from_str(cell) for cell in line.split(",")] for line in to_csv(schedule).splitlines()]
    assert [[str(action) for action in row] for row in read] == [list(map(str, order)) for order in schedule.ranks]


def test_a_blank_line_is_no_rank():
    """Nor is one of commas alone, as tables have them below. Lines count as they stand in the file."""
    plain = one_f_one_b(2, 2)
    spaced = "\n" + to_csv(plain).replace("\n", "\n\n,,,\n0UNSHARD\n")
    assert from_csv(spaced, plain.name) == plain
    with pytest.raises(ArgumentError, match="line 4: an action is missing"):
        from_csv("0F0,0F1,0B0,0B1\n\n\n1F0,1B0,1F1")


def test_bubbles_blanks_and_communication_are_passed_over():
    text = "0UNSHARD,0F0,0SEND_F0, 0F1 ,,0RECV_B0,0B0,0B1,0REDUCE_GRAD\r\n,1RECV_F0,1F0,1B0,,1F1,1B1,\r\n\r\n"
    assert from_csv(text, "1f1b") == one_f_one_b(2, 2)
    text = "0F0,0SEND_F0,0F1,0WAIT_SEND_F0,0B0,0B1,0REDUCE_GRAD,0WAIT_REDUCE_GRAD\n1F0,1B0,1WAIT_SEND_B0,1F1,1B1"
    assert from_csv(text, "1f1b") == one_f_one_b(2, 2)


def test_a_pair_that_may_overlap_is_read_as_one_after_the_other():
    assert to_csv(from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1")) == "0F0,0F1,0B0,0B1\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1X0,1B0", r"line 2, column 2: this is no action: a stage, one of F B I W R, .*\n.*'1X0'"),
        ("0F0,0B", r"line 1, column 2: this is no action: .*\n.*'0B'"),
        ("0F0,(0F1;0Q0)OVERLAP_F_B", r"line 1, column 2: this is no action: .*\n.*'\(0F1;0Q0\)OVERLAP_F_B'"),
        ("nonsense\n7", r"2 faults\nline 1, column 1: (.|\n)*line 2, column 1: "),
        ("0F0,,0B0\n1B0,1F0", r"line 2, column 1: 1B0 stands before its forward\n.*1B0 before 1F0\n.*1F0, \.\.\., 1B0"),
        ("0F0,0W0,0I0", r"line 1, column 2: 0W0 stands before its input gradients"),
        ("0R0,0F0,0B0", r"line 1, column 1: 0R0 stands before its forward"),
        ("0F0,0B0,0R0", r"line 1, column 3: 0R0 stands after its backward\n.*0R0 after 0B0"),
        ("0F0,0F0,0B0", r"line 1, column 2: the action appears twice\n.*0F0 again"),
        ("0F0,0R0,0R0,0B0", r"line 1, column 3: the action appears twice\n.*0R0 again"),
        ("0F0,0B0,0I0", r"line 1, column 3: a backward is both whole \(B\) and in two halves.*\n.*0I0 after 0B0"),
        ("0F0,0B0,0F1", r"line 1: an action is missing: every stage runs every micro-batch.*\n.*no 0B1"),
        ("0F0,0I0", r"line 1: an action is missing.*\n.*no 0W0"),
        ("0F0,0B0,0B1", r"line 1, column 3: 0B1 stands before its forward(.|\n)*line 1: .*\n.*no 0F1"),
        ("0F0,0B0\n0F1,0B1", r"line 2, column 1: the action is not of this rank, which has stages \[\].*\n.*0F1"),
        ("1F0,1B0", r"a stage has no actions; stages are numbered from 0\n.*none of stage 0"),
        ("", r"a stage has no actions; stages are numbered from 0\n.*no action"),
        (
            "0F0,,0B0,0F1,0B1\n1F1,1F0,1B0,1B1",
            r"line 1, column 3: ranks wait for each other: a deadlock\n"
            r".*0B0 waits for 1B0 of rank 1, which stands at 1F1(.|\n)*line 2, column 1: .*\n.*1F1 waits for 0F1",
        ),
    ],
)
def test_errors_have_line_and_column(text, message):
    with pytest.raises(ArgumentError, match=message):
        from_csv(text)


def test_not_text():
    with pytest.raises(ArgumentError, match=r"the schedule is not text\n.*None"):
        from_csv(None)


def test_number_beyond_all_actions_is_an_error_and_does_not_fill_the_memory():
    text = "line 1, column 2: a number is too large; stages and micro-batches count from 0, without gaps\n"
    text += "  received: '0F99999999999'"
    with pytest.raises(ArgumentError, match=re.escape(text)):
        from_csv("0F0,0F99999999999,0B0")
