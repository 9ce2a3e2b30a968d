"""Frames of a stage and micro-batch: gathered, replayed from the last one on, dropped."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.helpers import doing, leaf
from torchckpt import checkpoint
from torchckpt.distributed.ahead import Frames
from torchckpt.planning import Choice, State
from torchckpt.regions.core.scope import Scope
from torchckpt.regions.flags import local
from torchckpt.testing import count_recomputes

NOTHING_SHARDED = nn.Identity()


class Named(nn.Module):
    """Notes what it does."""

    def __init__(self, name, seen):
        super().__init__()
        self.name, self.seen = name, seen

    def forward(self, x):
        self.seen.append(f"{doing()} {self.name}")
        return x.exp().sin()


def waiting(frames, micro_batch):
    """Of stage 0, what has not been recomputed."""
    return frames._waiting.get((0, micro_batch), [])


def forward(frames, seen, micro_batch=0, names="abc", choice=State.EARLY):
    """Of stage 0: a region for each name."""
    x = leaf(3)
    scope = Scope(choice is State.KEPT if isinstance(choice, State) else choice.kept)
    with frames.gathered((0, micro_batch), scope, choice):
        for name in names:
            x = checkpoint(Named(name, seen), x)
    return x, scope.frames


@pytest.mark.parametrize(
    ("segments", "early", "late"),
    [
        (None, ["replay c", "replay b", "replay a"], []),
        (2, ["replay c", "replay b"], ["replay a"]),
        (1, ["replay c"], ["replay b", "replay a"]),
        (0, [], ["replay c", "replay b", "replay a"]),
        (4, ["replay c", "replay b", "replay a"], []),
    ],
)
def test_last_ones_are_early_and_the_backward_does_the_rest(segments, early, late):
    frames, seen = Frames(segments), []
    y, gathered = forward(frames, seen)
    assert seen == ["forward a", "forward b", "forward c"]
    assert waiting(frames, 0) == gathered[len(late):]
    seen.clear()
    frames.recompute((0, 0), NOTHING_SHARDED)
    assert seen == early
    assert waiting(frames, 0) == []
    y.sum().backward()
    assert seen == early + late


@pytest.mark.parametrize(
    ("choice", "seen_early", "seen_late"),
    [
        (Choice((), (0, 1, 2)), ["replay c", "replay b", "replay a"], []),
        (Choice((), (0, 2), (1,)), ["replay c", "replay a"], ["replay b"]),
        (State.LATE, [], ["replay c", "replay b", "replay a"]),
        (Choice((0, 2), (1,)), ["replay b"], []),
        (Choice((2,), (0,), (1,)), ["replay a"], ["replay b"]),
        (Choice((0, 1, 2)), [], []),
    ],
)
def test_which_are_kept_and_early_is_told_by_number(choice, seen_early, seen_late):
    frames, seen = Frames(None), []
    y, _ = forward(frames, seen, choice=choice)
    seen.clear()
    frames.recompute((0, 0), NOTHING_SHARDED)
    assert seen == seen_early
    y.sum().backward()
    assert seen == seen_early + seen_late


def test_micro_batches_are_apart():
    frames, seen = Frames(None), []
    forward(frames, seen, 0, "a")
    forward(frames, seen, 1, "b")
    seen.clear()
    frames.recompute((0, 1), NOTHING_SHARDED)
    assert seen == ["replay b"]
    assert len(waiting(frames, 0)) == 1


def test_second_recompute_does_nothing():
    frames, seen = Frames(None), []
    y, _ = forward(frames, seen)
    with count_recomputes() as recomputes:
        for _ in range(2):
            frames.recompute((0, 0), NOTHING_SHARDED)
        frames.recompute((5, 5), NOTHING_SHARDED)
        y.sum().backward()
    assert recomputes.total == 3


def test_to_keep_is_to_have_no_regions():
    frames, seen = Frames(None), []
    y, gathered = forward(frames, seen, choice=State.KEPT)
    assert seen == ["plain call a", "plain call b", "plain call c"]
    assert gathered == []
    frames.recompute((0, 0), NOTHING_SHARDED)
    y.sum().backward()
    assert len(seen) == 3


def test_what_is_dropped_or_cleared_is_left_to_the_backward():
    frames, seen = Frames(None), []
    (y, _), (z, _) = forward(frames, seen, 0, "a"), forward(frames, seen, 1, "b")
    frames.drop((0, 0))
    assert (len(waiting(frames, 0)), len(waiting(frames, 1))) == (0, 1)
    frames.clear()
    assert waiting(frames, 1) == []
    frames.drop((0, 1))
    seen.clear()
    (y + z).sum().backward()
    assert sorted(seen) == ["replay a", "replay b"]


def test_forward_that_raises_leaves_nothing_behind():
    frames = Frames(None)

    def fails():
        with frames.gathered((0, 0), Scope(), State.EARLY):
            checkpoint(torch.sin, leaf(3))
            raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        fails()
    assert waiting(frames, 0) == []
    assert local.thread.scope is None


def test_regions_outside_of_a_forward_are_no_ones():
    frames = Frames(None)
    with frames.gathered((0, 0), Scope(), State.EARLY):
        pass
    checkpoint(torch.sin, leaf(3))
    assert waiting(frames, 0) == []
