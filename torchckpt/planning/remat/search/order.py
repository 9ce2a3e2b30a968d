"""Order: other orders of the first runs of operations, with lower peak memory."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from heapq import heappop, heappush

from torchckpt.planning.remat.flow.dataflow import Dataflow, Tables
from torchckpt.planning.remat.flow.incremental import Draft

__all__ = ["hoisted", "moved", "transplanted"]


def hoisted(flow: Dataflow, sink: bool = False) -> list[int]:
    """The eager order, but each operation that frees more than it allocates runs as soon as its inputs are ready.

    This helps gradients of weights most. Each is the last reader of a saved value. Autograd runs it after the gradient
    of the input, which is allocated while that value is still alive. The forward stays before the backward.

    Args:
        sink: always run the ready operation that frees most. Default: False; if no operation frees memory, run the next
            one of the eager order.
    """
    return _Hoist(flow, sink).run()


class _Hoist:
    def __init__(self, flow: Dataflow, sink: bool) -> None:
        self.flow, self.sink = flow, sink
        self.kept = flow.given | flow.results | flow.forward_results
        self.left = Counter(s for operation in flow.operations for s in operation.reads)
        self.missing = [sum(s not in flow.given for s in operation.reads) for operation in flow.operations]
        self.readers: dict[int, list[int]] = {}
        for index, operation in enumerate(flow.operations):
            for storage in operation.reads:
                if storage not in flow.given:
                    self.readers.setdefault(storage, []).append(index)
        self.done: set[int] = set()
        self.heap: list[tuple[int, int]] = []
        self.order: list[int] = []

    def run(self) -> list[int]:
        forward, count = self.flow.forward, len(self.flow.operations)
        for first, end in ((0, forward), (forward, count)):
            self.end, self.heap = end, []
            for index in range(first, end):
                self._offer(index)
            for index in range(first, end):
                self._drain()
                if index not in self.done:
                    self._take(index)
            self._drain()
        return self.order

    def _drain(self) -> None:
        """Run the ready operations that free more than they allocate."""
        while self.heap:
            change, index = self.heap[0]
            if index in self.done or change != self._change(index):
                heappop(self.heap)
                self._offer(index)
            elif self.sink or change < 0:
                heappop(self.heap)
                self._take(index)
            else:
                return

    def _offer(self, index: int) -> None:
        if index < self.end and index not in self.done and not self.missing[index]:
            heappush(self.heap, (self._change(index), index))

    def _change(self, index: int) -> int:
        """The bytes that the operation allocates, less those that die after it."""
        operation, sizes = self.flow.operations[index], self.flow.sizes_bytes
        dies = sum(sizes[s] for s in operation.reads if self.left[s] == 1 and s not in self.kept)
        return sum(sizes[s] for s in operation.writes) - dies

    def _take(self, index: int) -> None:
        self.done.add(index)
        self.order.append(index)
        operation = self.flow.operations[index]
        self.left.subtract(operation.reads)
        for storage in operation.writes:
            for reader in self.readers.get(storage, ()):
                self.missing[reader] -= 1
                self._offer(reader)
        for storage in operation.reads:
            if self.left[storage] == 1:
                for reader in self.readers.get(storage, ()):
                    self._offer(reader)


def transplanted(draft: Draft, order: list[int], tables: Tables) -> Draft:
    """``draft`` with its first runs in another order; repeats stay before the first runs that they are made for."""
    old = draft.tables.order
    place = {index: repeated for repeated, index in enumerate(order)}
    found = Draft(tables)
    for position, repeats in enumerate(draft.repeats):
        for repeated in repeats:
            there, repeated = place[old[position]], place[old[repeated]]
            if there > repeated and tables.may_repeat(repeated, there):
                found.add(there, repeated)
    return found


def moved(flow: Dataflow, order: list[int]) -> Iterator[list[int]]:
    """Every order in which one operation is moved as early, or as late, as its reads, readers and boundary allow."""
    place = {index: position for position, index in enumerate(order)}
    readers: dict[int, list[int]] = {}
    for index, operation in enumerate(flow.operations):
        for storage in operation.reads:
            readers.setdefault(storage, []).append(index)
    for position, index in enumerate(order):
        operation = flow.operations[index]
        first, end = (0, flow.forward) if position < flow.forward else (flow.forward, len(order))
        early = max([first, *(place[flow.writer[s]] + 1 for s in operation.reads if s not in flow.given)])
        late = min([end, *(place[reader] for s in operation.writes for reader in readers.get(s, ()))]) - 1
        rest = order[:position] + order[position + 1:]
        for target in {early, late} - {position}:
            yield rest[:target] + [index] + rest[target:]
