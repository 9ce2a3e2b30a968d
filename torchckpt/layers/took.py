"""Took: what a step took in which every call of the chosen layers was recomputed; and one of another size.

A call that is kept holds some bytes more from the end of its forward until its backward. So the most bytes at a moment
are those that were counted then, and what the kept calls hold that are alive. Backwards are taken to come in
reverse order. Where they do not, a call counts as alive until all later ones are done, so never too few bytes count.
"""
from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from fractions import Fraction
from itertools import zip_longest
from typing import Any, NamedTuple, TypeAlias

__all__ = ["Call", "Key", "Took", "most_of", "of_another_size"]

Key: TypeAlias = tuple[tuple[Any, ...], ...]
"""The calls of a step, each as what the model was called with before it, the layer's number, its mode, and what it was
called with itself."""

_TOLERANCE = 0.01
"""The share of an amount by which it may miss a straight line through the origin."""
_LEAST_SECONDS = 0.5
"""Seconds differ from step to step: those that are foretold are at least this share of the fewest that were seen."""
_BYTES = 4
"""Where the bytes of a call begin."""
_FARTHEST = 2
"""Amounts are not foretold for sizes that are more than so many times those that were seen."""
_NEAREST = Fraction(5, 4)
"""Two sizes are so far apart at least. Between nearer ones a rounding of bytes is as much as the difference."""


class Call(NamedTuple):
    """One call of a layer. Fields that end in ``_most`` are peaks, above the bytes that were there before the step."""

    layer: int
    forward_seconds: float
    replay_seconds: float
    backward_seconds: float
    boundary_bytes: float
    """What is held of it if it is recomputed."""
    inner_bytes: float
    """What it holds beside that if it is kept."""
    forward_most: float
    kept_most: float
    """The peak of its forward, if it is kept."""
    forward_left: float
    replay_most: float
    backward_most: float
    backward_left: float
    moved_bytes: float = 0.0
    """What of ``inner_bytes`` can go to a host."""


class Took(NamedTuple):
    """A step in which everything was recomputed."""

    calls: tuple[Call, ...]
    """In the order of their forwards."""
    between_most: tuple[float, ...]
    """At place p, the most bytes while the first p calls are alive and none of them runs."""

    def held(self, kept: Collection[int]) -> list[float]:
        """At place p, what the kept ones of the first p calls hold."""
        held = [0.0]
        for place, call in enumerate(self.calls):
            held.append(held[-1] + (call.inner_bytes if place in kept else 0.0))
        return held

    def peak_bytes(self, kept: Collection[int]) -> float:
        """The most bytes of a step that keeps these calls."""
        held = self.held(kept)
        levels = [between + alive for between, alive in zip(self.between_most, held)]
        for place, call in enumerate(self.calls):
            replayed = call.kept_most if place in kept else max(call.forward_most, call.replay_most)
            levels.append(held[place] + max(call.backward_most, replayed))
        return max(levels)


def most_of(tooks: Sequence[Took], factors: Sequence[float]) -> Took:
    """The most that any of several steps with the same layers took, each with its bytes times its factor."""
    calls = []
    for each in zip(*(took.calls for took in tooks)):
        rows: list[list[float]] = []
        for call, factor in zip(each, factors):
            rows.append([*call[1:_BYTES], *(amount * factor for amount in call[_BYTES:])])
        calls.append(Call(each[0].layer, *map(max, zip(*rows))))
    between = [[amount * factor for amount in took.between_most] for took, factor in zip(tooks, factors)]
    return Took(tuple(calls), tuple(map(max, zip(*between))))


# another size ---------------------------------------------------------------------------------------------------------


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

    def line(amounts: Sequence[float], others: Sequence[float], least: float = 0.0) -> tuple[float, ...]:
        return tuple(max(least * min(pair), pair[0] + ratio * (pair[1] - pair[0])) for pair in zip(amounts, others))

    each = list(zip(took.calls, other.calls))
    amounts = list(zip(took.between_most, other.between_most))
    for here, there in each:
        amounts += zip(here[_BYTES:], there[_BYTES:])
    if any(here + origin * (there - here) < -_TOLERANCE * max(here, there) for here, there in amounts):
        return None
    calls = tuple(
        Call(here.layer, *line(here[1:_BYTES], there[1:_BYTES], _LEAST_SECONDS), *line(here[_BYTES:], there[_BYTES:]))
        for here, there in each
    )
    if wanted < min(Fraction(1), apart):  # what is smaller may be too small to go
        calls = tuple(call._replace(moved_bytes=0.0) for call in calls)
    return found, Took(calls, line(took.between_most, other.between_most))


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
