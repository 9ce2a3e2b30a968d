"""The search for one device: as good as trying every choice, and never slower with more budget."""
from __future__ import annotations

from itertools import combinations
from random import Random

import pytest

from torchckpt.layers.plan import LayersPlan, Wish, chosen, frontier
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
def test_options_are_what_they_say(seed):
    took = random_step(seed, 40)
    for peak, seconds, bits in frontier(took):
        plan = LayersPlan(took, (), peak, frozenset(at for at in range(40) if bits >> at & 1))
        assert plan.peak_bytes == peak
        assert plan.recompute_seconds == pytest.approx(seconds)


def test_more_bytes_are_never_more_seconds_in_a_thousand_steps():
    for seed in range(1000):
        took = random_step(seed, 2 + seed % 14)
        options, random = frontier(took), Random(seed)
        budgets = sorted(random.uniform(options[0][0], options[-1][0] + 1) for _ in range(4))
        kept = [chosen([Wish("", took, budget, False)]) for budget in budgets]
        seconds = [sum(call.replay_seconds for at, call in enumerate(took.calls) if at not in each) for each in kept]
        assert seconds == sorted(seconds, reverse=True)
        assert all(took.peak_bytes(each) <= budget for each, budget in zip(kept, budgets))


def test_ranks_keep_the_same_calls_each_within_its_limit():
    for seed in range(50):
        tooks = [random_step(seed, 10), random_step(seed + 1000, 10)]
        limits = [took.peak_bytes(()) + 0.7 * (took.peak_bytes(range(10)) - took.peak_bytes(())) for took in tooks]
        wishes = [Wish("", took, limit, False) for took, limit in zip(tooks, limits)]
        kept = chosen(wishes)
        assert all(took.peak_bytes(kept) <= limit * (1 + 1e-9) for took, limit in zip(tooks, limits))
        assert kept == chosen(wishes)
        assert chosen(wishes[:1] * 2) == chosen(wishes[:1])


def test_eighty_layers_have_few_options():
    assert 50 < len(frontier(random_step(0, 80))) <= 302


def test_calls_that_are_never_replayed_are_not_kept():
    calls = [Call(at, 1.0, float(at), 1.0, 1, 10, 11, 11, 1, 12, 12, 0) for at in range(2)]
    took = Took(tuple(calls), (0, 1, 9))
    assert frontier(took) == [(12, 1.0, 0), (19, 0.0, 2)]
