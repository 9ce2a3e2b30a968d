"""Took: the bytes and seconds of a step in which every call of the chosen layers was recomputed.

A call that is kept holds some bytes more from the end of its forward until its backward. So the most bytes at a moment
are those that were counted then, and what the kept calls hold that are alive. Backwards are taken to come in
reverse order. Where they do not, a call counts as alive until all later ones are done, so never too few bytes count.
"""
from __future__ import annotations

from collections.abc import Collection, Sequence
from fractions import Fraction
from itertools import accumulate, zip_longest
from operator import sub
from typing import Any, NamedTuple, TypeAlias

from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

__all__ = ["FIRST_BYTES", "Call", "Key", "Took", "most_of", "of_another_size"]

Key: TypeAlias = tuple[tuple[Any, ...], ...]
"""The calls of a step, each as what the model was called with before it, the layer's number, its mode, and what it was
called with itself."""

FIRST_BYTES = 4
"""The place of the first field of a call that is in bytes."""


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
    cached_bytes: float = 0.0
    """What of ``inner_bytes`` others hold until all forwards are done, as autocast holds the weights that it casts."""
    shared_bytes: float = 0.0
    """What of ``cached_bytes`` every call of the layer before it holds as well, if it is kept."""
    late_most: float = 0.0
    """The most bytes while no call runs, those up to this one wait for their backward, and nothing is cached."""


class Took(NamedTuple):
    """A step in which everything was recomputed."""

    calls: tuple[Call, ...]
    """In the order of their forwards."""
    between_most: tuple[float, ...]
    """At place p, the most bytes while the first p calls are alive and none of them runs, before ``late_most``."""

    def held(self, kept: Collection[int]) -> list[float]:
        """At place p, what the kept ones of the first p calls hold."""
        held, layers = [0.0], set()
        for place, call in enumerate(self.calls):
            shared = call.shared_bytes if call.layer in layers else 0.0
            held.append(held[-1] + (call.inner_bytes - shared if place in kept else 0.0))
            layers |= {call.layer} if place in kept else set()
        return held

    def held_early(self, kept: Collection[int]) -> list[float]:
        """Likewise while all forwards run, beside what is cached."""
        more = (call.inner_bytes - call.cached_bytes if place in kept else 0 for place, call in enumerate(self.calls))
        return [*accumulate(more, initial=0.0)]

    def peak_bytes(self, kept: Collection[int]) -> float:
        """The most bytes of a step that keeps these calls."""
        held, early = self.held(kept), self.held_early(kept)
        levels = [between + alive for between, alive in zip(self.between_most, early)]
        for place, call in enumerate(self.calls):
            levels.append(early[place] + (call.kept_most if place in kept else call.forward_most))
            levels.append(held[place] + max(call.backward_most, 0.0 if place in kept else call.replay_most))
            levels.append(held[place + 1] + call.late_most)
        return max(levels)

    def in_one(self, is_kept: bool = False) -> Took:
        """The step for a search that knows of no cache.

        Args:
            is_kept: whether calls are kept, so that all that is cached is theirs. If not, it counts beside what they
                hold, and the step never takes more than this says.
        """
        early = [0.0, *accumulate((call.cached_bytes - call.shared_bytes) * is_kept for call in self.calls)]
        calls = (
            call._replace(
                forward_most=call.forward_most - cached,
                kept_most=call.kept_most - cached,
                cached_bytes=0.0,
                shared_bytes=0.0,
                late_most=0.0,
            )
            for call, cached in zip(self.calls, early)
        )
        late = [0.0, *(call.late_most for call in self.calls)]
        return Took(tuple(calls), tuple(map(max, late, map(sub, self.between_most, early))))


def most_of(tooks: Sequence[Took], factors: Sequence[float]) -> Took:
    """The most that any of several steps with the same layers took, each with its bytes times its factor."""
    caches = {
        tuple((call.cached_bytes * factor, call.shared_bytes * factor) for call in took.calls)
        for took, factor in zip(tooks, factors)
    }
    if len(caches) > 1:  # what is cached in one of them is not in another
        tooks = [took.in_one() for took in tooks]
    calls = []
    for each in zip(*(took.calls for took in tooks)):
        rows: list[list[float]] = []
        for call, factor in zip(each, factors):
            rows.append([*call[1:FIRST_BYTES], *(amount * factor for amount in call[FIRST_BYTES:])])
        calls.append(Call(each[0].layer, *map(max, zip(*rows))))
    between = [[amount * factor for amount in took.between_most] for took, factor in zip(tooks, factors)]
    return Took(tuple(calls), tuple(map(max, zip(*between))))


# a step of another size -----------------------------------------------------------------------------------------------


_TOLERANCE = 0.001
"""An amount is foretold by the straight line through the two that were counted. Beyond them, a parabola through both
and the origin may be above it by this share of the amount. Between them, the line may miss the origin by as much. Where
a call saves more than that at any size, beside what is cached, a parabola would seem a line, too: then only between."""
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
    leaves, structure = tree_flatten(key)
    sizes = [size if size == other_size else wanted * size for size, other_size in zip(leaves, tree_leaves(other_key))]
    if any(isinstance(size, Fraction) and size.denominator > 1 for size in sizes):
        return None
    found = tree_unflatten((int(size) if isinstance(size, Fraction) else size for size in sizes), structure)
    if found[0][: len(first)] != first:
        return None
    ratio, origin = float((wanted - 1) / (apart - 1)), float(-1 / (apart - 1))
    above = float((wanted - 1) * (wanted - apart) / apart)  # of a parabola there, where the line is -1 at the origin

    def line(here: float, there: float) -> float:
        return here + ratio * (there - here)

    def start(here: float, there: float) -> float:
        """What the line says of the size 0."""
        return here + origin * (there - here)

    def misses(here: float, there: float) -> float:
        """How far a parabola through the origin may be above the line, or the line below the origin."""
        return max(0.0, -max(1.0, above) * start(here, there))

    def amount(here: float, there: float) -> float:
        return max(0.0, line(here, there) + misses(here, there))

    def seconds(here: float, there: float) -> float:
        return max(_LEAST_SECONDS * min(here, there), line(here, there))

    each = list(zip(took.calls, other.calls))
    amounts = list(zip(took.between_most, other.between_most))
    for here, there in each:
        amounts += zip(here[FIRST_BYTES:], there[FIRST_BYTES:])
    saved = [(here.inner_bytes - here.cached_bytes, there.inner_bytes - there.cached_bytes) for here, there in each]
    if any(misses(*pair) > _TOLERANCE * max(*pair, line(*pair)) for pair in (*amounts, *saved)):
        return None
    if above > 0 and any(start(*pair) > _TOLERANCE * max(pair) for pair in saved):
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
    pairs = list(zip_longest(tree_leaves(one), tree_leaves(two)))
    sizes = {pair for pair in pairs if pair[0] != pair[1]}
    if not all(isinstance(size, int) and size for pair in sizes for size in pair):
        return None
    ratios = {Fraction(there, here) for here, there in sizes}
    return ratios.pop() if len(ratios) == 1 else None
