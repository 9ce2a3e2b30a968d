"""Window: consecutive actions of one rank, and the least recomputation in them that every plan needs.

What of a visit is there when its backward starts, kept or recomputed before, has to fit beside what is there of others.
At the start of a window everything may be there that fits at that moment, however it came to be there; from then on,
what does not fit any more is lost, and has to be recomputed inside the window or later, before or in its own backward.
To lose what is used last loses least, for every end of the window at once (Belady 1966).

That is exact for equal blocks. Blocks of unequal worth are relaxed twice, and the larger bound of the two counts:

* *layers*: the seconds of a block are its bytes times its density, seconds for a byte. For each density that occurs,
  the least bytes that are lost of blocks at least as dense, counted with the density's excess over the one before. A
  capacity counts only as far as some set of blocks fills it.
* *groups*, where few blocks are alive: of visits that are alive at the same moment, the most seconds that fit at once.
"""
from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from itertools import combinations
from typing import TypeAlias

from torchckpt.model.plan.stage.holding import Holdings, density, use_bytes
from torchckpt.model.plan.stage.lane import FORWARD, Lane

__all__ = ["Capacity", "Window"]

_Front: TypeAlias = list[tuple[float, float]]
"""Bytes and the most seconds that they can hold; both increase."""

_CLASSES = 8
_SUMS = 600
"""Of a set of blocks; of more, a capacity counts as it is."""
_FEW_BLOCKS, _FEW_ALIVE = 8, 24
"""Of a stage, and of a rank at once, so that its groups are looked at."""
_POINTS = 48
"""Of a front; of more, neighbours are merged into one that is better than both."""
_TINY = 1e-9


