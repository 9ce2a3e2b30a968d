"""Away: which calls of a step go to the host of their device, when they leave it, and when they come back.

A call that goes holds its bytes until the forward of a later one begins, and again from the backward of a later one on.
Both are positions, so bytes do not depend on how fast copies are. The first calls go: they are away for the longest
time. How many of them is tried, also without the largest; what is recomputed of the others is then chosen as without a
host.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from torchckpt.layers.took import Took
from torchckpt.measuring.link import MeasuredLink

__all__ = ["Away", "best_away", "with_away"]

_COUNTS = 16
"""So many calls to send are tried, and all fewer ones; and so many shares of all calls. That does not depend on the
host, so more of it is never slower."""
_HALVINGS = 4
"""What goes is tried of all calls, of those that move half as much as the largest at most, of those that move a quarter
and an eighth: the first call may have no room where others have."""


class Away(NamedTuple):
    """The way of one call to the host and back."""

    call: int
    release: int
    """It leaves when the forward of this call begins; if there is no such call, when the first backward begins."""
    issue: int
    """Its copy back is queued when the backward of this call begins."""


def with_away(took: Took, away: Sequence[Away]) -> Took:
    """``took``, where what moves of calls that are away is not there between release and issue."""
    if not away:
        return took
    took = took.in_one()
    calls, between = list(took.calls), list(took.between_most)
    for call, release, issue in away:
        moved = calls[call].moved_bytes
        calls[call] = calls[call]._replace(forward_left=calls[call].forward_left + moved * (call < release))
        for place in range(call + 1, max(release, issue + 1)):
            each = calls[place]
            leaving, coming = moved * (place < release), moved * (place <= issue)
            calls[place] = each._replace(
                forward_most=each.forward_most + leaving,
                kept_most=each.kept_most + leaving,
                forward_left=each.forward_left + leaving,
                backward_left=each.backward_left + coming,
                replay_most=each.replay_most + coming,
                backward_most=each.backward_most + coming,
            )
        for place in range(call + 1, max(release, issue) + 1):
            between[place] += moved
        calls[call] = calls[call]._replace(inner_bytes=calls[call].inner_bytes - moved)
    return Took(tuple(calls), tuple(between))


def best_away(
    took: Took,
    link: MeasuredLink,
    host_bytes: float,
    kept_within: Callable[[Took, frozenset[int]], frozenset[int] | None],
) -> tuple[frozenset[int], tuple[Away, ...]] | None:
    """The calls that are kept on the device, and those that are away, for the shortest step that is found.

    Args:
        host_bytes: what may be on the host.
        kept_within: returns the calls to keep of a step in which some must be, those that are away among them; None if
            nothing fits.

    Returns:
        None if nothing that goes makes the step shorter, or fit.
    """
    # Forwards of a counted step may wait for Python; replays, which run the same, seldom do.
    calls = (call._replace(forward_seconds=call.replay_seconds or call.forward_seconds) for call in took.calls)
    took = took._replace(calls=tuple(calls))
    alone = kept_within(took, frozenset())
    best: tuple[float, frozenset[int], tuple[Away, ...]] | None = None
    if alone is not None:
        best = _times(took, alone, (), link)[2], alone, ()
    going = [place for place, call in enumerate(took.calls) if call.moved_bytes]
    for chosen in dict.fromkeys(_choices(took, going)):  # the first ones of all may be small
        if sum(took.calls[call].moved_bytes for call in chosen) > host_bytes:
            continue
        held = frozenset(range(len(took.calls)))
        for _ in range(2):  # the second time with what is recomputed
            away = _placed(took, held, chosen, link)
            kept = kept_within(with_away(took, away), chosen)
            if kept is None:
                break
            held = kept
            option = _times(took, held, away, link)[2], held - chosen, away
            best = option if best is None or option[0] < best[0] else best
    return None if best is None or not best[2] else best[1:]


def _choices(took: Took, going: Sequence[int]) -> Iterator[frozenset[int]]:
    """Some of the calls that can go: the first ones, of those that move no more than so much."""
    largest, parts = max((took.calls[call].moved_bytes for call in going), default=0.0), range(1, _COUNTS + 1)
    limits = (largest / 2**halving for halving in range(_HALVINGS))
    within = (tuple(call for call in going if took.calls[call].moved_bytes <= limit) for limit in limits)
    for calls in filter(None, dict.fromkeys(within)):
        for count in sorted({*parts[: len(calls)], *(-(-len(calls) * part // _COUNTS) for part in parts)}):
            yield frozenset(calls[:count])


def _placed(took: Took, held: Collection[int], going: Collection[int], link: MeasuredLink) -> tuple[Away, ...]:
    """Where calls leave as soon as they are copied, and come back as late as their copies can begin."""
    forwards, backwards, _ = _times(took, held, (), link)
    ends = _out_ends(took, going, link)
    away, late = [], float("inf")
    for call in sorted(going):
        gone = (place for place in range(call + 1, len(forwards)) if forwards[place] >= ends[call])
        late = min(late, backwards[call]) - took.calls[call].moved_bytes / link.back
        issue = next((place for place in range(call, len(backwards)) if backwards[place] <= late), len(backwards) - 1)
        away.append(Away(call, next(gone, len(forwards)), issue))
    return tuple(away)


def _out_ends(took: Took, going: Collection[int], link: MeasuredLink) -> dict[int, float]:
    """When each copy to the host has ended."""
    now = free = 0.0
    ends = {}
    for place, call in enumerate(took.calls):
        now += call.forward_seconds
        if place in going:
            ends[place] = free = max(free, now) + call.moved_bytes / link.out
    return ends


def _times(
    took: Took, held: Collection[int], away: Sequence[Away], link: MeasuredLink
) -> tuple[list[float], list[float], float]:
    """When the forward and the backward of each call begin, and when the step ends, with what its backwards wait for
    copies. A forward waits for none: a call leaves when its copy has ended. Those that are left when the last forward
    ends are waited for there."""
    *forwards, end = accumulate((call.forward_seconds for call in took.calls), initial=0.0)
    now = max([end, *_out_ends(took, [each.call for each in away], link).values()])
    free, arrivals, backwards = 0.0, {}, [0.0] * len(forwards)
    for place in reversed(range(len(took.calls))):
        call = took.calls[place]
        for each in sorted((each for each in away if each.issue == place), reverse=True):
            arrivals[each.call] = free = max(free, now) + took.calls[each.call].moved_bytes / link.back
        now = backwards[place] = max(now, arrivals.get(place, 0.0))
        now += call.backward_seconds + (0.0 if place in held or place in arrivals else call.replay_seconds)
    return forwards, backwards, now
