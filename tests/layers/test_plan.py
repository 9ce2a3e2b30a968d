"""The search for one device: as good as trying every choice, and never slower with more budget."""
from __future__ import annotations

from itertools import accumulate, combinations
from random import Random

import pytest

from tests.slow import few
from torchckpt.layers.plan import LayersPlan, Wish, chosen, frontier
from torchckpt.layers.took import Call, Took, most_of


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


def with_caches(took: Took, seed: int) -> Took:
    """``took``, whose calls of two layers share what is held until all forwards are done."""
    random, calls, total = Random(seed), [], 0
    for at, call in enumerate(took.calls):
        cached = random.randint(0, int(call.inner_bytes))
        shared = random.randint(0, cached) if at > 1 else 0
        total += cached - shared
        calls.append(call._replace(
            layer=at % 2, cached_bytes=cached, shared_bytes=shared, late_most=took.between_most[at + 1],
            forward_most=call.forward_most + total, kept_most=call.kept_most + total,
        ))
    held = [0, *accumulate(call.cached_bytes - call.shared_bytes for call in calls)]
    return Took(tuple(calls), tuple(map(sum, zip(took.between_most, held))))


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


@few(4)
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


def test_what_is_cached_counts_once_and_more_bytes_are_never_more_seconds():
    """Of all that fits, the plan takes 1 % more time than the best choice at the median, and all is kept if it fits."""
    excess = []
    for seed in range(60):
        took = with_caches(random_step(seed, 7), seed)
        every = [frozenset(kept) for count in range(8) for kept in combinations(range(7), count)]
        tried = [(took.peak_bytes(kept), sum(took.calls[at].replay_seconds for at in range(7) if at not in kept))
                 for kept in every]
        options, everything = frontier(took), took.peak_bytes(range(7))
        assert options[0][0] == min(tried)[0]
        assert options[-1][0] == everything
        assert all(took.peak_bytes(chosen([Wish("", took, peak, False)])) == peak for peak, *_ in options)
        for budget in (options[0][0] + (everything - options[0][0]) * part / 6 for part in range(7)):
            best = min(seconds for peak, seconds in tried if peak <= budget)
            found = [seconds for peak, seconds, _ in options if peak <= budget][-1]
            excess.append((plain_seconds(took) + found) / (plain_seconds(took) + best))
        assert all(took.peak_bytes(kept) <= took.in_one().peak_bytes(kept) for kept in every)
    assert sorted(excess)[len(excess) // 2] <= 1.01


def test_the_most_of_steps_with_unlike_caches_is_no_less_than_each():
    for seed in range(20):
        took = random_step(seed, 6)
        tooks = [with_caches(took, seed), took, with_caches(took, seed + 1)]
        for factors in ([1.0, 1.0, 1.0], [1.0, 0.5, 0.7]):
            most = most_of(tooks, factors)
            for kept in (frozenset(), frozenset({0, 2, 3}), frozenset(range(6))):
                each = [factor * took.peak_bytes(kept) for took, factor in zip(tooks, factors)]
                assert most.peak_bytes(kept) >= max(each) * (1 - 1e-9)


def test_eighty_layers_have_few_options():
    assert 50 < len(frontier(random_step(0, 80))) <= 302


def test_calls_that_are_never_replayed_are_not_kept():
    calls = [Call(at, 1.0, float(at), 1.0, 1, 10, 11, 11, 1, 12, 12, 0) for at in range(2)]
    took = Took(tuple(calls), (0, 1, 9))
    assert frontier(took) == [(12, 1.0, 0), (19, 0.0, 2)]
