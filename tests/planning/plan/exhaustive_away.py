"""Exhaustive: the shortest step of a tiny 1F1B pipeline with a host, from everything that its ranks may do.

Blocks are alike: forward 1 second, backward 2, replay 1, a copy ``k`` each way, one byte, of which nothing stays. Every
second each rank is in a state. At a boundary it releases what has left, and issues any copies back; it waits as long as
it likes, and may do the same behind each release, until it computes. All states of all ranks are followed, second by
second. Of blocks that are alike, the one that is used first comes back, or is replayed, first.
"""
from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

NEW, HERE, LEAVING, GONE, BACK, DROPPED, DONE = range(7)


class Rank(NamedTuple):
    """A rank between two seconds."""

    states: tuple[int, ...]
    """Of each block of each micro-batch."""
    at: int = 0
    """Its next block in the order of its forwards and backwards."""
    left: int = 0
    """The seconds that its compute still takes."""
    replays: int = -1
    """The block that it replays."""
    issues: bool = True
    """Whether it has come to a boundary just now."""
    out: tuple[int, ...] = ()
    """The seconds until each copy in the queue ends, and its block."""
    back: tuple[int, ...] = ()


class Pipeline:
    def __init__(self, p: int, m: int, n: int, budget: int, k: int) -> None:
        self.n, self.budget, self.k = n, budget, k
        self.orders = [self.order(p, m, rank) for rank in range(p)]
        self.tails = [self.tail(p, order, rank) for rank, order in enumerate(self.orders)]
        self.first = tuple(Rank((NEW,) * m * n) for _ in range(p))

    def order(self, p: int, m: int, rank: int) -> list[tuple[bool, int]]:
        """Whether it is a forward, and the block."""
        ahead = min(p - rank, m)
        actions = [(True, i) for i in range(ahead)]
        for i in range(m):
            actions += [(False, i), *([(True, i + ahead)] if i + ahead < m else [])]
        both = range(self.n)[::-1], range(self.n)
        return [(is_forward, i * self.n + block) for is_forward, i in actions for block in both[is_forward]]

    def tail(self, p: int, order: list[tuple[bool, int]], rank: int) -> list[int]:
        """The least seconds from the start of each block to the end of the step."""
        tails = [0]
        for is_forward, block in reversed(order):
            least = tails[-1] + (1 if is_forward else 2)
            if is_forward and block % self.n == self.n - 1:
                least = max(least, 1 + (p - 1 - rank) * self.n + (p - rank) * 2 * self.n)
            if not is_forward and block % self.n == 0:
                least = max(least, 2 + rank * 2 * self.n)
            tails.append(least)
        return tails[::-1]

    def ready(self, ranks: tuple[Rank, ...], number: int) -> bool:
        """Whether the message for the next block is there."""
        is_forward, block = self.orders[number][ranks[number].at]
        inner = block % self.n != (0 if is_forward else self.n - 1)
        other = number + (-1 if is_forward else 1)
        if inner or not 0 <= other < len(ranks):
            return True
        last = block + self.n - 1 if is_forward else block - self.n + 1
        return self.orders[other].index((is_forward, last)) < ranks[other].at

    def shortest(self, below: int) -> int | None:
        """The seconds of the shortest step of less than ``below``; None if there is none."""
        layer, now = {self.first}, 0
        while layer:
            if any(all(rank.at == len(order) for rank, order in zip(ranks, self.orders)) for ranks in layer):
                return now
            after = set()
            for ranks in layer:
                each = [self.following(ranks, number, below - now) for number in range(len(ranks))]
                after.update(product(*each))
            layer, now = after, now + 1
        return None

    def following(self, ranks: tuple[Rank, ...], number: int, below: int) -> set[Rank]:
        choices = self.choices(ranks, number)
        return {self.tick(choice, number) for choice in choices if self.least(choice, number) < below}

    def least(self, rank: Rank, number: int) -> int:
        tails = self.tails[number]
        if rank.left and rank.replays < 0:
            whole = 1 if self.orders[number][rank.at][0] else 2
            return tails[rank.at] - whole + rank.left
        return tails[rank.at] + rank.left

    def used(self, states: tuple[int, ...]) -> int:
        return sum(state in (HERE, LEAVING, BACK) for state in states)

    def choices(self, ranks: tuple[Rank, ...], number: int) -> Iterator[Rank]:
        """What a rank may begin in this second."""
        rank, order = ranks[number], self.orders[number]
        if rank.left or rank.at == len(order):
            yield rank
            return
        ended = {block for end, block in pairs(rank.out) if end <= 0}
        states = tuple(GONE if block in ended else state for block, state in enumerate(rank.states))
        left = [(end, block) for end, block in pairs(rank.out) if end > 0]
        here = rank._replace(states=states, out=flat(left), issues=False)
        for issued in self.issued(here, order) if rank.issues or ended else (here,):
            yield issued
            yield from self.computes(issued, order, self.ready(ranks, number))

    def issued(self, rank: Rank, order: list[tuple[bool, int]]) -> Iterator[Rank]:
        """Any number of copies back, of what is used first."""
        yield rank
        gone = [block for is_forward, block in order[rank.at :] if not is_forward and rank.states[block] == GONE]
        for block in gone:
            states = with_state(rank.states, block, BACK)
            if self.used(rank.states) + 1 > self.budget:
                return
            begin = max([0, *(end for end, _ in pairs(rank.back))])
            rank = rank._replace(states=states, back=(*rank.back, begin + self.k, block))
            yield rank

    def computes(self, rank: Rank, order: list[tuple[bool, int]], is_ready: bool) -> Iterator[Rank]:
        is_forward, block = order[rank.at]
        room = self.used(rank.states) < self.budget
        states = rank.states
        between = block % self.n == (0 if is_forward else self.n - 1)
        dropped = [other for forth, other in order[rank.at :] if not forth and states[other] == DROPPED]
        for other in dropped[:1]:
            if room and (between or (not is_forward and other == block)):
                yield rank._replace(states=with_state(states, other, HERE), left=1, replays=other)
        if not is_ready:
            return
        if is_forward:
            for state in (HERE, LEAVING, DROPPED):
                if room or (state == DROPPED and self.used(states) <= self.budget):
                    yield rank._replace(states=with_state(states, block, state), left=1)
        elif states[block] == HERE:
            yield rank._replace(states=states, left=2)

    def tick(self, rank: Rank, number: int) -> Rank:
        states, block = rank.states, -1
        if rank.left == 1:
            block = self.orders[number][rank.at][1] if rank.replays < 0 else rank.replays
        back = [(end - 1, other) for end, other in pairs(rank.back)]
        for _, other in back[: sum(end <= 0 for end, _ in back)]:
            states = with_state(states, other, HERE)
        out = [(max(0, end - 1), other) for end, other in pairs(rank.out)]
        back = [(end, other) for end, other in back if end > 0]
        rank = rank._replace(states=states, left=max(0, rank.left - 1), out=flat(out), back=flat(back))
        if block < 0:
            return rank
        if rank.replays >= 0:
            return rank._replace(replays=-1, issues=True)
        if states[block] == LEAVING:
            out.append((max([0, *(end for end, _ in out)]) + self.k, block))
        elif not self.orders[number][rank.at][0]:
            states = with_state(states, block, DONE)
        return rank._replace(states=states, at=rank.at + 1, issues=True, out=flat(out))


def pairs(queue: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(zip(queue[::2], queue[1::2]))


def flat(queue: list[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(value for pair in queue for value in pair)


def with_state(states: tuple[int, ...], block: int, state: int) -> tuple[int, ...]:
    return (*states[:block], state, *states[block + 1 :])
