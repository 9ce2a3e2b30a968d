"""The named schedules: equal to torch's, action by action; the ones that torch lacks, as pictures."""
from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from tests.planning.torch_orders import multi, single
from torchckpt.errors import ArgumentError
from torchckpt.planning.order.schedules import (
    dualpipe_v,
    eager_one_f_one_b,
    gpipe,
    interleaved_one_f_one_b,
    looped_bfs,
    one_f_one_b,
    zbv,
    zero_bubble,
)
from torchckpt.planning.order.validity import check_schedule

RANKS = [2, 4, 8]


def orders(schedule):
    return [[str(action) for action in order] for order in schedule.ranks]


def picture(schedule):
    return [" ".join(order) for order in orders(schedule)]


def counts(p):
    return sorted({1, 2, 3, p - 1, p, p + 1, 2 * p, 2 * p + 1, 3 * p, 5 * p - 1} - {0})


@pytest.mark.parametrize("p", RANKS)
def test_gpipe_is_torchs(p):
    for m in counts(p):
        assert orders(gpipe(p, m)) == single("ScheduleGPipe", p, m)


@pytest.mark.parametrize("p", RANKS)
def test_1f1b_is_torchs_but_for_the_last_rank(p):
    for m in [p, p + 1, 2 * p, 4 * p]:
        assert orders(one_f_one_b(p, m))[:-1] == single("Schedule1F1B", p, m)[:-1]


@pytest.mark.parametrize("p", RANKS)
def test_torchs_1f1b_is_off_by_one_on_its_last_rank(p):
    # Found in torch 2.13: the last rank starts with the forward of micro-batch 1 and ends with that of micro-batch m,
    # which does not exist. What it executes, as opposed to what it lists, is right. When torch lists it right, this
    # test fails: then drop it, and the exception above.
    m = 2 * p
    ours, theirs = orders(one_f_one_b(p, m))[-1], single("Schedule1F1B", p, m)[-1]
    assert ours[:4] == [f"{p - 1}F0", f"{p - 1}B0", f"{p - 1}F1", f"{p - 1}B1"]
    assert theirs[:4] == [f"{p - 1}F1", f"{p - 1}B0", f"{p - 1}F2", f"{p - 1}B1"]
    assert theirs[-2:] == [f"{p - 1}F{m}", f"{p - 1}B{m - 1}"]


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_looped_schedules_are_torchs(p, chunks):
    for m in counts(p):
        assert orders(looped_bfs(p, chunks, m)) == multi("ScheduleLoopedBFS", p, chunks, m)
        if m % max(1, m // p) == 0:
            assert orders(interleaved_one_f_one_b(p, chunks, m)) == multi("ScheduleInterleaved1F1B", p, chunks, m)
            assert orders(zero_bubble(p, m, chunks=chunks)) == multi("ScheduleInterleavedZeroBubble", p, chunks, m)


@pytest.mark.parametrize("p", RANKS)
def test_folded_schedules_are_torchs(p):
    for m in counts(p):
        assert orders(zbv(p, m)) == multi("ScheduleZBVZeroBubble", p, 2, m)
        if m >= 2 * p:
            assert orders(dualpipe_v(p, m)) == multi("ScheduleDualPipeV", p, 2, m)


def test_pictures():
    assert picture(gpipe(2, 3, last_first=True)) == ["0F0 0F1 0F2 0B2 0B1 0B0", "1F0 1F1 1F2 1B2 1B1 1B0"]
    #                                   ahead:  3            in turn
    assert picture(one_f_one_b(3, 4)) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]
    #       twice as many ahead:  5
    assert picture(eager_one_f_one_b(3, 5)) == [
        "0F0 0F1 0F2 0F3 0F4 0B0 0B1 0B2 0B3 0B4",
        "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1B3 1B4",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4",
    ]
    #                     weights on rank j:  j backwards later
    assert picture(zero_bubble(3, 3)) == [
        "0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2",
        "1F0 1F1 1I0 1F2 1I1 1W0 1I2 1W1 1W2",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2W1 2W2",
    ]


@pytest.mark.parametrize("p", [1, *RANKS, 5])
def test_all_can_run(p):
    m = 2 * p
    looped = [interleaved_one_f_one_b(p, 2, m), looped_bfs(p, 2, m), zero_bubble(p, m), zero_bubble(p, m, chunks=3)]
    for schedule in [gpipe(p, m), one_f_one_b(p, m), eager_one_f_one_b(p, m), *looped, zbv(p, m), dualpipe_v(p, m)]:
        check_schedule(schedule)


def test_placement_of_stages():
    assert one_f_one_b(3, 3).placement == (0, 1, 2)
    assert interleaved_one_f_one_b(3, 2, 3).placement == (0, 1, 2, 0, 1, 2)
    assert zbv(3, 3).placement == dualpipe_v(3, 6).placement == (0, 1, 2, 2, 1, 0)


def test_a_schedule_is_frozen():
    with pytest.raises(FrozenInstanceError):
        gpipe(1, 1).name = "other"


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: one_f_one_b(8, 4), r"1F1B needs m >= p\n.*m=4, p=8\n.*m=8, the nearest"),
        (lambda: eager_one_f_one_b(8, 4), r"eager 1F1B needs m >= p\n.*m=4, p=8\n.*m=8, the nearest"),
        (lambda: dualpipe_v(4, 7), r"DualPipeV needs m >= 2 ranks\n.*m=7, ranks=4\n.*m=8, the nearest"),
        (lambda: interleaved_one_f_one_b(4, 2, 13), r"equal size\n.*m=13, ranks=4: 3 rounds\n.*m=12, the nearest"),
        (lambda: zero_bubble(4, 11), r"equal size\n.*m=11, ranks=4: 2 rounds\n.*m=12, the nearest"),
        (lambda: zero_bubble(4, 17), r"equal size\n.*m=17, ranks=4: 4 rounds\n.*m=16, the nearest"),
        (lambda: gpipe(0, 2.5), r"gpipe\(\): 2 faults\np is not an integer >= 1\n.*p=0\n.*\nm is not.*\n.*m=2\.5"),
        (lambda: looped_bfs(2, True, 2), r"chunks is not an integer >= 1\n.*chunks=True"),
        (lambda: zbv(2, "4"), r"m is not an integer >= 1\n.*m='4'"),
    ],
)
def test_errors(call, text):
    with pytest.raises(ArgumentError, match=text):
        call()
