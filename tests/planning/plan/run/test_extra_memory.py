"""What a step takes beside its regions: measured by action, and foretold of other steps."""
from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planning.plan.by_hand import actions, one_rank
from torchckpt.planning import Action, Block, Choice, Kind, Schedule, Stage, fixed
from torchckpt.planning.plan.run.extra_memory import ExtraMemory, MeasuredStep, peaks_of, with_gradients
from torchckpt.planning.step.memory import Level, Piece
from torchckpt.planning.step.simulated import Step

STAGES = [Stage((Block(saved_bytes=10.0, boundary_bytes=1.0),) * 2, after=fixed(saved_bytes=2.0))]
LATE, KEPT, LAST, FIRST, EARLY = (
    Choice((), (), (0, 1)),
    Choice((0, 1)),
    Choice((1,), (), (0,)),
    Choice((0,), (), (1,)),
    Choice((), (0, 1)),
)


def step_of(order, choices):
    return Step(Schedule("test", (tuple(order),), (0,), len(choices)), tuple(STAGES), (), choices)


def took(text, **measured):
    """The levels that were measured, by action, as ``f0=(highest, left, entered)``."""
    found = {Action(0, Kind(name[0].upper()), int(name[1:])): Level(*map(float, own)) for name, own in measured.items()}
    return MeasuredStep(one_rank(text, 2), {(0, i): LATE for i in range(2)}, found)


ORDER = "0F0 0F1 0B0 0B1"
MEASURED = took(ORDER, f0=(11, 5), f1=(16, 10), b0=(30, 8, 15), b1=(24, 3, 12))
"""Each forward leaves 4 and one more. While it runs it takes 6 on top. The first backward makes 3 for gradients."""


def test_levels():
    """A late visit holds 4: two boundaries, and what comes behind. Its backward recomputes a block of 9 more, when the
    2 behind are freed."""
    order = actions(ORDER)
    found = step_of(order, {(0, 0): LATE, (0, 1): KEPT}).levels(0)
    assert found == [Level(4, 4), Level(26, 26), Level(33, 22), Level(22, 0)]


def test_what_was_beside():
    """A late backward has 11 at most, 7 above what it held."""
    assert MEASURED.beside(STAGES) == {
        Action(0, Kind.FORWARD, 0): ExtraMemory(7, 1, 0),
        Action(0, Kind.FORWARD, 1): ExtraMemory(7, 1, 0),
        Action(0, Kind.BACKWARD, 0): ExtraMemory(13, 2, 5),
        Action(0, Kind.BACKWARD, 1): ExtraMemory(9, -1, 4),
    }
    assert (MEASURED.peaks(), MEASURED.least(STAGES)) == ([30], [15])


@pytest.mark.parametrize("choice", [LATE, KEPT, EARLY], ids=["late", "kept", "early"])
def test_a_rank_whose_bytes_were_not_counted_takes_its_activations(choice):
    """As with compiled modules on a CPU: what the measured step held was taken off."""
    beside = took(ORDER).beside(STAGES)
    assert beside == {}
    text = "0F0 0F1 0R0 0B0 0R1 0B1" if choice is EARLY else ORDER
    step = step_of(actions(text), {(0, i): choice for i in range(2)})
    assert peaks_of(step, beside)[0] == step.peak_bytes[0]


def test_gradients_that_were_there_count_from_the_first_action_that_makes_them_on():
    """100 of stage 0, and 1000 of stage 1: a split backward makes them in its second part."""
    order = {action: Level(10.0, 5.0, 7.0) for action in actions("0F0 1F0 1I0 1W0 0B0 0F1 1W1")}
    found = with_gradients(order, {0: 100.0, 1: 1000.0})
    assert [(level.highest, level.left, level.entered) for level in found.values()] == [
        *[(10, 5, 7)] * 3, (1010, 1005, 7), (1110, 1105, 1007), *[(1110, 1105, 1107)] * 2,
    ]  # fmt: skip
    pieces = Piece(0, False, 4.0, 2.0), Piece(0, True, 3.0, 0.0, 4.0)
    order = {action: Level(10.0, 5.0, 7.0, pieces) for action in actions("0B0 0F1")}
    backward, forward = with_gradients(order, {0: 100.0}).values()
    assert backward.pieces == forward.pieces == (
        Piece(0, False, 104.0, 102.0, 100.0), Piece(0, True, 103.0, 100.0, 104.0)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("first", "second", "peak"),
    [
        (LATE, LATE, 30),  # as it was measured
        (KEPT, KEPT, 44 + 2 + 13),  # at the end of the forwards, and what the first backward takes
        (LATE, KEPT, 33 + 2 + 13),
        (LAST, LAST, 26 + 2 + 13),
    ],
)
def test_the_peak_of_another_step(first, second, peak):
    choices = {(0, 0): first, (0, 1): second}
    assert peaks_of(step_of(actions(ORDER), choices), MEASURED.beside(STAGES))[0] == peak


