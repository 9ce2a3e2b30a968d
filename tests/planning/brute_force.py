"""Brute force: the fastest of all orders of two stages, found by trying them. It shares no code with the simulator.

A state is how far every micro-batch is on both stages. From each state, each stage may go on with any micro-batch that
is ready. Many orders lead to the same state, at different times; of those, one that is late in everything, compared
with another, is dropped. Micro-batches are alike, so which is which does not matter. Messages do not queue here, which
can only make an order faster.
"""
from __future__ import annotations

from typing import NamedTuple

FIRST, LAST = 0, 1


class MicroBatch(NamedTuple):
    """What has been done with it on each stage; when its activation is at the last stage, its gradient at the first."""

    done: tuple[int, int] = (0, 0)
    activation: float = 0.0
    gradient: float = 0.0


def fastest(costs, tc, m, split, recomputing):
    """The seconds of the fastest step.

    Args:
        costs: of both stages.
        recomputing: per stage.
    """
    chains = [_chain(own, split, recomputed) for own, recomputed in zip(costs, recomputing)]
    level = [((0.0, 0.0), (MicroBatch(),) * m)]
    for _ in range(m * (len(chains[FIRST]) + len(chains[LAST]))):
        following = {}
        for clocks, batches in level:
            for moved in _moves(clocks, batches, chains, tc):
                _keep(following.setdefault(tuple(batch.done for batch in moved[1]), []), moved)
        level = [moment for moments in following.values() for moment in moments]
    return min(max(clocks) for clocks, _ in level)


def _chain(own, split, recomputed):
    """What a stage does to one micro-batch, in order, and how long it takes."""
    halves = [("I", own.input_grad_seconds), ("W", own.weight_grad_seconds)]
    whole = [("B", own.input_grad_seconds + own.weight_grad_seconds)]
    recompute = [("R", own.recompute_seconds)] if recomputed else []
    return [("F", own.forward_seconds), *recompute, *(halves if split else whole)]


def _moves(clocks, batches, chains, tc):
    for place, batch in enumerate(batches):
        if place and batch == batches[place - 1]:
            continue
        for stage in (FIRST, LAST):
            if batch.done[stage] == len(chains[stage]):
                continue
            kind, seconds = chains[stage][batch.done[stage]]
            if stage == LAST and kind == "F" and batch.done[FIRST] == 0:
                continue
            if stage == FIRST and kind in "BI" and not _went_back(chains[LAST], batch.done[LAST]):
                continue
            yield _move(clocks, batches, place, stage, kind, seconds, tc)


def _move(clocks, batches, place, stage, kind, seconds, tc):
    done, activation, gradient = batches[place]
    begin = clocks[stage]
    if stage == LAST and kind == "F":
        begin, activation = max(begin, activation), 0.0
    if stage == FIRST and kind in "BI":
        begin, gradient = max(begin, gradient), 0.0
    end = begin + seconds
    if stage == FIRST and kind == "F":
        activation = end + tc
    if stage == LAST and kind in "BI":
        gradient = end + tc
    batch = MicroBatch(_put(done, stage, done[stage] + 1), activation, gradient)
    return _put(clocks, stage, end), tuple(sorted(_put(batches, place, batch)))


def _went_back(chain, done):
    return any(kind in "BI" for kind, _ in chain[:done])


def _put(values, place, value):
    return (*values[:place], value, *values[place + 1 :])


def _times(moment):
    clocks, batches = moment
    return [*clocks, *(time for batch in batches for time in batch[1:])]


def _keep(found, moment):
    """Among ``found``, unless one of them is as early in everything; without those that ``moment`` is as early as."""
    own = _times(moment)
    if any(all(theirs <= ours for theirs, ours in zip(_times(other), own)) for other in found):
        return
    found[:] = [other for other in found if not all(ours <= theirs for ours, theirs in zip(own, _times(other)))]
    found.append(moment)
