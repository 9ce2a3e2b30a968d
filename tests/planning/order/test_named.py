"""Schedules by name."""
from __future__ import annotations

import pytest

from torchckpt.errors import ArgumentError
from torchckpt.planning.order.schedules import (
    NAMES,
    interleaved_one_f_one_b,
    named_schedule,
    one_f_one_b,
    zbv,
    zero_bubble,
)


def test_every_name_makes_the_schedule_of_that_name():
    assert [named_schedule(name, 2, 4).name for name in NAMES] == list(NAMES)


@pytest.mark.parametrize("name", ["1f1b", "1F1B", "Schedule1F1B"])
def test_case_and_torchs_prefix_do_not_matter(name):
    assert named_schedule(name, 4, 8) == one_f_one_b(4, 8)


def test_torchs_names():
    assert named_schedule("Interleaved1F1B", 2, 4, chunks=3) == interleaved_one_f_one_b(2, 3, 4)
    assert named_schedule("ScheduleInterleavedZeroBubble", 2, 4, chunks=2) == zero_bubble(2, 4, chunks=2)
    assert named_schedule("ZBVZeroBubble", 2, 4) == zbv(2, 4)


def test_default_chunks():
    assert named_schedule("interleaved-1f1b", 2, 4) == interleaved_one_f_one_b(2, 2, 4)
    assert named_schedule("zero_bubble", 2, 4) == zero_bubble(2, 4)


@pytest.mark.parametrize(
    ("name", "near"),
    [("gpip", "gpipe"), ("1f1", "1f1b"), ("dualpipe", "dualpipe_v"), ("zero-buble", "zero_bubble"), ("ZBW", "zbv")],
)
def test_an_unknown_name_names_the_known_ones_and_the_nearest(name, near):
    known = "gpipe, 1f1b, eager_1f1b, zbv, dualpipe_v, interleaved_1f1b, looped_bfs, zero_bubble"
    text = f"the schedule is not one of {known}\n  received: '{name}'\n  works:    '{near}'"
    with pytest.raises(ArgumentError, match=text):
        named_schedule(name, 2, 4)


def test_an_unknown_name_and_wrong_chunks_are_told_at_once():
    with pytest.raises(ArgumentError, match=r"2 faults(.|\n)*received: None(.|\n)*chunks=0"):
        named_schedule(None, 2, 4, chunks=0)


def test_chunks_where_there_is_nothing_to_choose():
    with pytest.raises(ArgumentError, match=r"'zbv' fixes its number of stages per rank\n.*chunks=3"):
        named_schedule("zbv", 2, 4, chunks=3)
