"""Foretell: what a step of a size takes that was not counted yet, from two counted ones that differ in one size."""
from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import zip_longest
from typing import Any

from torchckpt.layers.took import FIRST_BYTES, Call, Key, Took

__all__ = ["of_another_size"]

_TOLERANCE = 0.001
"""An amount is foretold by the straight line through the two that were counted. Beyond them, a parabola through both
and the origin may be above it by this share of the amount. Between them, the line may miss the origin by as much."""
_LEAST_SECONDS = 0.5
"""Seconds differ from step to step: those that are foretold are at least this share of the fewest that were seen."""
_FARTHEST = 2
"""Amounts are not foretold for sizes that are more than so many times those that were seen."""
_NEAREST = Fraction(5, 4)
"""Two sizes are so far apart at least. Between nearer ones a rounding of bytes is as much as the difference."""


def of_another_size(one: tuple[Key, Took], two: tuple[Key, Took], first: tuple[Any, ...]) -> tuple[Key, Took] | None:
    """The step whose first call begins with ``first``, of two whose keys differ in one size alone.

    Returns:
        None if ``first`` is not of their kind, is far off, or an amount of bytes is not linear in the size.
    """
    (key, took), (other_key, other) = one, two
    apart, wanted = _ratio(key, other_key), _ratio(key[0][: len(first)], first)
    if apart is None or wanted is None or 1 / _NEAREST < apart < _NEAREST:
        return None
    if wanted > _FARTHEST * max(Fraction(1), apart):
        return None
    pairs = zip(_leaves(key), _leaves(other_key))
    found = _refilled(key, iter([size if size == other_size else wanted * size for size, other_size in pairs]))
    if found is None or found[0][: len(first)] != first:
        return None
    ratio, origin = float((wanted - 1) / (apart - 1)), float(-1 / (apart - 1))
    above = float((wanted - 1) * (wanted - apart) / apart)  # of a parabola there, where the line is -1 at the origin

    def line(here: float, there: float) -> float:
        return here + ratio * (there - here)

    def misses(here: float, there: float) -> float:
        """How far a parabola through the origin may be above the line, or the line below the origin."""
        return max(0.0, -max(1.0, above) * (here + origin * (there - here)))

    def amount(here: float, there: float) -> float:
        return max(0.0, line(here, there) + misses(here, there))

    def seconds(here: float, there: float) -> float:
        return max(_LEAST_SECONDS * min(here, there), line(here, there))

    each = list(zip(took.calls, other.calls))
    amounts = list(zip(took.between_most, other.between_most))
    for here, there in each:
        amounts += zip(here[FIRST_BYTES:], there[FIRST_BYTES:])
    if any(misses(*pair) > _TOLERANCE * max(*pair, line(*pair)) for pair in amounts):
        return None
    calls = tuple(
        Call(
            here.layer,
            *map(seconds, here[1:FIRST_BYTES], there[1:FIRST_BYTES]),
            *map(amount, here[FIRST_BYTES:], there[FIRST_BYTES:]),
        )
        for here, there in each
    )
    if wanted < min(Fraction(1), apart):  # what is smaller may be too small to go
        calls = tuple(call._replace(moved_bytes=0.0) for call in calls)
    return found, Took(calls, tuple(map(amount, took.between_most, other.between_most)))


def _ratio(one: Any, two: Any) -> Fraction | None:
    """The ratio of the size that differs in two keys; None if more than one size differs."""
    pairs = list(zip_longest(_leaves(one), _leaves(two)))
    sizes = {pair for pair in pairs if pair[0] != pair[1]}
    if not all(isinstance(size, int) and size for pair in sizes for size in pair):
        return None
    ratios = {Fraction(there, here) for here, there in sizes}
    return ratios.pop() if len(ratios) == 1 else None


def _leaves(tree: Any) -> Iterator[Any]:
    """All that is in nested tuples, in order."""
    for one in tree:
        if isinstance(one, tuple):
            yield from _leaves(one)
        else:
            yield one


def _refilled(tree: Any, leaves: Iterator[Any]) -> Any:
    """The nested tuples with other ``leaves``; None if one of these is no whole number."""
    if not isinstance(tree, tuple):
        leaf = next(leaves)
        return leaf if not isinstance(leaf, Fraction) else int(leaf) if leaf.denominator == 1 else None
    parts = [_refilled(one, leaves) for one in tree]
    return None if None in parts else tuple(parts)