@pytest.mark.parametrize(
    ("choice", "peak"),
    [
        (LATE, 4 + 1 + 6),
        (KEPT, 22 + 1),  # what it takes while it runs, it holds
        (LAST, 13 + 1),
        (FIRST, 13 + 1 + 6),  # the last block is late
    ],
)
def test_a_forward_takes_what_its_last_block_takes_unless_that_is_kept(choice, peak):
    beside = MEASURED.beside(STAGES)
    assert peaks_of(step_of(actions("0F0"), {(0, 0): choice}), beside)[0] == peak


def test_a_backward_takes_before_it_recomputes_what_it_took_then():
    """Of much that is kept, and of a loss: more than while it recomputes."""
    measured = took(ORDER, f0=(4, 4), f1=(8, 8), b0=(20, 4, 18), b1=(16, 0, 14))
    beside = measured.beside(STAGES)
    assert beside[Action(0, Kind.BACKWARD, 0)] == ExtraMemory(5, 0, 10)
    assert peaks_of(step_of(actions(ORDER), {(0, 0): KEPT, (0, 1): KEPT}), beside)[0] == 44 + 10


UNLIKE = [Stage((Block(saved_bytes=10.0, boundary_bytes=1.0), Block(saved_bytes=3.0, boundary_bytes=1.0)),
                after=fixed(saved_bytes=2.0))]  # fmt: skip
"""A late backward has 4 at first and in the last block, and 10 in the first one."""
REPLAYED = ((2, False, 4.0, 2.0), (1, True, 4.0, 4.0), (1, False, 10.0, 1.0), (0, True, 10.0, 10.0),
            (0, False, 10.0, 0.0))  # fmt: skip
"""The last block takes 6 of its own, which is no more than what is there in the first one."""


def peak_of(pieces, choice):
    measured = took("0F0 0B0", f0=(4, 4))
    level = Level(max(highest for _, _, highest, _ in pieces), 0.0, 0.0, tuple(Piece(*piece) for piece in pieces))
    measured = replace(measured, levels={**measured.levels, Action(0, Kind.BACKWARD, 0): level})
    step = replace(step_of(actions("0F0 0B0"), {(0, 0): choice}), stages=tuple(UNLIKE))
    return peaks_of(step, measured.beside(UNLIKE))[0]


@pytest.mark.parametrize(
    ("choice", "peak"),
    [
        (LATE, 10),  # as it was measured
        (LAST, 10),
        (FIRST, 13 + 6),  # the first block is there, too
        (KEPT, 15 - 2 + 6),
    ],
)
def test_what_a_block_takes_of_its_own_comes_on_top_of_what_is_kept(choice, peak):
    assert peak_of(REPLAYED, choice) == peak


@pytest.mark.parametrize(("choice", "peak"), [(FIRST, 13 + 6), (KEPT, 15)])
def test_what_only_a_replay_takes_is_not_taken_where_its_block_is_kept(choice, peak):
    behind, replay, own, *others = REPLAYED
    pieces = behind, (*replay[:2], own[2], replay[3]), (*own[:2], replay[2], own[3]), *others
    assert peak_of(pieces, choice) == peak


def test_pieces_that_are_not_one_block_after_the_other_say_nothing():
    assert peak_of((REPLAYED[0], *REPLAYED[3:], *REPLAYED[1:3]), FIRST) == 13


def test_a_recompute_that_was_none_takes_what_its_forward_took():
    beside = {Action(0, Kind.FORWARD, 0): ExtraMemory(15, 1), Action(0, Kind.RECOMPUTE, 0): ExtraMemory(0, 0)}
    assert peaks_of(step_of(actions("0F0 0R0"), {(0, 0): EARLY}), beside)[0] == 22 + 1 + (14 - 9)


def test_a_split_backward_that_is_done_whole_takes_what_its_parts_took():
    beside = {Action(0, Kind.INPUT_GRAD, 0): ExtraMemory(4, 3), Action(0, Kind.WEIGHT_GRAD, 0): ExtraMemory(2, -3)}
    assert peaks_of(step_of(actions("0F0 0B0"), {(0, 0): KEPT}), beside)[0] == 22 + 5


def test_weight_gradients_that_wait_are_counted_each():
    """What the gradients of the inputs leave for them adds up."""
    beside = {
        Action(0, kind, i): own
        for i in range(2)
        for kind, own in ((Kind.INPUT_GRAD, ExtraMemory(3, 3)), (Kind.WEIGHT_GRAD, ExtraMemory(0, -3)))
    }
    choices = {(0, 0): KEPT, (0, 1): KEPT}
    assert peaks_of(step_of(actions("0F0 0F1 0I0 0W0 0I1 0W1"), choices), beside)[0] == 44 + 3
    assert peaks_of(step_of(actions("0F0 0F1 0I0 0I1 0W0 0W1"), choices), beside)[0] == 44 + 6
