"""Orders: building blocks for the order of actions on one rank; every named schedule is made of them."""
from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from torchckpt.model.schedule.action import Action, Kind

__all__ = ["Visit", "in_turn", "phases", "visits"]

Visit: TypeAlias = tuple[int, int]
"""A stage and a micro-batch."""


def visits(stages: Sequence[int], m: int, together: int) -> list[Visit]:
    """Visits in groups of ``together`` micro-batches. A group goes through all ``stages`` before the next starts."""
    groups = [range(first, min(first + together, m)) for first in range(0, m, together)]
    return [(stage, i) for group in groups for stage in stages for i in group]


def in_turn(
    forwards: Sequence[Visit], backwards: Sequence[Visit], ahead: int, weights_behind: int | None = None
) -> Iterator[Action]:
    """``ahead`` forwards, then one forward and one backward in turn, then the remaining backwards.

    Args:
        weights_behind: splits each backward. The weight gradients follow this many backwards after the input gradients;
            0 is right after them. Default: None, whole backwards.
    """
    ahead = min(ahead, len(forwards))
    kind = Kind.BACKWARD if weights_behind is None else Kind.INPUT_GRAD
    behind = len(backwards) if weights_behind is None else weights_behind
    for stage, i in forwards[:ahead]:
        yield Action(stage, Kind.FORWARD, i)
    for turn, (stage, i) in enumerate(backwards):
        if ahead + turn < len(forwards):
            yield Action(forwards[ahead + turn][0], Kind.FORWARD, forwards[ahead + turn][1])
        yield Action(stage, kind, i)
        if turn >= behind:
            yield Action(backwards[turn - behind][0], Kind.WEIGHT_GRAD, backwards[turn - behind][1])
    if weights_behind is not None:
        for stage, i in backwards[max(0, len(backwards) - behind) :]:
            yield Action(stage, Kind.WEIGHT_GRAD, i)


def phases(plan: Iterable[tuple[int, str]], chunks: dict[str, int], m: int) -> Iterator[Action]:
    """Expand a plan such as ``(3, "Fa"), (2, "Fb Ib Wb")``: three forwards of chunk a, then twice a forward of chunk b
    and its split backward.

    Each chunk takes its micro-batches in order. A word is skipped if its chunk has no micro-batch left. ``Wa`` is the
    oldest pending weight gradient of chunk a; ``W`` is the oldest pending one of any chunk.

    Args:
        plan: pairs of a repeat count and the words to repeat.
        chunks: for each lower-case letter, its stage.
    """
    done: Counter[tuple[str, bool]] = Counter()
    pending: deque[tuple[str, int]] = deque()
    for word in (word for times, words in plan for _ in range(times) for word in words.split()):
        kind, chunk = Kind(word[0]), word[1:]
        if kind is Kind.WEIGHT_GRAD:
            oldest = next((entry for entry in pending if not chunk or entry[0] == chunk), None)
            if oldest is not None:
                pending.remove(oldest)
                yield Action(chunks[oldest[0]], kind, oldest[1])
            continue
        i = done[chunk, kind is Kind.FORWARD]
        if i == m:
            continue
        done[chunk, kind is Kind.FORWARD] += 1
        if kind is Kind.INPUT_GRAD:
            pending.append((chunk, i))
        yield Action(chunks[chunk], kind, i)
