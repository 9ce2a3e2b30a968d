"""Orders: building blocks for the order of actions on one rank; every named schedule is made of them."""
from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from torchckpt.errors import Fault, brief
from torchckpt.planning.order.schedule import Action, Kind, Schedule

__all__ = ["Visit", "at_least", "free_to_keep", "in_turn", "nearest", "phases", "visits", "whole"]

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


def whole(name: str, value: object) -> list[Fault]:
    """A fault unless ``value`` is an integer of 1 or more."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return []
    return [Fault(f"{name} is not an integer >= 1", f"{name}={brief(value)}", f"{name}=1")]


def at_least(schedule: str, name: str, value: int, other_name: str, other: int, factor: int = 1) -> list[Fault]:
    """Faults unless both are integers of 1 or more, and ``value >= factor * other``."""
    faults = [*whole(other_name, other), *whole(name, value)]
    if faults or value >= factor * other:
        return faults
    times = f"{factor} " if factor > 1 else ""
    received = f"{name}={value}, {other_name}={other}"
    works = f"{name}={factor * other}, the nearest"
    return [Fault(f"{name} is too small: {schedule} needs {name} >= {times}{other_name}", received, works)]


def nearest(value: int, works: Callable[[int], bool]) -> int:
    """The number nearest to ``value`` for which ``works`` is true; of two equally near numbers, the larger."""
    return next(n for distance in range(value) for n in (value + distance, value - distance) if works(n))


_MADE, _USED, _FREED = range(3)
_MOMENTS = {
    Kind.FORWARD: (_MADE,),
    Kind.BACKWARD: (_USED, _FREED),
    Kind.INPUT_GRAD: (_USED,),
    Kind.WEIGHT_GRAD: (_FREED,),
}


def free_to_keep(schedule: Schedule) -> frozenset[Visit]:
    """The (stage, micro-batch) pairs that can be kept without a higher peak than if everything were recomputed.

    In 1F1B these are all micro-batches of the last stage, which holds one at a time anyway. On the other stages of
    1F1B, and in GPipe, it is the micro-batch whose backward runs first.

    >>> sorted(free_to_keep(one_f_one_b(2, 3)))
    [(0, 0), (1, 0), (1, 1), (1, 2)]

    The count assumes that a micro-batch is recomputed right before its backward. Its boundary is then alive from the
    forward to the recompute, and its activations, the boundary among them, from there to the end of the backward.
    Activations that are kept are alive from the forward on. All micro-batches are taken to be of equal size, and
    boundaries to be small: they only decide which of two moments with equally many live micro-batches is higher.
    """
    return frozenset(visit for order in schedule.ranks for visit in _free_on_a_rank(order))


def _free_on_a_rank(order: Sequence[Action]) -> list[Visit]:
    spans: dict[Visit, list[int]] = {}
    for place, (stage, kind, i) in enumerate(order):
        for moment in _MOMENTS.get(kind, ()):
            spans.setdefault((stage, i), [0, 0, 0])[moment] = place
    saved = len(order) + 1  # a micro-batch outweighs all boundaries, each of which counts 1
    alive = [0] * len(order)
    for made, used, freed in spans.values():
        _add(1, alive, made, used - 1)
        _add(saved, alive, used, freed)
    peak = max(alive, default=0)
    free = []
    for visit, (made, used, _) in sorted(spans.items(), key=lambda item: item[1][_USED]):
        if max(alive[made:used], default=0) + saved - 1 <= peak:
            _add(saved - 1, alive, made, used - 1)
            free.append(visit)
    return free


def _add(amount: int, alive: list[int], first: int, last: int) -> None:
    for place in range(first, last + 1):
        alive[place] += amount
