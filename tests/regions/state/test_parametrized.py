"""Weights that ``parametrize.cached()`` holds around several regions, or around a backward."""
from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from tests.helpers import Block, assert_equal, by_hand, plain, prefetched
from torchckpt import checkpoint

WAYS = [(True, False), (True, True), (False, True)]


class Dropped(nn.Module):
    def forward(self, weight):
        return nn.functional.dropout(weight, 0.3).tanh()


class Loop(nn.Module):
    """It reads its weight in each turn."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = parametrize.register_parametrization(nn.Linear(4, 4), "weight", Dropped())

    def forward(self, x):
        for _ in range(3):
            x = nn.functional.dropout(self.cell(x), 0.2).sin()
        return x


@pytest.mark.parametrize("call", [checkpoint, by_hand, prefetched], ids=lambda call: call.__name__)
@pytest.mark.parametrize(("forward_is_cached", "backward_is_cached"), WAYS)
def test_a_weight_that_is_cached_around_regions_is_computed_as_often_as_in_the_plain_model(
    call, forward_is_cached, backward_is_cached
):
    found = []
    for way in (plain, call):
        torch.manual_seed(1)
        layers = [Loop(), parametrize.register_parametrization(nn.Linear(4, 4), "weight", Dropped()), Loop(), Block()]
        layers[2].cell = layers[0].cell  # in the cache when it is called
        x = y = torch.randn(3, 4, requires_grad=True)
        with parametrize.cached() if forward_is_cached else nullcontext():
            for layer in layers + layers[:2]:
                y = way(layer, y)
            if forward_is_cached and backward_is_cached:
                y.sum().backward()
        if not (forward_is_cached and backward_is_cached):
            with parametrize.cached() if backward_is_cached else nullcontext():
                held = layers[0].cell.weight
                y.sum().backward()
                assert (layers[0].cell.weight is held) is backward_is_cached  # the replays have put the cache back
        assert (parametrize._cache_enabled, parametrize._cache) == (0, {})
        found.append([x.grad, *(p.grad for layer in layers for p in layer.parameters()), torch.get_rng_state()])
    assert_equal(found[1], found[0])


def test_a_region_lets_go_of_what_was_cached_when_its_replay_is_done():
    loop = Loop()
    with parametrize.cached():
        made = []
        loop.cell.parametrizations.weight.register_forward_hook(lambda *each: made.append(each[-1].grad_fn))
        loop.cell.weight  # noqa: B018  # is cached before the region
        y = checkpoint(loop, torch.randn(3, 4))
    freed = []
    made.pop().register_prehook(lambda _: freed.append(None))
    y.sum().backward()
    assert freed == [None]
