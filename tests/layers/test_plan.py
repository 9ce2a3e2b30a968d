"""The search for one device: as good as trying every choice, and never slower with more budget."""
from __future__ import annotations

from itertools import combinations
from random import Random

import pytest

from torchckpt.layers.plan import LayersPlan, frontier
from torchckpt.layers.took import Call, Took


def random_step(seed: int, calls: int) -> Took:
    """A step of unlike calls, whose loss takes more or less than its layers."""
    random = Random(seed)
    level = random.randint(0, 2000)
    between, found = [level + random.randint(0, 500)], []
    for call in range(calls):
        inner, boundary = random.randint(1, 1000), random.randint(1, 100)
        level += boundary
        forward = level + random.randint(0, inner)
        found.append(Call(
            call, random.random(), random.random(), 2 * random.random(), boundary, inner, forward, forward + inner,
            level, level + inner + random.randint(0, 100), level + inner + random.randint(0, 300), level,
        ))
        between.append(level + random.randint(0, 2000 if call + 1 == calls else 100))
    return Took(tuple(found), tuple(between))


def plain_seconds(took: Took) -> float:
    return sum(call.forward_seconds + call.backward_seconds for call in took.calls)


@pytest.mark.parametrize("seed", range(4))
def test_every_choice_is_tried_in_twelve_layers(seed):
    took = random_step(seed, 12)
    every = [frozenset(kept) for count in range(13) for kept in combinations(range(12), count)]
    tried = [(took.peak_bytes(kept), sum(took.calls[at].replay_seconds for at in range(12) if at not in kept))
             for kept in every]
    least, most = min(tried)[0], max(tried)[0]
    options = frontier(took)
    assert options[0][0] == least
    for budget in (least + (most - least) * part / 19 for part in range(20)):
        best = min(seconds for peak, seconds in tried if peak <= budget)
        found = [seconds for peak, seconds, _ in options if peak <= budget][-1]
        assert plain_seconds(took) + found <= 1.01 * (plain_seconds(took) + best)


@pytest.mark.parametrize("seed", range(20))
def test_options_are_what_they_say_and_more_bytes_are_fewer_seconds(seed):
    took = random_step(seed, 40)
    options = frontier(took)
    for peak, seconds, bits in options:
        plan = LayersPlan(took, (), peak, frozenset(at for at in range(40) if bits >> at & 1))
        assert plan.peak_bytes == peak
        assert plan.recompute_seconds == pytest.approx(seconds)
    assert options == sorted(options)
    assert sorted((seconds for _, seconds, _ in options), reverse=True) == [seconds for _, seconds, _ in options]


def test_eighty_layers_have_few_options():
    assert 50 < len(frontier(random_step(0, 80))) <= 302


def test_calls_that_are_never_replayed_are_not_kept():
    calls = [Call(at, 1.0, float(at), 1.0, 1, 10, 11, 11, 1, 12, 12, 0) for at in range(2)]
    took = Took(tuple(calls), (0, 1, 9))
    assert frontier(took) == [(12, 1.0, 0), (19, 0.0, 2)]
