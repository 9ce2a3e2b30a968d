"""Recompute: a node of the graph whose backward is a replay."""
from __future__ import annotations

import pytest

from tests.helpers import leaf
from torchckpt.regions.core.nodes import fork, join, recompute


class Frame:
    """Stands for a frame: it only has to be recomputable."""

    def __init__(self, error=None) -> None:
        self.replays, self.error = 0, error

    def recompute(self) -> None:
        self.replays += 1
        if self.error:
            raise self.error


def test_backward_of_the_node_is_the_replay(device):
    frame, x = Frame(), leaf(3, device=device)
    forked, edge = fork(x)
    loss = join(forked, recompute(frame, edge)).sum()
    assert frame.replays == 0
    loss.backward()
    assert frame.replays == 1
    assert x.grad.tolist() == [1.0] * 3


def test_node_that_is_not_reached_replays_nothing(device):
    frame = Frame()
    forked, edge = fork(leaf(3, device=device))
    recompute(frame, edge)
    forked.sum().backward()
    assert frame.replays == 0


def test_node_that_hangs_on_several_phonies(device):
    frame, leaves = Frame(), [leaf(3, device=device) for _ in range(3)]
    forked = [fork(x) for x in leaves]
    edge = recompute(frame, *(edge for _, edge in forked))
    (join(leaf(3, device=device), edge).sum() + sum(tensor.sum() for tensor, _ in forked)).backward()
    assert frame.replays == 1
    assert [x.grad.tolist() for x in leaves] == [[1.0] * 3] * 3


def test_gradient_that_comes_to_the_node_is_undefined(device):
    seen = []
    forked, edge = fork(leaf(3, device=device))
    edge = recompute(Frame(), edge)
    edge.grad_fn.register_prehook(lambda grads: seen.append(grads))
    edge.grad_fn.register_hook(lambda inputs, outputs: seen.append(inputs))
    join(forked, edge).sum().backward()
    assert seen == [(None,), (None,)]


def test_error_of_the_replay_is_the_error_of_the_backward(device):
    forked, edge = fork(leaf(3, device=device))
    loss = join(forked, recompute(Frame(KeyError("in the replay")), edge)).sum()
    with pytest.raises(KeyError, match="in the replay"):
        loss.backward()
