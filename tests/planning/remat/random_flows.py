"""Random training steps, small and seeded: a forward, and the backward that its derivatives would need."""
from __future__ import annotations

from functools import cache
from random import Random

from torchckpt.planning.remat.flow.dataflow import Dataflow, Operation

INPUT, WEIGHT, SEED = GIVEN = (0, 1, 2)
KINDS = ("plain",) * 7 + ("dropout", "norm", "once")


class Draft:
    """Draws the forward operation by operation, then its backward in reverse."""

    def __init__(self, random: Random, forward: int) -> None:
        self.random = random
        # Small gradients leave more to gain: at twelve operations, few steps fit half of what they take otherwise.
        self.most_gradient_bytes = random.choice([1, 2, 3, 9])
        self.weight_share = random.choice([0.0, 0.2, 0.5])
        self.sizes_bytes = [random.randint(1, 9) for _ in GIVEN]
        self.operations: list[Operation] = []
        self.extras: dict[int, list[int]] = {}
        self.results: set[int] = set()
        self.forward_results: set[int] = set()
        self.values: list[int] = []
        for _ in range(forward - 1):
            self.values.append(self.draw_forward())
        self.draw_loss()
        self.forward = len(self.operations)
        self.gradients: dict[int, int] = {}
        self.draw_backward()

    def flow(self) -> Dataflow:
        sizes, given = tuple(self.sizes_bytes), frozenset(GIVEN)
        results, forward_results = frozenset(self.results), frozenset(self.forward_results)
        return Dataflow(tuple(self.operations), sizes, self.forward, given, results, forward_results)

    def storage(self, most_bytes: int = 9) -> int:
        self.sizes_bytes.append(self.random.randint(1, most_bytes))
        return len(self.sizes_bytes) - 1

    def some(self, values: list[int], share: float) -> list[int]:
        return [value for value in values if self.random.random() < share]

    def add(self, name: str, reads: list[int], writes: list[int], again: tuple[list[int], list[int]] | None = None,
            repeatable: bool = True) -> Operation:
        """One more operation; ``again`` are the reads and writes of what a repeat runs in its place."""
        name = f"{name}{len(self.operations)}"
        seconds = float(self.random.choice([0, 1, 1, 2, 2, 3, 5]))
        workspace = self.random.choice([0, 0, 0, 0, self.random.randint(1, 4)])
        other = None
        if again is not None:
            other = Operation(f"{name} again", *map(once, again), float(self.random.randint(1, 3)))
        operation = Operation(name, once(reads), once(writes), seconds, 0, workspace, repeatable, other)
        self.operations.append(operation)
        return operation

    def draw_forward(self) -> int:
        """A value of one operation, of the last one most often, and of a skip and a parameter now and then."""
        random, earlier = self.random, self.values or [INPUT]
        reads = [earlier[-1] if random.random() < 0.8 else random.choice(earlier)]
        reads += [random.choice(earlier)] if random.random() < 0.2 else []
        reads += [WEIGHT] if random.random() < self.weight_share else []
        value, kind = self.storage(), random.choice(KINDS)
        if kind == "dropout":
            mask = self.storage(3)
            operation = self.add(kind, reads, [value, mask], ([*reads, mask], [value]))
            self.extras[len(self.operations) - 1] = [mask]
        elif kind == "norm":
            statistics, buffer = self.storage(2), self.storage(4)
            self.forward_results.add(buffer)
            again = (reads, [value, statistics]) if random.random() < 0.7 else None
            operation = self.add(kind, reads, [value, statistics, buffer], again)
            self.extras[len(self.operations) - 1] = [statistics]
        elif kind == "plain" and random.random() < 0.3:
            extra = self.storage()
            operation = self.add("pair", reads, [value, extra])
            self.extras[len(self.operations) - 1] = [extra]
        else:
            operation = self.add(kind, reads, [value], repeatable=kind != "once")
        return operation.writes[0]

    def draw_loss(self) -> None:
        """Of everything that nothing has read yet, but what is an output itself."""
        read = {storage for operation in self.operations for storage in operation.reads}
        unread = [value for value in self.values if value not in read]
        outputs = self.some(unread[:-1], 0.5) + self.some(self.values[-1:], 0.2)
        self.results.update(outputs)
        reads = [value for value in unread if value not in outputs] or self.values[-1:] or [INPUT]
        loss = self.storage(2)
        self.values.append(loss)
        self.results.add(loss)
        self.add("loss", reads, [loss])

    def draw_backward(self) -> None:
        self.gradients[self.values[-1]] = SEED
        for index in reversed(range(self.forward)):
            operation = self.operations[index]
            gradient = self.gradients.pop(operation.writes[0], None)
            if gradient is not None:
                self.draw_adjoint(index, operation, gradient)

    def draw_adjoint(self, index: int, operation: Operation, gradient: int) -> None:
        """The gradients of what ``operation`` reads, from that of what it writes and some of what it saw."""
        inputs = [storage for storage in operation.reads if storage not in GIVEN]
        needs = self.some([*operation.reads, operation.writes[0]], 0.6) + self.extras.get(index, [])
        if not inputs or WEIGHT in operation.reads:
            weight_gradient = self.storage(self.most_gradient_bytes)
            self.results.add(weight_gradient)
            saved = self.some(list(operation.reads), 0.7)
            self.add("weight", [gradient, *saved, *([] if inputs else needs)], [weight_gradient])
        if inputs:
            writes = [self.storage(self.most_gradient_bytes) for _ in inputs]
            self.add("adjoint", [gradient, *needs], writes, repeatable=self.random.random() < 0.9)
            for value, part in zip(inputs, writes):
                self.gradients[value] = self.accumulate(self.gradients.get(value), part)

    def accumulate(self, gradient: int | None, part: int) -> int:
        if gradient is None:
            return part
        total = self.storage(self.most_gradient_bytes)
        self.add("sum", [gradient, part], [total])
        return total


def once(storages: list[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(storages))


@cache
def random_flow(seed: int, most_operations: int = 12) -> Dataflow:
    """The largest step of this seed with at most so many operations."""
    for forward in range(most_operations, 0, -1):
        flow = Draft(Random(seed), forward).flow()
        if len(flow.operations) <= most_operations:
            return flow
    raise AssertionError("a loss and its gradient are at most three")
