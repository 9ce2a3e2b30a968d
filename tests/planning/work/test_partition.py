"""The balanced partition, beside all partitions of up to nine layers."""
from __future__ import annotations

import random
import re
from itertools import combinations, pairwise
from math import inf, nan
from typing import Any

import pytest

from torchckpt.errors import ArgumentError
from torchckpt.planning.work.partition import balanced


def all_partitions(layers: int, stages: int) -> list[list[int]]:
    cuts = combinations(range(1, layers), stages - 1)
    return [[end - start for start, end in pairwise((0, *between, layers))] for between in cuts]


def stage_costs(costs: list[Any], counts: list[int]) -> list[Any]:
    ends = [sum(counts[: stage + 1]) for stage in range(len(counts))]
    return [sum(costs[end - count : end]) for end, count in zip(ends, counts)]


def by_brute_force(costs: list[int], stages: int) -> list[int]:
    def unevenness(counts: list[int]) -> Any:
        own = stage_costs(costs, counts)
        return sorted(own, reverse=True), sorted(counts, reverse=True), counts[::-1]

    return min(all_partitions(len(costs), stages), key=unevenness)


@pytest.mark.parametrize("largest", [0, 1, 3, 50])
@pytest.mark.parametrize("layers", range(1, 10))
def test_it_is_the_best_of_all(layers: int, largest: int) -> None:
    draw = random.Random(layers)
    for stages in range(1, layers + 1):
        for _ in range(6):
            costs = [draw.randint(0, largest) for _ in range(layers)]
            assert balanced(costs, stages) == by_brute_force(costs, stages), (costs, stages)


def test_floats_are_added_up_without_rounding() -> None:
    draw = random.Random(1)
    for layers in range(1, 10):
        whole = [draw.randint(0, 20) for _ in range(layers)]
        costs = [0.1 * 2.0**-cost for cost in whole]  # multiples of one another, which 0.1 + 0.1 + 0.1 is not
        exact = [2 ** (20 - cost) for cost in whole]
        for stages in range(1, layers + 1):
            assert balanced(costs, stages) == by_brute_force(exact, stages)
    assert balanced([0.1] * 6, 2) == [3, 3]
    assert balanced([0.1, 0.1, 0.1, 1e300, 1e-300], 3) == [3, 1, 1]


@pytest.mark.parametrize(
    ("costs", "stages", "counts"),
    [
        ([5, 1, 1, 1, 1], 3, [1, 2, 2]),  # the first stage is the largest anyway; the others are even
        ([1, 1, 1, 1, 1], 3, [2, 2, 1]),  # the first stages take one more
        ([0, 0, 0, 0], 2, [2, 2]),  # by number where nothing costs anything
        ([3, 0, 0, 0, 3], 2, [3, 2]),
        ([2, 3, 4], 1, [3]),
        ([2, 3, 4], 3, [1, 1, 1]),
    ],
)
def test_ties(costs: list[int], stages: int, counts: list[int]) -> None:
    assert balanced(costs, stages) == counts


def fits(costs: list[int], stages: int, largest: int) -> bool:
    """Whether that many stages can do with ``largest`` each: fill one after the other."""
    room, used = 0, 0
    for cost in costs:
        if cost > largest:
            return False
        if cost > room:
            room, used = largest, used + 1
        room -= cost
    return used <= stages


@pytest.mark.slow
@pytest.mark.parametrize("head", [1, 100_000])
def test_a_thousand_layers_in_64_stages(head: int) -> None:
    draw = random.Random(0)
    costs = [draw.randint(1, 1000) for _ in range(999)] + [head]
    counts = balanced(costs, 64)
    largest = max(stage_costs(costs, counts))
    assert (len(counts), sum(counts)) == (64, 1000)
    assert fits(costs, 64, largest)
    assert not fits(costs, 64, largest - 1)


@pytest.mark.parametrize(
    ("costs", "partitions", "text"),
    [
        ([1, 2], 0, "balanced(): partitions is not an integer >= 1\n  received: partitions=0\n  works: "),
        ([1, 2], 2.0, "partitions is not an integer >= 1\n  received: partitions=2.0\n"),
        (
            [1, 2],
            3,
            "there are fewer layers than stages\n  received: partitions=3, 2 layers\n"
            "  works:    partitions=2, or more layers",
        ),
        ([], 1, "received: partitions=1, 0 layers\n  works:    partitions=1, or more layers"),
        (
            [1, -2, nan, inf, "3"],
            2,
            "a cost is not a finite number, 0 or more\n"
            "  received: -2 of layer 1, nan of layer 2, inf of layer 3, '3' of layer 4\n"
            "  works:    costs=[0.5, 2, 0]",
        ),
        ([-1.0], 2, "balanced(): 2 faults\nthere are fewer layers than stages\n"),
    ],
)
def test_faults(costs: Any, partitions: Any, text: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(text)):
        balanced(costs, partitions)
