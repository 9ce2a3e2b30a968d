"""Blocks that are away, on steps small enough to follow by hand: times, bytes, and the host's bytes."""
from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planning.random_steps import boundary_levels
from torchckpt.planning import (
    Block,
    Boundary,
    Choice,
    Host,
    Link,
    Move,
    Stage,
    Step,
    fixed,
    from_csv,
    gpipe,
    one_f_one_b,
)
from torchckpt.planning.step.boundary import misplaced_moves
from torchckpt.planning.step.memory import Level

F, B = 0, 1
BLOCK = Block(1.0, 1.0, 1.0, 1.0, saved_bytes=4.0, boundary_bytes=1.0)
"""Of the first block of a stage 3 bytes move, of another one 4."""
TWO = Stage((BLOCK,) * 2)


def alone(release, issue, *, stage=TWO, host=None, blocks=1, late=()):
    """One micro-batch on one rank whose first blocks are away. All of them have the same boundaries."""
    n = len(stage.blocks)
    kept = tuple(block for block in range(blocks, n) if block not in late)
    moves = tuple(Move(0, 0, block, Boundary(*release), Boundary(*issue), behind=blocks) for block in range(blocks))
    choices = {(0, 0): Choice(kept, (), late, tuple(range(blocks)))}
    return Step(gpipe(1, 1), (stage,), (), choices, moves, host or Host(100, out=3.0))


def events(step):
    return [f"{e.action} {e.start_seconds:g}-{e.end_seconds:g}" for e in step.timeline.events]


def copies(step):
    ways = {False: "out", True: "back"}
    return [
        f"{ways[c.is_back]} {c.stage},{c.micro_batch},{c.block} {c.start_seconds:g}-{c.end_seconds:g}"
        for c in step.timeline.copies
    ]


def levels(step, rank=0):
    return boundary_levels(step, rank)


def test_a_copy_beside_the_compute_costs_nothing():
    step = alone(release=(F, 2), issue=(B, 2))
    assert events(step) == ["0F0 0-2", "0B0 2-6"]
    assert copies(step) == ["out 0,0,0 1-2", "back 0,0,0 2-3"]
    assert levels(step) == {
        (F, 0): (4, 4), (F, 1): (8, 8), (F, 2): (5, 5), (B, 2): (8, 8), (B, 1): (8, 4), (B, 0): (4, 0),
    }
    assert step.levels(0) == [Level(8, 5), Level(8, 0)]
    assert step.timeline.waited_seconds == (0,)
    assert step.timeline.memory == (((0, 0), (0, 8), (2, 5), (2, 8), (6, 0)),)
    assert step.timeline.host_memory == (((0, 0), (1, 3), (3, 0)),)
    assert step.host_peak_bytes == (3,)


def test_an_early_release_waits_for_the_copy_out():
    step = alone(release=(F, 1), issue=(B, 2))
    assert events(step) == ["0F0 0-3", "0B0 3-7"]
    assert copies(step) == ["out 0,0,0 1-2", "back 0,0,0 3-4"]
    assert levels(step)[F, 1] == (5, 5)
    assert step.timeline.waited_seconds == (1,)
    assert step.timeline.idle_share == (pytest.approx(1 / 7),)  # a wait is no work
    assert step.timeline.memory == (((0, 0), (0, 5), (3, 8), (7, 0)),)


def test_a_late_issue_makes_the_backward_of_its_block_wait():
    step = alone(release=(F, 2), issue=(B, 0))
    assert copies(step) == ["out 0,0,0 1-2", "back 0,0,0 4-5"]
    assert events(step) == ["0F0 0-2", "0B0 2-7"]
    assert levels(step)[B, 1] == (5, 1)
    assert levels(step)[B, 0] == (4, 0)


def test_copies_back_that_are_issued_before_a_release_do_not_wait_for_it():
    """And their memory is taken before that of the release is free."""
    first, second = Boundary(1, 1), Boundary(2, 1)
    step = two_micro_batches(Host(100, out=1.0, back=2.0), (first, second), (second, Boundary(2, 0)))
    assert copies(step) == ["out 0,0,0 1-3", "out 0,1,0 3-5", "back 0,0,0 3-4", "back 0,1,0 5-6"]
    assert events(step) == ["0F0 0-1", "0F1 1-3", "0B1 3-8", "0B0 8-10"]
    assert levels(step) == {
        (0, 0): (4, 4), (0, 1): (4, 4), (1, 0): (8, 8), (1, 1): (6, 6), (2, 1): (8, 6), (2, 0): (8, 4),
        (3, 1): (4, 4), (3, 0): (4, 0),
    }
    assert step.peak_bytes == step.timeline.peak_bytes == (8,)


