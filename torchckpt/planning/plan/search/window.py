"""Window: some consecutive actions of one rank, and the least recomputation in them that every plan needs.

A visit is a micro-batch on a stage. Its backward needs all of its blocks: those that are in memory when it starts are
free, whether they were kept or recomputed before; each other one is recomputed, and takes time. How many can be in
memory is a matter of bytes: at every place of the order, what is there has to fit beside what every plan holds there.

If all blocks are equal, that is caching with a known future. At the start of the window memory holds as many blocks as
fit, for nothing. Forwards then add visits. Where the blocks of all visits no longer fit, some are lost: the plan did
not keep them, or has to recompute them. The fewest are lost if the visit whose backward comes last loses first (Belady
1966), and so for every end of the window at once. Each backward pays for the blocks that its visit has lost.

Blocks that differ would make this a knapsack at each place. It is relaxed in two ways, and the larger bound counts.

*Layers.* Sort the blocks by their seconds per byte, and draw each as wide as its bytes and as high as its density. Its
area is what it takes to recompute it. Cut the picture into layers at the densities d_1 < d_2 < d_3, with d_0 = 0::

    seconds per byte
     d_3 |                      +--------+
         |                      | 3    3 |   layer 3: a byte that is lost costs d_3 - d_2
     d_2 |           +----------+--------+
         |           | 2                2|   layer 2: a byte that is lost costs d_2 - d_1
     d_1 |  +--------+-------------------+
         |  | 1                         1|   layer 1: a byte that is lost costs d_1
       0 +--+--------+----------+--------+---> bytes
             blocks   blocks     blocks
             of d_1   of d_2     of d_3

Layer k holds the blocks of at least density d_k. A lost block loses its bytes in each layer that it is in, and what
that costs adds up to its area. So the seconds of a plan are the sum over the layers of the bytes that it loses there,
times d_k - d_(k-1). Within a layer all bytes cost the same, so the least loss is found as for equal blocks. No plan is
below the sum of the least losses, though perhaps no plan has all of them at once. To come closer, a capacity counts
only as far as whole blocks of the layer can fill it.

*Groups*, if few blocks are alive. The visits that are alive at one moment share its memory. All recomputation of the
group, less the most seconds of whole blocks that fit there together, is what it needs at least.
"""
from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Sequence
from itertools import combinations
from typing import TypeAlias

from torchckpt.planning.plan.search.lane import FORWARD, INPUT_GRAD, Holdings, Lane, density
from torchckpt.planning.step.memory import use_bytes

__all__ = ["Capacity", "Window"]

_Front: TypeAlias = list[tuple[float, float]]
"""Pairs of bytes and the most recompute seconds of blocks that fit in them; both increase."""

_LAYERS = 8
"""The most layers."""
_SUMS = 600
"""The most sums of block sizes. If there are more, a capacity is not rounded down to such a sum."""
_FEW_BLOCKS, _FEW_ALIVE = 8, 24
"""The most blocks of a stage, and blocks alive on a rank at once, for which groups are computed."""
_POINTS = 48
"""The most points of a front. If there are more, neighbours are merged into a point that is better than both."""
_TINY = 1e-9


