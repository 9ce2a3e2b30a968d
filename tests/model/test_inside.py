"""Recomputes inside backwards, as events of their own."""
from __future__ import annotations

import pytest

from torchckpt.model import Link, StageCosts, ahead, arrival, one_f_one_b, simulate, with_recompute
from torchckpt.model.inside import replays_apart
from torchckpt.model.timeline import Timeline

PLAIN = StageCosts(forward_seconds=1, input_grad_seconds=1, weight_grad_seconds=1, recompute_seconds=0.75)
WITH_RECOMPUTE_INSIDE = StageCosts(forward_seconds=1, input_grad_seconds=1.75, weight_grad_seconds=1)
SIZES = (StageCosts(saved_bytes=8, boundary_bytes=2), StageCosts(saved_bytes=6, boundary_bytes=1))
REPLAYS = {(stage, i): [0.5, 0.25] for stage in range(2) for i in range(3)}


def inside() -> Timeline:
    """A step whose backwards take the time of the recomputes, too."""
    return simulate(one_f_one_b(2, 3), WITH_RECOMPUTE_INSIDE, Link(0.25))


def rows(timeline: Timeline) -> list[list[tuple[str, float, float]]]:
    return [
        [(str(event.action), event.start_seconds, event.end_seconds) for event in timeline.events if event.rank == rank]
        for rank in range(2)
    ]


def test_it_is_the_step_that_recomputes_at_arrival() -> None:
    apart = replays_apart(inside(), REPLAYS, SIZES)
    expected = simulate(with_recompute(one_f_one_b(2, 3), arrival()), PLAIN, Link(0.25))
    assert rows(apart) == rows(expected)
    assert apart.messages == inside().messages
    assert apart.schedule.late == expected.schedule.late
    assert apart.schedule.ranks == expected.schedule.ranks


def test_one_region_at_a_time_is_in_memory() -> None:
    assert replays_apart(inside(), REPLAYS, SIZES).peak_bytes == (2 + 2 + 8 / 2, 1 + 6 / 2)


def test_what_is_not_replayed_keeps_its_activations() -> None:
    apart = replays_apart(inside(), {(0, 2): [0.75]}, SIZES)
    assert [name for name, *_ in rows(apart)[0]] == ["0F0", "0F1", "0B0", "0F2", "0B1", "0R2", "0B2"]
    assert apart.peak_bytes == (8 + 8, 6)


def test_an_action_that_recomputed_nothing_is_left_out() -> None:
    idle = simulate(with_recompute(one_f_one_b(2, 3), ahead()), WITH_RECOMPUTE_INSIDE, Link(0.25))
    names = [[name for name, *_ in row] for row in rows(replays_apart(idle, REPLAYS, SIZES))]
    assert names == [[name for name, *_ in row] for row in rows(replays_apart(inside(), REPLAYS, SIZES))]


def test_a_replay_ends_with_its_backward_at_the_latest() -> None:
    apart = replays_apart(inside(), {(1, 0): [2.0, 2.0]}, SIZES)
    (forward, replay, backward, *_) = rows(apart)[1]
    assert [forward[0], replay[0], backward[0]] == ["1F0", "1R0", "1B0"]
    assert replay[1:] == pytest.approx((forward[2], forward[2] + 2.75))
    assert backward[1] == backward[2] == replay[2]