def test_the_first_block_of_a_stage_keeps_its_input_on_the_device():
    step = alone(release=(B, 2), issue=(B, 2), blocks=2)
    assert [copy.bytes for copy in step.timeline.copies] == [3, 4, 4, 3]
    assert TWO.moved_bytes(0) == 3
    assert TWO.moved_bytes(1) == 4
    assert Stage((replace(BLOCK, moved_bytes=2.0),)).moved_bytes(0) == 2


def test_engines_copy_in_turn_both_ways_at_once():
    step = alone(release=(B, 2), issue=(B, 2), blocks=2, host=Host(100, out=2.0, back=1.0))
    assert copies(step) == ["out 0,0,0 1-2.5", "out 0,0,1 2.5-4.5", "back 0,0,1 4.5-8.5", "back 0,0,0 8.5-11.5"]
    assert events(step) == ["0F0 0-2", "0B0 2-13.5"]
    assert step.host_peak_bytes == (7,)
    assert step.timeline.host_memory == (((0, 0), (1, 3), (2.5, 7), (8.5, 3), (11.5, 0)),)


SOON = ((Boundary(1, 1),) * 2, (Boundary(2, 1),) * 2)


def two_micro_batches(host, first=SOON[0], second=SOON[1]):
    """Each with one block, which is away: released and issued at these boundaries."""
    stage = Stage((replace(BLOCK, moved_bytes=2.0),))
    schedule = from_csv("0F0,0F1,0B1,0B0")
    moves = (Move(0, 1, 0, *second), Move(0, 0, 0, *first))
    choices = {(0, i): Choice(away=(0,)) for i in range(2)}
    return Step(schedule, (stage,), (), choices, moves, host)


def test_half_duplex_is_one_engine():
    both = two_micro_batches(Host(100, out=2.0))
    assert copies(both) == ["out 0,0,0 1-2", "out 0,1,0 2-3", "back 0,0,0 2-3", "back 0,1,0 3-4"]
    assert events(both) == ["0F0 0-1", "0F1 1-2", "0B1 2-6", "0B0 6-8"]
    one = two_micro_batches(Host(100, out=2.0, half_duplex=True))
    assert copies(one) == ["out 0,0,0 1-2", "out 0,1,0 2-3", "back 0,0,0 3-4", "back 0,1,0 4-5"]
    assert events(one) == ["0F0 0-1", "0F1 1-2", "0B1 2-7", "0B0 7-9"]


def test_copying_takes_seconds_from_the_next_block_that_runs():
    step = alone(release=(F, 2), issue=(B, 2), host=Host(100, out=3.0, drag=0.25))
    assert copies(step) == ["out 0,0,0 1-2", "back 0,0,0 2.25-3.25"]
    assert events(step) == ["0F0 0-2.25", "0B0 2.25-6.5"]


def test_a_late_replay_stands_before_the_backward_of_its_block():
    """The replays are drawn together, but what is issued before a block waits for those of later blocks."""
    step = alone(release=(F, 3), issue=(B, 1), stage=Stage((BLOCK,) * 3), late=(2,))
    assert events(step) == ["0F0 0-3", "0R0 3-4", "0B0 4-10"]
    assert copies(step) == ["out 0,0,0 1-2", "back 0,0,0 6-7"]
    assert levels(step) == {
        (F, 0): (4, 4), (F, 1): (8, 8), (F, 2): (9, 9), (F, 3): (6, 6),
        (B, 3): (6, 6), (B, 2): (9, 5), (B, 1): (8, 4), (B, 0): (4, 0),
    }


def test_what_stands_before_and_after_the_blocks():
    stage = Stage((BLOCK,) * 2, fixed(0.5, 0.25, 0.25, 2.0), fixed(1.0, 1.0, 1.0, 3.0))
    step = alone(release=(F, 2), issue=(B, 1), stage=stage)
    assert events(step) == ["0F0 0-3.5", "0B0 3.5-10"]
    assert copies(step) == ["out 0,0,0 1.5-2.5", "back 0,0,0 5.5-6.5"]
    assert levels(step) == {
        (F, 0): (6, 6), (F, 1): (10, 10), (F, 2): (10, 10), (B, 2): (10, 7), (B, 1): (10, 6), (B, 0): (6, 0),
    }


