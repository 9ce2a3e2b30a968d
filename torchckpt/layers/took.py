"""Took: what a step took in which every call of the chosen layers was recomputed, call by call; and at another size.

A call that is kept holds some bytes more from the end of its forward until its backward. So the most bytes at a moment
are those that were counted then, and what the kept calls hold that are alive. Calls are alive as on a stack: those
before one are alive while it runs. Where backwards come in another order, a call counts as alive until no later one
is: this is never too little.
"""
from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from statistics import median
from typing import Any, NamedTuple

__all__ = ["Call", "Key", "Kind", "Moment", "Took", "key_at", "sizes_apart", "took_of"]

Key = tuple[tuple[Any, ...], ...]
"""The calls of a step, each as what the model was called with before it, the layer's number, its mode, and what it was
called with itself."""

_TOLERANCE = 0.01
"""The share of an amount by which it may miss a straight line through the origin."""
_FARTHEST = 2
"""Amounts are not foretold for sizes that are more than so many times those that were seen."""


class Kind(Enum):
    """What begins at a moment of a step."""

    STEP = "step"
    FORWARD = "forward"
    AFTER = "after a forward"
    REPLAY = "replay"
    BACKWARD = "backward"
    END = "end of a backward pass"


class Moment(NamedTuple):
    kind: Kind
    call: int
    """The number of the call in its step; -1 of a step or of its end."""
    highest_bytes: int
    """The most bytes since the moment before."""
    left_bytes: int
    seconds: float


class Call(NamedTuple):
    """One call of a layer. ``most`` is the most bytes above those that were there before the step."""

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
    """That of its forward, if it is kept."""
    forward_left: float
    replay_most: float
    backward_most: float
    backward_left: float


