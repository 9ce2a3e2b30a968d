"""is_checkpointing() and is_recomputing(): right in every nesting, per thread, put back after every end."""
from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from tests.helpers import in_thread, leaf
from torchckpt import Checkpointing, checkpoint, is_checkpointing, is_recomputing


def flags():
    """Whether this thread is in a forward, and whether in a replay."""
    return is_checkpointing(), is_recomputing()


OUTSIDE, FORWARD, REPLAY, FORWARD_IN_A_REPLAY = (False, False), (True, False), (False, True), (True, True)


def test_outside_of_a_region():
    assert flags() == OUTSIDE


def test_forward_and_replay(call, device):
    seen = []

    def function(x):
        seen.append(flags())
        return x.exp().sin()

    output = call(function, leaf(3, device=device))
    assert flags() == OUTSIDE
    output.sum().backward()
    assert flags() == OUTSIDE
    assert seen == [FORWARD, REPLAY]


def test_nested_regions(device):
    seen = []

    def inner(x):
        seen.append(("inner", flags()))
        return x.sin().exp()

    def outer(x):
        seen.append(("outer", flags()))
        hidden = checkpoint(inner, x.exp())
        seen.append(("after inner", flags()))
        return hidden.cos()

    checkpoint(outer, leaf(3, device=device)).sum().backward()
    assert seen == [
        ("outer", FORWARD),
        ("inner", FORWARD),
        ("after inner", FORWARD),
        # the replay of outer, which runs the forward of inner again
        ("outer", REPLAY),
        ("inner", FORWARD_IN_A_REPLAY),
        ("after inner", REPLAY),
        # the replay of inner
        ("inner", REPLAY),
    ]
    assert flags() == OUTSIDE


def test_backward_in_a_forward(device):
    seen = []

    def inner(x):
        seen.append(("inner", flags()))
        return x.exp().sin()

    def outer(x):
        (gradient,) = torch.autograd.grad(checkpoint(inner, x).sum(), x, create_graph=True)
        seen.append(("outer", flags()))
        return gradient.exp()

    checkpoint(outer, leaf(3, device=device))
    assert seen == [("inner", FORWARD), ("inner", REPLAY), ("outer", FORWARD)]


def test_backward_of_another_region_in_a_forward(device):
    seen, x = [], leaf(3, device=device)

    def other(x):
        seen.append(("other", flags()))
        return x.exp().sin()

    loss = checkpoint(other, leaf(3, device=device)).sum()

    def function(x):
        loss.backward() if not is_recomputing() else None
        seen.append(("function", flags()))
        return x.exp()

    checkpoint(function, x).sum().backward()
    assert seen == [("other", FORWARD), ("other", REPLAY), ("function", FORWARD), ("function", REPLAY)]


def test_other_threads_see_their_own(device):
    seen = []

    def function(x):
        seen.append((flags(), in_thread(flags)))
        return x.exp()

    checkpoint(function, leaf(3, device=device)).sum().backward()
    assert seen == [(FORWARD, OUTSIDE), (REPLAY, OUTSIDE)]


def test_replay_in_another_thread(device):
    seen, region = [], None

    def function(x):
        seen.append((threading.get_ident() == here, flags()))
        return x.exp()

    here = threading.get_ident()
    region = Checkpointing(function, leaf(3, device=device))
    region.checkpoint()
    in_thread(region.prefetch)
    assert seen == [(True, FORWARD), (False, REPLAY)]
    assert in_thread(flags) == flags() == OUTSIDE


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_forward_that_raises(device, error):
    def function(x):
        raise error

    with pytest.raises(error):
        checkpoint(function, leaf(3, device=device))
    assert flags() == OUTSIDE


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_replay_that_raises(device, error):
    def function(x):
        if is_recomputing():
            raise error
        return x.exp()

    region = Checkpointing(function, leaf(3, device=device))
    region.checkpoint()
    with pytest.raises(error):
        region.prefetch()
    assert flags() == OUTSIDE


def test_inner_forward_that_raises(device):
    seen = []

    def inner(x):
        raise ValueError

    def outer(x):
        with pytest.raises(ValueError):  # noqa: PT011  # the bare one above
            checkpoint(inner, x)
        seen.append(flags())
        return x.exp()

    checkpoint(outer, leaf(3, device=device)).sum().backward()
    assert seen == [FORWARD, REPLAY]


class Counted(nn.Module):
    """Counts its forwards, guarded and not."""

    guarded = unguarded = 0

    def forward(self, x):
        self.unguarded += 1
        if not is_recomputing():
            self.guarded += 1
        return x.exp().sin()


@pytest.mark.parametrize(("depth", "runs"), [(0, 1), (1, 2), (2, 3), (3, 4)])
def test_guarded_counter_counts_once_at_any_depth(device, depth, runs):
    counted = Counted()

    def level(x, depth):
        return checkpoint(level, x, depth - 1).cos() if depth else counted(x)

    level(leaf(3, device=device), depth).sum().backward()
    assert (counted.guarded, counted.unguarded) == (1, runs)