class Capacity:
    """The bytes that are free on a rank at each position of its order, after those that every plan needs there."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        stages = list(dict.fromkeys(lane.holdings))
        blocks = [block for holdings in stages for block in holdings.stage.blocks if block.freed_bytes]
        self.floors = _floors([density(block) for block in blocks])
        """The densities d_k at which the layers begin, ascending."""
        self.gains = [high - low for low, high in zip([0.0, *self.floors], self.floors)]
        """By layer, the seconds that a lost byte costs: d_k - d_(k-1)."""
        self.is_equal = len({(block.freed_bytes, block.recompute_seconds) for block in blocks}) <= 1
        self.least = {holdings: holdings.without(range(holdings.blocks)) for holdings in stages}
        self.backward_extra_bytes = {
            holdings: least.use_bytes[0] - least.held_bytes for holdings, least in self.least.items()
        }
        """The least bytes that a backward adds to those that its visit holds when it recomputes all blocks."""
        self._count_alive(stages)
        self._fillings: dict[tuple[int, int], list[float] | float | None] = {}
        self._too_many: dict[int, list[dict[Holdings, int]]] = {}
        """By layer, the counts of visits with too many sums. Larger counts have too many, too."""
        self._allowed: dict[tuple[Holdings, float], list[tuple[float, float, float, list[float]]]] = {}
        self._options: dict[tuple[Holdings, float, bool], _Front] = {}
        split = dict.fromkeys(holdings for holdings, is_split in zip(lane.holdings, lane.is_split) if is_split)
        self._waiting = [(holdings.full_bytes, holdings.weight_grad_seconds) for holdings in split]
        self._deferrable: dict[float, float] = {}
        few = max((len(holdings.stage.blocks) for holdings in stages), default=0) <= _FEW_BLOCKS
        self.has_groups = not self.is_equal and few and self.most_alive <= _FEW_ALIVE
        layers, visits = range(len(self.gains)), range(len(lane.visits))
        self.totals = [{holdings: sum(self._sizes(layer, holdings)) for holdings in stages} for layer in layers]
        self.full = [[self._full(visit, layer) for visit in visits] for layer in layers]
        """By layer and visit, the most bytes that can be in memory when the backward starts."""

    def _count_alive(self, stages: Sequence[Holdings]) -> None:
        """Compute for each place the bytes that are left, and how many visits of each stage are alive."""
        lane = self.lane
        counts, used_bytes = dict.fromkeys(stages, 0), 0.0
        self.left_bytes: list[float] = []
        self.alive: list[int] = []
        """By place, an index of :attr:`counts`."""
        self.counts: list[dict[Holdings, int]] = []
        numbers: dict[tuple[int, ...], int] = {}
        for kind, visit in zip(lane.kinds, lane.visit_at):
            holdings = lane.holdings[visit]
            if kind is FORWARD:
                counts[holdings] += 1
                used_bytes += self.least[holdings].held_bytes
            self.left_bytes.append(lane.budget_bytes - used_bytes)
            number = numbers.setdefault(tuple(counts.values()), len(numbers))
            if number == len(self.counts):
                self.counts.append(dict(counts))
            self.alive.append(number)
            if kind is not FORWARD:
                counts[holdings] -= 1
                used_bytes -= self.least[holdings].held_bytes
        blocks = (sum(holdings.blocks * count for holdings, count in alive.items()) for alive in self.counts)
        self.most_alive = max(blocks, default=0)

    def _sizes(self, layer: int, holdings: Holdings) -> list[float]:
        """The bytes of each block of the stage that belongs to the layer."""
        floor = self.floors[layer] * (1 - _TINY)
        blocks = holdings.stage.blocks
        return [block.freed_bytes for block in blocks if block.freed_bytes and density(block) >= floor]

    def _full(self, visit: int, layer: int) -> float:
        holdings = self.lane.holdings[visit]
        if self.is_equal or holdings.blocks > _FEW_BLOCKS:
            return self.totals[layer][holdings]
        left = self.left_bytes[self.lane.backward_place[visit]]
        return max((sizes[layer] for _, _, _, sizes in self.allowed(holdings, left)), default=0.0)

    def rounded(self, layer: int, place: int, amount_bytes: float) -> float:
        """The most of ``amount_bytes`` that blocks of the visits alive at ``place`` can fill."""
        if amount_bytes <= 0.0:
            return 0.0
        key = layer, self.alive[place]
        if key not in self._fillings:
            self._fillings[key] = self._sums(layer, self.counts[self.alive[place]])
        sums = self._fillings[key]
        if sums is None:
            return amount_bytes
        if isinstance(sums, list):
            return min(amount_bytes, sums[bisect_right(sums, amount_bytes * (1 + _TINY)) - 1])
        return int(amount_bytes / sums + _TINY) * sums  # _TINY: the division may round a whole number down

    def _sums(self, layer: int, counts: dict[Holdings, int]) -> list[float] | float | None:
        """The total bytes of every set of blocks, ascending; the size of one if they are equal; None if too many."""
        many = self._too_many.setdefault(layer, [])
        if any(all(counts[holdings] >= few for holdings, few in fewer.items()) for fewer in many):
            return None
        sizes = [size for holdings, count in counts.items() for size in self._sizes(layer, holdings) * count]
        if sizes and max(sizes) - min(sizes) <= _TINY * max(sizes):
            return max(sizes)
        sums = {0.0}
        for size in sizes:
            sums |= {others + size for others in sums}
            if len(sums) > _SUMS:
                many.append(counts)
                return None
        return sorted(sums)

    def allowed(self, holdings: Holdings, left_bytes: float) -> list[tuple[float, float, float, list[float]]]:
        """The sets of blocks that can be in memory when the backward starts: of each its bytes, the bytes that the peak
        of the backward adds to the least that a visit holds, its recompute seconds, and its bytes by layer."""
        key = holdings, round(left_bytes, 9)
        if key not in self._allowed:
            most = left_bytes * (1 + _TINY)
            self._allowed[key] = [blocks for blocks in self._all_sets(holdings) if blocks[1] <= most]
        return self._allowed[key]

    def options(self, holdings: Holdings, left_bytes: float, starts: bool) -> _Front:
        """The front of the sets that can be in memory when the backward starts; with its peak bytes if ``starts``."""
        key = holdings, round(left_bytes, 9), starts
        if key not in self._options:
            sets = self.allowed(holdings, left_bytes)
            self._options[key] = _front([(high if starts else freed, saved) for freed, high, saved, _ in sets])
        return self._options[key]

    def _all_sets(self, holdings: Holdings) -> list[tuple[float, float, float, list[float]]]:
        key = holdings, -1.0
        if key not in self._allowed:
            stage, every, sets = holdings.stage, range(holdings.blocks), []
            least = self.least[holdings].held_bytes
            floors = [floor * (1 - _TINY) for floor in self.floors]
            for chosen in (chosen for count in range(len(every) + 1) for chosen in combinations(every, count)):
                blocks = [stage.blocks[index] for index in chosen]
                layers = [sum(block.freed_bytes for block in blocks if density(block) >= floor) for floor in floors]
                highest = use_bytes(stage, set(every) - set(chosen)) - least
                freed = sum(block.freed_bytes for block in blocks)
                sets.append((freed, highest, sum(block.recompute_seconds for block in blocks), layers))
            self._allowed[key] = sets
        return self._allowed[key]

    def passed(self, place: int, windows: Sequence[Window]) -> list[float]:
        """Have all ``windows`` pass a place. Returns of each the seconds of weight gradients that cannot wait on."""
        lane = self.lane
        holdings, kind = lane.holdings[lane.visit_at[place]], lane.kinds[place]
        seconds, waits = holdings.forward_seconds if kind is FORWARD else holdings.backward_seconds, 0.0
        if kind is INPUT_GRAD:
            seconds, waits = holdings.input_grad_seconds, holdings.weight_grad_seconds
        for window in windows:
            window.plain_seconds += seconds
            window.wait_seconds += waits
            window.pass_place(place)
        if not any(window.wait_seconds for window in windows):
            return [0.0] * len(windows)
        left = self.left_bytes[place] + (0.0 if kind is FORWARD else self.least[holdings].held_bytes)
        deferrable = self._deferrable.get(left)
        if deferrable is None:
            deferrable = self._deferrable[left] = _most(self._waiting, left)
        return [max(0.0, window.wait_seconds - deferrable) for window in windows]


def _floors(densities: Sequence[float]) -> list[float]:
    """The distinct densities, ascending. If there are too many, some; another density counts as the next lower one."""
    floors: list[float] = []
    for seconds_per_byte in sorted(densities):
        if not floors or seconds_per_byte > floors[-1] * (1 + _TINY):
            floors.append(seconds_per_byte)
    if len(floors) > _LAYERS:
        floors = [floors[len(floors) * layer // _LAYERS] for layer in range(_LAYERS)]
    return floors


def _most(kinds: Sequence[tuple[float, float]], left_bytes: float) -> float:
    """The most seconds of items that fit in ``left_bytes``. Each kind is (bytes, seconds) of an item."""
    if not all(size for size, _ in kinds):
        return math.inf  # what holds nothing can wait forever
    if left_bytes <= 0.0 or not kinds:
        return 0.0
    size, seconds = kinds[0]
    most = int(left_bytes / size + _TINY)
    if len(kinds) > 2 or (len(kinds) == 2 and most > _SUMS):
        return left_bytes * max(seconds / size for size, seconds in kinds)
    if len(kinds) == 1:
        return most * seconds
    return max(count * seconds + _most(kinds[1:], left_bytes - count * size) for count in range(most + 1))


class Window:
    """The actions of a rank from the place where the window was opened to the last one that it has passed."""

    __slots__ = ("anchor", "capacity", "front", "group_before", "group_seconds", "group_total", "kept", "kept_bytes",
                 "layer_seconds", "order", "plain_seconds", "wait_seconds")

    def __init__(self, capacity: Capacity, place: int, start_seconds: float, alive: Collection[int]) -> None:
        """``alive``: the visits whose forward ran before ``place``, and whose backward did not."""
        self.capacity = capacity
        self.plain_seconds = start_seconds
        """The earliest start of the window, plus the seconds of its forwards and backwards."""
        self.layer_seconds = self.group_seconds = 0.0
        """The least seconds of recomputation in the window, by the two relaxations."""
        self.wait_seconds = 0.0
        """The seconds of weight gradients that belong to backwards in the window."""
        visits = sorted(alive)
        self.kept = [{visit: full[visit] for visit in visits} for full in capacity.full]
        self.order = [[*visits] for _ in capacity.full]
        """By layer, the visits that have blocks in memory, in the order of their backwards."""
        self.kept_bytes = [sum(kept.values()) for kept in self.kept]
        self.anchor = -1
        self.group_before = self.group_total = 0.0
        self.front: _Front = []
        if capacity.has_groups:
            self._start_group(place)

    @property
    def seconds(self) -> float:
        """The earliest end of the window if its weight gradients run later."""
        return self.plain_seconds + max(self.layer_seconds, self.group_seconds)

    def pass_place(self, place: int) -> None:
        lane = self.capacity.lane
        visit = lane.visit_at[place]
        is_forward = lane.kinds[place] is FORWARD
        for layer, gain in enumerate(self.capacity.gains):
            if is_forward:
                self._forward(layer, visit, place)
            else:
                self.layer_seconds += gain * self._backward(layer, visit, place)
        if self.capacity.has_groups and not is_forward:
            self._backward_of_group(visit, place)

    def _forward(self, layer: int, visit: int, place: int) -> None:
        full = self.capacity.full[layer][visit]
        self.kept[layer][visit] = full
        self.kept_bytes[layer] += full
        insort(self.order[layer], visit)
        self._lose(layer, self.capacity.rounded(layer, place, self.capacity.left_bytes[place]), -1)

    def _backward(self, layer: int, visit: int, place: int) -> float:
        """The bytes of ``visit`` that are lost, and have to be recomputed for its backward."""
        capacity, kept, order = self.capacity, self.kept[layer], self.order[layer]
        left, holdings = capacity.left_bytes[place], capacity.lane.holdings[visit]
        extra = capacity.backward_extra_bytes[holdings]
        in_memory, most = kept[visit], capacity.rounded(layer, place, left)
        if in_memory > most:
            self._lose(layer, 0.0, visit)
            self.kept_bytes[layer] += most - in_memory
            in_memory = most
        elif in_memory >= extra:
            self._lose(layer, most - in_memory, visit)
        else:
            self._lose(layer, capacity.rounded(layer, place, left - extra), visit)
        self.kept_bytes[layer] -= in_memory
        del kept[visit]
        index = bisect_left(order, visit)
        if index < len(order) and order[index] == visit:
            del order[index]
        return capacity.totals[layer][holdings] - in_memory

    def _lose(self, layer: int, most_bytes: float, but: int) -> None:
        """Lose bytes of visits other than ``but`` until ``most_bytes`` are left, of the last backward first."""
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
        """Start a group: the visits that are alive at ``place``."""
        self.anchor = place
        self.group_before, self.group_total = self.group_seconds, 0.0
        self.front = [(0.0, 0.0)]

    def _backward_of_group(self, visit: int, place: int) -> None:
        capacity, lane = self.capacity, self.capacity.lane
        if lane.forward_place[visit] > self.anchor:
            self._start_group(place)
        holdings = lane.holdings[visit]
        options = capacity.options(holdings, capacity.left_bytes[place], place == self.anchor)
        left = capacity.left_bytes[self.anchor] * (1 + _TINY)
        sums = [(b + more, s + saved) for b, s in self.front for more, saved in options if b + more <= left]
        self.front = _front(sums)
        self.group_total += holdings.stage.recompute_seconds
        self.group_seconds = self.group_before + self.group_total - (self.front[-1][1] if self.front else 0.0)

    def covers(self, other: Window) -> bool:
        """Whether the bound of ``other`` can never again be above that of this window.

        What this window holds more than ``other``, up to any backward, is the most that ``other`` can recompute more.
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
    front: _Front = []
    for size, seconds in sorted(points):
        if not front or seconds > front[-1][1]:
            front.append((size, seconds))
    while len(front) > _POINTS:
        front = [(low[0], high[1]) for low, high in zip(front[::2], front[1::2])] + front[len(front) // 2 * 2 :]
    return front