@dataclass(frozen=True)
class Took:
    """A step in which everything was recomputed."""

    calls: tuple[Call, ...]
    """In the order of their forwards."""
    between_most: tuple[float, ...]
    """At place p, the most bytes while the first p calls are alive and none of them runs."""
    backwards: tuple[int, ...]
    """The calls in the order of their backwards."""

    def at(self, other: Took, ratio: Fraction, origin: Fraction) -> Took | None:
        """The step of a size that is so far from this step's to the ``other``'s, where amounts are straight lines.

        Args:
            ratio: 0 is this step, 1 the other.
            origin: the same of the size 0. What is less than nothing there grows faster than the size.

        Returns:
            None if the steps are not alike, or an amount is not linear.
        """
        if [call.layer for call in self.calls] != [call.layer for call in other.calls]:
            return None
        pairs = [(*one[1:], *two[1:]) for one, two in zip(self.calls, other.calls)]
        amounts = [pair[place :: len(pair) // 2] for pair in pairs for place in range(3, len(pair) // 2)]
        amounts += list(zip(self.between_most, other.between_most))
        far = float(origin)
        if any(one + far * (two - one) < -_TOLERANCE * max(one, two) for one, two in amounts):
            return None
        calls = tuple(
            Call(one.layer, *(_line(*pair, ratio) for pair in zip(one[1:], two[1:])))
            for one, two in zip(self.calls, other.calls)
        )
        between = tuple(_line(one, two, ratio) for one, two in zip(self.between_most, other.between_most))
        return Took(calls, between, self.backwards)


def _line(one: float, two: float, ratio: Fraction) -> float:
    return max(0.0, one + float(ratio) * (two - one))


# of a counted step ----------------------------------------------------------------------------------------------------


def took_of(moments: Sequence[Moment], key: Key, inner: Mapping[int, int], boundary: Mapping[int, int]) -> Took:
    """What a step took, of its moments. The calls that were never replayed are never worth keeping."""
    calls = range(len(key))
    begin = {(moment.kind, moment.call): place for place, moment in reversed(list(enumerate(moments)))}
    ends = [-place for place in _alive_until(begin, len(key))]
    after = dict(enumerate(moments[1:]))  # the moment that ends what begins at a place
    between = [0.0] * (len(key) + 1)
    forwards = [place for place, moment in enumerate(moments) if moment.kind is Kind.AFTER]
    for place, end in after.items():
        kind, call, *_ = moments[place]
        alive = min(bisect_right(forwards, place), bisect_left(ends, -place))
        if kind in (Kind.STEP, Kind.AFTER) or (kind in (Kind.REPLAY, Kind.BACKWARD) and alive > call):
            between[alive] = max(between[alive], end.highest_bytes)

    def part(kind: Kind, call: int) -> tuple[Moment, Moment] | None:
        place = begin.get((kind, call))
        return None if place is None or place not in after else (moments[place], after[place])

    replays = {call: pair for call in calls if (pair := part(Kind.REPLAY, call))}
    seconds = _alike(key, inner, {call: end.seconds - start.seconds for call, (start, end) in replays.items()})
    found = []
    for call in calls:
        pair = part(Kind.FORWARD, call)
        start, end = pair if pair else (moments[0], moments[0])
        rises = 0
        if call in replays:
            rises = replays[call][1].highest_bytes - replays[call][0].left_bytes
        backward = part(Kind.BACKWARD, call)
        found.append(Call(
            key[call][1],
            end.seconds - start.seconds,
            seconds.get(call, 0.0),
            backward[1].seconds - backward[0].seconds if backward else 0.0,
            boundary.get(call, 0),
            inner.get(call, 0),
            end.highest_bytes,
            max(end.highest_bytes, end.left_bytes + rises),
            end.left_bytes,
            replays[call][1].highest_bytes if call in replays else 0,
            backward[1].highest_bytes if backward else 0,
            backward[1].left_bytes if backward else 0,
        ))
    order = sorted(replays, key=lambda call: begin[Kind.REPLAY, call])
    return Took(tuple(found), tuple(between), tuple(order))


def _alive_until(begin: Mapping[tuple[Kind, int], int], calls: int) -> list[int]:
    """For each call the place of the moment until which it counts as alive, if it is kept."""
    until, last = [0] * calls, -1
    for call in reversed(range(calls)):
        last = max(last, begin.get((Kind.REPLAY, call), -1))
        until[call] = last
    return until


def _alike(key: Key, inner: Mapping[int, int], seconds: Mapping[int, float]) -> dict[int, float]:
    """The seconds of each call: the median of those that were called with the same shapes, and save as much."""
    groups: dict[Any, list[float]] = {}
    for call, amount in seconds.items():
        groups.setdefault((key[call][2:], inner.get(call)), []).append(amount)
    return {call: median(groups[key[call][2:], inner.get(call)]) for call in seconds}


# of another size ------------------------------------------------------------------------------------------------------


def sizes_apart(one: Key, two: Key) -> Fraction | None:
    """The ratio of the sizes that differ in two keys; None if the keys differ in more than the one size."""
    ratios = set()
    for first, second in zip(_numbers(one), _numbers(two)):
        if first != second:
            if not (isinstance(first, int) and isinstance(second, int) and first and second):
                return None
            ratios.add(Fraction(second, first))
    return ratios.pop() if len(ratios) == 1 and len(_numbers(one)) == len(_numbers(two)) else None


def key_at(one: Key, two: Key, first: tuple[Any, ...]) -> tuple[Key, Fraction, Fraction] | None:
    """The key whose first call begins with ``first``, of the size of which ``one`` and ``two`` have others.

    Returns:
        The key, how far it is on the way from ``one`` to ``two``, and how far the size 0 is. None if there is none.
    """
    start = (one[0][: len(first)],)
    apart, wanted = sizes_apart(one, two), sizes_apart(start, (first,))
    if apart is None or wanted is None or not wanted <= _FARTHEST * max(1, apart):
        return None
    ratio, origin = (wanted - 1) / (apart - 1), -1 / (apart - 1)
    pairs = zip(_numbers(one), _numbers(two))
    key: Any = _refilled(one, iter([size if size == other else wanted * size for size, other in pairs]))
    return (key, ratio, origin) if key is not None and key[0][: len(first)] == first else None


def _numbers(tree: Any) -> list[Any]:
    """All that is in nested tuples, in order."""
    return [leaf for one in tree for leaf in (_numbers(one) if isinstance(one, tuple) else [one])]


def _refilled(tree: Any, leaves: Iterator[Any]) -> Any:
    """The nested tuples with other ``leaves``; None if one of these is no whole number."""
    if not isinstance(tree, tuple):
        leaf = next(leaves)
        return leaf if not isinstance(leaf, Fraction) else int(leaf) if leaf.denominator == 1 else None
    parts = [_refilled(one, leaves) for one in tree]
    return None if None in parts else tuple(parts)
