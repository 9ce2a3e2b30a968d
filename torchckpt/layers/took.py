"""Took: the bytes and seconds of a step in which every call of the chosen layers was recomputed.

A call that is kept holds some bytes more from the end of its forward until its backward. So the most bytes at a moment
are those that were counted then, and what the kept calls hold that are alive. Backwards are taken to come in
reverse order. Where they do not, a call counts as alive until all later ones are done, so never too few bytes count.
"""
from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, TypeAlias

__all__ = ["FIRST_BYTES", "Call", "Key", "Took", "most_of"]

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
            rows.append([*call[1:FIRST_BYTES], *(amount * factor for amount in call[FIRST_BYTES:])])
        calls.append(Call(each[0].layer, *map(max, zip(*rows))))
    between = [[amount * factor for amount in took.between_most] for took, factor in zip(tooks, factors)]
    return Took(tuple(calls), tuple(map(max, zip(*between))))
