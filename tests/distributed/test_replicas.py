"""What two processes measured, together: in each state, at least what either has."""
from __future__ import annotations

from dataclasses import replace

from torchckpt.distributed.replicas import larger_levels, larger_stages
from torchckpt.planning import Action, Block, Kind, Stage, fixed
from torchckpt.planning.step.memory import Level, Piece

FORWARD, BACKWARD = Action(0, Kind.FORWARD, 0), Action(0, Kind.BACKWARD, 0)


def together(first, other):
    found = larger_stages({0: first}, {0: other})[0]
    assert found == larger_stages({0: other}, {0: first})[0]
    return found


def test_each_number_of_a_level_is_the_larger():
    pieces = Piece(1, False, 5.0, 2.0), Piece(0, True, 3.0, 3.0)
    first = {FORWARD: Level(5.0, 2.0, 1.0, pieces)}
    others = tuple(piece._replace(highest=4.0, left=2.5) for piece in pieces)
    other = {FORWARD: Level(4.0, 3.0, 2.0, others), BACKWARD: Level(1.0, 0.0)}
    larger = Level(5.0, 3.0, 2.0, (Piece(1, False, 5.0, 2.5), Piece(0, True, 4.0, 3.0)))
    assert larger_levels(first, other) == {FORWARD: larger, BACKWARD: Level(1.0, 0.0)}
    assert larger_levels({}, first) == larger_levels(first, {}) == first


def test_pieces_that_differ_are_none():
    levels = [{FORWARD: Level(5.0, 2.0, 0.0, (Piece(0, is_replay, 5.0, 2.0),))} for is_replay in (False, True)]
    assert larger_levels(*levels) == {FORWARD: Level(5.0, 2.0)}


def test_a_block_takes_what_either_does_in_each_state():
    """The first has much that a recompute frees, the second a large input: either way there is room for both."""
    blocks = Block(0, 0, 0, 3.0, 10.0, boundary_bytes=1.0), Block(0, 0, 0, 2.0, 9.0, boundary_bytes=8.0)
    ends = {"before": fixed(saved_bytes=1.0), "after": fixed(saved_bytes=2.0)}
    found = together(Stage(blocks[:1], **ends), Stage(blocks[1:], fixed(saved_bytes=3.0)))
    larger = Block(0, 0, 0, 3.0, saved_bytes=17.0, boundary_bytes=8.0)
    assert found == Stage((larger,), fixed(saved_bytes=3.0), ends["after"])
    assert larger_stages({0: found}, {1: found}) == {0: found, 1: found}


def test_so_it_does_away():
    moved = [Block(saved_bytes=10.0, moved_bytes=10.0), Block(saved_bytes=9.0, moved_bytes=2.0)]
    assert together(*(Stage((block,)) for block in moved)) == Stage((Block(saved_bytes=17.0, moved_bytes=10.0),))
    less, more = (Stage((replace(moved[0], moved_bytes=each),)) for each in (3.0, 4.0))
    assert together(less, more) == Stage((Block(saved_bytes=11.0, moved_bytes=4.0),))


def test_stages_of_other_blocks_have_no_plan_in_common():
    stages = [Stage((Block(),) * count) for count in (2, 3)]
    assert larger_stages({0: stages[0]}, {0: stages[1]}) == {0: stages[0]}
