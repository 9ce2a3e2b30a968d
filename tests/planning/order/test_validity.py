"""Schedules made by hand: what keeps them from running."""
from __future__ import annotations

from dataclasses import replace

import pytest

from torchckpt.errors import ArgumentError
from torchckpt.planning.order.schedule import Action, Kind, Schedule
from torchckpt.planning.order.schedules import gpipe, one_f_one_b
from torchckpt.planning.order.validity import check_order, check_schedule

F, B = (Action(0, kind, 0) for kind in (Kind.FORWARD, Kind.BACKWARD))


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (Schedule("none", (), (), 0), r"the schedule has no stage, or no micro-batch\n.*0 stages, 0 micro-batches"),
        (Schedule("far", ((F, B),), (1,), 1), r"a stage is on none of the 1 ranks\n.*stage 0 on rank 1"),
        (replace(gpipe(1, 1), micro_batches=2), r"rank 0: an action is missing.*\n.*no 0F1"),
        (replace(gpipe(2, 1), ranks=gpipe(2, 1).ranks[::-1]), r"rank 0, action 0: .* not of this rank.*\[0\].*\n.*1F0"),
        (replace(gpipe(1, 2), micro_batches=1), r"rank 0, action 1: .* this rank, .* micro-batches 0 to 0\n.*0F1"),
    ],
)
def test_faults(schedule, text):
    with pytest.raises(ArgumentError, match=text):
        check_order(schedule)


def test_all_faults_at_once():
    with pytest.raises(ArgumentError, match=r"3 faults\nrank 0, action 0: 0B0 (.|\n)*rank 1, action 0: 1B0 "):
        check_order(replace(gpipe(3, 1), ranks=tuple(order[::-1] for order in gpipe(3, 1).ranks)))


def test_a_deadlock_is_found_across_ranks_only():
    schedule = one_f_one_b(2, 2)
    deadlock = replace(schedule, ranks=(schedule.ranks[0], tuple(schedule.ranks[1][place] for place in (2, 0, 3, 1))))
    check_order(deadlock)
    check_schedule(deadlock)  # the micro-batches of one rank may go in any order ...
    waits = replace(deadlock, ranks=(tuple(schedule.ranks[0][place] for place in (0, 2, 1, 3)), deadlock.ranks[1]))
    check_order(waits)
    with pytest.raises(ArgumentError, match=r"0B0 waits for 1B0 of rank 1, which stands at 1F1\n.*1B0 earlier"):
        check_schedule(waits)  # ... unless the other rank waits for the one that goes last


def test_the_place_can_be_told_in_other_words():
    with pytest.raises(ArgumentError, match="here: 0B0 stands before its forward"):
        check_order(replace(gpipe(1, 1), ranks=((B, F),)), where=lambda fault: "here")