def test_a_split_backward_frees_with_its_weight_gradients():
    schedule = from_csv("0F0,0I0,0W0")
    move = Move(0, 0, 0, Boundary(0, 2), Boundary(1, 0))
    step = Step(schedule, (TWO,), (), {(0, 0): Choice((1,), away=(0,))}, (move,), Host(100, out=3.0))
    assert events(step) == ["0F0 0-2", "0I0 2-5", "0W0 5-7"]
    assert levels(step) == {
        (0, 0): (4, 4), (0, 1): (8, 8), (0, 2): (5, 5), (1, 2): (5, 5), (1, 1): (5, 5), (1, 0): (8, 8), (2, 0): (8, 0),
    }


def test_early_blocks_beside_blocks_that_are_away():
    schedule = from_csv("0F0,0R0,0B0")
    move = Move(0, 0, 0, Boundary(1, 0), Boundary(1, 0))
    step = Step(schedule, (TWO,), (), {(0, 0): Choice((), (1,), away=(0,))}, (move,), Host(100, out=3.0))
    assert events(step) == ["0F0 0-2", "0R0 2-3", "0B0 3-7"]
    assert levels(step)[1, 0] == (8, 8)
    assert step.recomputed == {(0, 0): 1.0}


def test_a_copy_back_is_issued_when_the_compute_comes_to_an_action_and_not_when_its_message_does():
    schedule = gpipe(2, 1)
    move = Move(0, 0, 0, Boundary(1, 2), Boundary(1, 2))
    step = Step(schedule, (TWO, TWO), (Link(),), {(0, 0): Choice((1,), away=(0,))}, (move,), Host(100, out=3.0))
    assert copies(step) == ["out 0,0,0 1-2", "back 0,0,0 2-3"]
    assert events(step) == ["0F0 0-2", "0B0 8-12", "1F0 2-4", "1B0 4-8"]
    assert step.timeline.waited_seconds == (0, 0)


@pytest.mark.parametrize(
    ("behind", "issued", "highest"), [(0, "2-3", 8), (1, "3.33333-4.33333", 5 - 4 + 3), (9, "3.33333-4.33333", 4)]
)
def test_a_copy_back_takes_its_memory_before_a_release_or_behind_it(behind, issued, highest):
    moves = Move(0, 0, 0, Boundary(F, 2), Boundary(B, 2), behind), Move(0, 0, 1, Boundary(B, 2), Boundary(B, 1))
    step = Step(gpipe(1, 1), (TWO,), (), {(0, 0): Choice((), away=(0, 1))}, moves, Host(100, out=3.0))
    assert f"back 0,0,0 {issued}" in copies(step)
    assert levels(step)[B, 2] == (highest, 4)


def test_the_release_of_a_block_comes_before_its_issue_at_the_same_boundary():
    step = alone(release=(B, 2), issue=(B, 2))
    assert copies(step) == ["out 0,0,0 1-2", "back 0,0,0 2-3"]
    assert levels(step)[B, 2] == (8, 8)


def test_without_moves_a_step_is_as_it_was():
    schedule = one_f_one_b(2, 2)
    step = Step(schedule, (TWO, TWO), (Link(),), {}, (), Host(100, out=3.0))
    plain = Step(schedule, (TWO, TWO), (Link(),))
    assert step.timeline == plain.timeline
    assert step.timeline.copies == step.timeline.host_memory == ()
    assert step.host_peak_bytes == (0, 0)


@pytest.mark.parametrize(
    ("release", "issue", "is_right"),
    [
        ((F, 1), (B, 0), True),
        ((F, 2), (F, 2), True),
        ((F, 0), (B, 2), False),
        ((B, 2), (F, 2), False),
        ((F, 1), (2, 0), False),
        ((B, 1), (B, 2), False),
    ],
)
def test_moves_that_cannot_be(release, issue, is_right):
    step = alone(release=release, issue=issue)
    assert list(misplaced_moves(step.places[0], step.moves)) == list(step.moves) * (not is_right)