class Capacity:
    """The bytes that are free on a rank at each position of its order, after those that every plan needs there."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        own = list(dict.fromkeys(lane.holdings))
        blocks = [block for holdings in own for block in holdings.stage.blocks if block.freed_bytes]
        self.floors = _floors([density(block.recompute_seconds, block.freed_bytes) for block in blocks])
        self.gains = [high - low for low, high in zip([0.0, *self.floors], self.floors)]
        self.is_equal = len({(block.freed_bytes, block.recompute_seconds) for block in blocks}) <= 1
        self.least = {holdings: holdings.without(range(holdings.blocks)) for holdings in own}
        self.beside = {holdings: least.use_bytes[0] - least.held_bytes for holdings, least in self.least.items()}
        """At a backward, at least, more than boundaries and what is fixed."""
        self._alive_at(own)
        self._made: dict[tuple[int, int], list[float] | float | None] = {}
        self._many: dict[int, list[dict[Holdings, int]]] = {}
        """By layer, counts that have too many sums; more have, too."""
        self._allowed: dict[tuple[Holdings, float], list[tuple[float, float, float, list[float]]]] = {}
        self._options: dict[tuple[Holdings, float, bool], _Front] = {}
        few = max((len(holdings.stage.blocks) for holdings in own), default=0) <= _FEW_BLOCKS
        self.has_groups = not self.is_equal and few and self.most_alive <= _FEW_ALIVE
        layers, visits = range(len(self.gains)), range(len(lane.visits))
        self.totals = [{holdings: sum(self._sizes(layer, holdings)) for holdings in own} for layer in layers]
        self.full = [[self._full(visit, layer) for visit in visits] for layer in layers]
        """By layer and visit, the bytes that can be there at the backward."""

    def _alive_at(self, own: Sequence[Holdings]) -> None:
        """At each place, the bytes that are left, and which visits are alive, counted by stage."""
        lane = self.lane
        counts, used_bytes = dict.fromkeys(own, 0), 0.0
        self.left_bytes: list[float] = []
        self.alive: list[int] = []
        """A number for each set of counts."""
        self.counts: list[dict[Holdings, int]] = []
        numbers: dict[tuple[int, ...], int] = {}
        for kind, visit in zip(lane.kinds, lane.visit_at):
            holdings = lane.holdings[visit]
            if kind == FORWARD:
                counts[holdings] += 1
                used_bytes += self.least[holdings].held_bytes
            self.left_bytes.append(lane.budget_bytes - used_bytes)
            number = numbers.setdefault(tuple(counts.values()), len(numbers))
            if number == len(self.counts):
                self.counts.append(dict(counts))
            self.alive.append(number)
            if kind != FORWARD:
                counts[holdings] -= 1
                used_bytes -= self.least[holdings].held_bytes
        self.most_alive = max((sum(h.blocks * n for h, n in one.items()) for one in self.counts), default=0)

    def _sizes(self, layer: int, holdings: Holdings) -> list[float]:
        """Of blocks of a stage that belong to a layer, the bytes."""
        floor = self.floors[layer] * (1 - _TINY)
        blocks = [block for block in holdings.stage.blocks if block.freed_bytes]
        return [one.freed_bytes for one in blocks if density(one.recompute_seconds, one.freed_bytes) >= floor]

    def _full(self, visit: int, layer: int) -> float:
        holdings = self.lane.holdings[visit]
        if self.is_equal or holdings.blocks > _FEW_BLOCKS:
            return self.totals[layer][holdings]
        left = self.left_bytes[self.lane.used[visit]]
        return max((sizes[layer] for _, _, _, sizes in self.allowed(holdings, left)), default=0.0)

    def rounded(self, layer: int, place: int, amount_bytes: float) -> float:
        """The most of ``amount_bytes`` that blocks of the visits alive at ``place`` can fill."""
        if amount_bytes <= 0.0:
            return 0.0
        key = layer, self.alive[place]
        if key not in self._made:
            self._made[key] = self._sums(layer, self.counts[self.alive[place]])
        sums = self._made[key]
        if sums is None:
            return amount_bytes
        if isinstance(sums, list):
            return min(amount_bytes, sums[bisect_right(sums, amount_bytes * (1 + _TINY)) - 1])
        return int(amount_bytes / sums + _TINY) * sums  # whose sizes may be whole numbers

    def _sums(self, layer: int, counts: dict[Holdings, int]) -> list[float] | float | None:
        """Of all sets of blocks; of equal ones, the size of one; None of too many."""
        many = self._many.setdefault(layer, [])
        if any(all(counts[holdings] >= few for holdings, few in one.items()) for one in many):
            return None
        sizes = [size for holdings, count in counts.items() for size in self._sizes(layer, holdings) * count]
        if sizes and max(sizes) - min(sizes) <= _TINY * max(sizes):
            return max(sizes)
        found = {0.0}
        for size in sizes:
            found |= {one + size for one in found}
            if len(found) > _SUMS:
                many.append(counts)
                return None
        return sorted(found)

    def allowed(self, holdings: Holdings, left_bytes: float) -> list[tuple[float, float, float, list[float]]]:
        """Of each set of blocks that can be there when the backward starts: its bytes, those at the highest point of
        the backward, its seconds, and its bytes by layer."""
        key = holdings, round(left_bytes, 9)
        if key not in self._allowed:
            self._allowed[key] = [one for one in self._all_sets(holdings) if one[1] <= left_bytes * (1 + _TINY)]
        return self._allowed[key]

    def options(self, holdings: Holdings, left_bytes: float, starts: bool) -> _Front:
        """Of the sets that can be there when the backward starts: bytes, at its highest point or not, and seconds."""
        key = holdings, round(left_bytes, 9), starts
        if key not in self._options:
            sets = self.allowed(holdings, left_bytes)
            self._options[key] = _front([(high if starts else freed, saved) for freed, high, saved, _ in sets])
        return self._options[key]

    def _all_sets(self, holdings: Holdings) -> list[tuple[float, float, float, list[float]]]:
        key = holdings, -1.0
        if key not in self._allowed:
            stage, every, found = holdings.stage, range(holdings.blocks), []
            least = self.least[holdings].held_bytes
            floors = [floor * (1 - _TINY) for floor in self.floors]
            for there in (chosen for count in range(len(every) + 1) for chosen in combinations(every, count)):
                blocks = [stage.blocks[at] for at in there]
                layers = [
                    sum(b.freed_bytes for b in blocks if density(b.recompute_seconds, b.freed_bytes) >= floor)
                    for floor in floors
                ]
                highest = use_bytes(stage, set(every) - set(there)) - least
                freed = sum(block.freed_bytes for block in blocks)
                found.append((freed, highest, sum(block.recompute_seconds for block in blocks), layers))
            self._allowed[key] = found
        return self._allowed[key]

    def deferrable_seconds(self, place: int, visit: int) -> float:
        """Of weight gradients that can wait while the action at ``place``, of ``visit``, is done."""
        lane = self.lane
        left = self.left_bytes[place]
        if lane.kinds[place] != FORWARD:
            left += self.least[lane.holdings[visit]].held_bytes
        kinds = dict.fromkeys(own for own, split in zip(lane.holdings, lane.is_split) if split)
        return _most([(own.full_bytes, own.weight_grad_seconds) for own in kinds], left)


def _floors(densities: Sequence[float]) -> list[float]:
    """Ascending; of too many, some, with those between counted as the next lower."""
    found: list[float] = []
    for one in sorted(densities):
        if not found or one > found[-1] * (1 + _TINY):
            found.append(one)
    if len(found) > _CLASSES:
        found = [found[len(found) * at // _CLASSES] for at in range(_CLASSES)]
    return found


def _most(kinds: Sequence[tuple[float, float]], left_bytes: float) -> float:
    """The most seconds of things of these (bytes, seconds) that fit."""
    if left_bytes <= 0.0 or not kinds:
        return 0.0
    if len(kinds) > 2:
        return left_bytes * max(seconds / size for size, seconds in kinds)
    size, seconds = kinds[0]
    most = int(left_bytes / size + _TINY)
    if len(kinds) == 1:
        return most * seconds
    return max(count * seconds + _most(kinds[1:], left_bytes - count * size) for count in range(most + 1))


class Window:
    """From the place at which it was opened up to the last one that it has passed."""

    __slots__ = ("anchor", "capacity", "front", "group_before", "group_seconds", "group_total", "kept", "kept_bytes",
                 "layer_seconds", "order", "plain_seconds", "wait_seconds")

    def __init__(self, capacity: Capacity, place: int, start_seconds: float) -> None:
        lane = capacity.lane
        self.capacity = capacity
        self.plain_seconds = start_seconds
        """When the window starts at the soonest, and its forwards and backwards."""
        self.layer_seconds = self.group_seconds = 0.0
        """The least seconds of recomputation in the window."""
        self.wait_seconds = 0.0
        """Of weight gradients of backwards in the window."""
        alive = [visit for visit, used in enumerate(lane.used) if lane.made[visit] < place <= used]
        self.kept = [{visit: full[visit] for visit in alive} for full in capacity.full]
        self.order = [[*alive] for _ in capacity.full]
        """Visits of which something is there, in the order of their backwards."""
        self.kept_bytes = [sum(kept.values()) for kept in self.kept]
        self.anchor = -1
        self.group_before = self.group_total = 0.0
        self.front: _Front = []
        if capacity.has_groups:
            self._start_group(place)

    @property
    def redo_seconds(self) -> float:
        return max(self.layer_seconds, self.group_seconds)

    @property
    def seconds(self) -> float:
        """Where everything that can wait has waited."""
        return self.plain_seconds + self.redo_seconds

    def pass_place(self, place: int) -> None:
        lane = self.capacity.lane
        visit = lane.visit_at[place]
        is_forward = lane.kinds[place] == FORWARD
        for layer, gain in enumerate(self.capacity.gains):
            if is_forward:
                self._make(layer, visit, place)
            else:
                self.layer_seconds += gain * self._use(layer, visit, place)
        if self.capacity.has_groups and not is_forward:
            self._use_of_group(visit, place)

    def _make(self, layer: int, visit: int, place: int) -> None:
        full = self.capacity.full[layer][visit]
        self.kept[layer][visit] = full
        self.kept_bytes[layer] += full
        insort(self.order[layer], visit)
        self._lose(layer, self.capacity.rounded(layer, place, self.capacity.left_bytes[place]), -1)

    def _use(self, layer: int, visit: int, place: int) -> float:
        """The bytes that are not there any more."""
        capacity, kept = self.capacity, self.kept[layer]
        left = capacity.left_bytes[place]
        beside = capacity.beside[capacity.lane.holdings[visit]]
        own, most = kept[visit], capacity.rounded(layer, place, left)
        if own > most:
            self._lose(layer, 0.0, visit)
            self.kept_bytes[layer] += most - own
            own = most
        elif own >= beside:
            self._lose(layer, most - own, visit)
        else:
            self._lose(layer, capacity.rounded(layer, place, left - beside), visit)
        self.kept_bytes[layer] -= own
        del kept[visit]
        order = self.order[layer]
        at = bisect_left(order, visit)
        if at < len(order) and order[at] == visit:
            del order[at]
        return capacity.totals[layer][capacity.lane.holdings[visit]] - own

    def _lose(self, layer: int, most_bytes: float, but: int) -> None:
        """Of visits other than ``but``, down to ``most_bytes``, what is used last."""
        kept, order = self.kept[layer], self.order[layer]
        excess = self.kept_bytes[layer] - kept.get(but, 0.0) - most_bytes
        while excess > _TINY * most_bytes and order and order[-1] != but:
            visit = order[-1]
            lost = min(kept[visit], excess)
            kept[visit] -= lost
            self.kept_bytes[layer] -= lost
            excess -= lost
            if not kept[visit]:
                order.pop()

    def _start_group(self, place: int) -> None:
        """Of all visits that are alive at ``place``."""
        self.anchor = place
        self.group_before, self.group_total = self.group_seconds, 0.0
        self.front = [(0.0, 0.0)]

    def _use_of_group(self, visit: int, place: int) -> None:
        capacity, lane = self.capacity, self.capacity.lane
        if lane.made[visit] > self.anchor:
            self._start_group(place)
        holdings = lane.holdings[visit]
        options = capacity.options(holdings, capacity.left_bytes[place], place == self.anchor)
        left = capacity.left_bytes[self.anchor] * (1 + _TINY)
        sums = [(b + more, s + saved) for b, s in self.front for more, saved in options if b + more <= left]
        self.front = _front(sums)
        self.group_total += holdings.stage.recompute_seconds
        self.group_seconds = self.group_before + self.group_total - (self.front[-1][1] if self.front else 0.0)

    def covers(self, other: Window) -> bool:
        """Whether ``other``, opened earlier or later, can never again say more than this one.

        From here on it can lose less than this one at most what this one has more of, up to any backward.
        """
        ahead = self.plain_seconds - other.plain_seconds
        slack = min(ahead, ahead + self.wait_seconds - other.wait_seconds) + _TINY * self.plain_seconds
        if self.capacity.has_groups and slack + self.group_seconds - other.group_seconds < 0.0:
            return False
        slack += self.layer_seconds - other.layer_seconds
        for layer, gain in enumerate(self.capacity.gains):
            if slack < 0.0:
                return False
            more = most = 0.0
            others = other.kept[layer]
            for visit, amount in sorted(self.kept[layer].items()):
                more += amount - others[visit]
                most = max(most, more)
            slack -= gain * most
        return slack >= 0.0


def _front(points: Sequence[tuple[float, float]]) -> _Front:
    found: _Front = []
    for size, seconds in sorted(points):
        if not found or seconds > found[-1][1]:
            found.append((size, seconds))
    while len(found) > _POINTS:
        found = [(low[0], high[1]) for low, high in zip(found[::2], found[1::2])] + found[len(found) // 2 * 2 :]
    return found
