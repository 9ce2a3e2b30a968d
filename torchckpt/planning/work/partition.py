"""Partition: split consecutive layers into stages, so that the most expensive stage costs as little as possible."""
from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import inf, lcm
from typing import TypeAlias

from torchckpt.errors import Fault, called, check
from torchckpt.planning.order.schedule import whole

__all__ = ["balanced", "count_faults"]

_Key: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""The costs of the stages and their numbers of layers, both negated and ascending. A greater key is a more even
partition."""


@called("balanced()")
def balanced(costs: Sequence[float], partitions: int) -> list[int]:
    """The number of layers in each stage, for the partition whose most expensive stage costs least.

    Ties go to the partition whose second most expensive stage costs least, and so on; then to the most even numbers of
    layers, by the same rule; then to the smallest last stages.

    >>> balanced([1, 1, 1, 1, 4], 2), balanced([1, 1, 1, 1, 4], 3), balanced([1, 1, 1, 1, 1], 3)
    ([4, 1], [2, 2, 1], [2, 2, 1])

    Args:
        costs: the cost of each layer, in any one unit.
        partitions: the number of stages. Each stage gets at least one layer.

    Raises:
        ArgumentError: there are fewer layers than stages, there is no stage, or a cost is negative or not finite.

    A dynamic programme over the number of stages. It is exact: the costs are scaled to integers before they are added.
    When the end of the last stage moves forward, its best start moves forward as well (a Monge matrix). So the start is
    found by divide and conquer: n layers in p stages take p n log n steps instead of p n^2.
    """
    check([*count_faults(partitions, len(costs)), *_cost_faults(costs)])
    sums = [0, *accumulate(_integers(costs))]
    layers, spare = len(costs), len(costs) - partitions
    keys: dict[int, _Key] = {end: ((-sums[end],), (-end,)) for end in range(1, spare + 2)}
    starts: list[dict[int, int]] = []
    for stages in range(2, partitions + 1):
        first = stages if stages < partitions else layers
        keys, starts_of_stage = _one_stage_more(keys, sums, first, stages + spare, stages - 1)
        starts.append(starts_of_stage)
    return _counts(starts, layers)


def count_faults(partitions: object, layers: int) -> list[Fault]:
    """Faults of ``partitions`` as a number of stages for ``layers`` layers."""
    if faults := whole("partitions", partitions):
        return faults
    if isinstance(partitions, int) and partitions <= layers:
        return []
    received = f"partitions={partitions}, {layers} layers"
    return [Fault("there are fewer layers than stages", received, f"partitions={max(layers, 1)}, or more layers")]


def _cost_faults(costs: Sequence[object]) -> Iterator[Fault]:
    costs_of = enumerate(costs)
    bad = [(layer, cost) for layer, cost in costs_of if not (isinstance(cost, (int, float)) and 0 <= cost < inf)]
    if bad:
        received = ", ".join(f"{cost!r} of layer {layer}" for layer, cost in bad)
        yield Fault("a cost is not a finite number, 0 or more", received, "costs=[0.5, 2, 0]")


def _integers(costs: Sequence[float]) -> list[int]:
    """The costs as exact integers, in the largest unit that divides all of them."""
    ratios = [cost.as_integer_ratio() for cost in costs]
    scale = lcm(*(denominator for _, denominator in ratios))
    return [numerator * (scale // denominator) for numerator, denominator in ratios]


def _one_stage_more(
    keys: dict[int, _Key], sums: Sequence[int], first: int, last: int, least: int
) -> tuple[dict[int, _Key], dict[int, int]]:
    """For each end from ``first`` to ``last``: the best key, and the start of the last stage, which is >= ``least``.
    ``keys``: for each end, the best key with one stage less. ``sums``: for each layer, the sum of the costs of all
    layers before it."""
    found: dict[int, _Key] = {}
    starts: dict[int, int] = {}
    todo = [(first, last, least, last - 1)]
    while todo:
        low, high, least, most = todo.pop()
        if low > high:
            continue
        end = (low + high) // 2
        possible = range(least, min(most, end - 1) + 1)
        found[end], start = max((_with(keys[start], sums[end] - sums[start], end - start), start) for start in possible)
        starts[end] = start
        todo += [(low, end - 1, least, start), (end + 1, high, start, most)]
    return found, starts


def _with(key: _Key, cost: int, layers: int) -> _Key:
    costs, counts = key
    by_cost, by_count = bisect(costs, -cost), bisect(counts, -layers)
    return ((*costs[:by_cost], -cost, *costs[by_cost:]), (*counts[:by_count], -layers, *counts[by_count:]))


def _counts(starts: Sequence[dict[int, int]], layers: int) -> list[int]:
    """Layers per stage, read from the last stage back: each stage ends where the next one starts."""
    counts = []
    for start in reversed(starts):
        counts.append(layers - start[layers])
        layers = start[layers]
    return [layers, *reversed(counts)]
