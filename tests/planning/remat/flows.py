"""Dataflows of training steps as one meets them, made without torch: chains, transformers, ResNets, U-Nets, DAGs.

A :class:`Tape` records a forward and derives the backward from it as autograd does: in reverse order, the gradient of
an input apart from that of a weight, gradients of a value with several readers added up.
"""
from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torchckpt.planning.remat.flow.dataflow import Dataflow, Operation
from torchckpt.planning.remat.flow.memory import simulate

__all__ = [
    "Tape", "budget_of", "chain", "mlp", "random_chain", "random_dag", "random_step", "resnet", "transformer", "unet",
]

MATMUL_SECONDS_PER_BYTE, POINTWISE_SECONDS_PER_BYTE = 20e-9, 1e-9


@dataclass
class Tape:
    """A forward under construction; :meth:`flow` adds its backward."""

    operations: list[Operation] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    given: set[int] = field(default_factory=set)
    results: set[int] = field(default_factory=set)
    forward_results: set[int] = field(default_factory=set)
    backward: list[Callable[[], None]] = field(default_factory=list)
    gradients: dict[int, int] = field(default_factory=dict)
    differentiated: set[int] = field(default_factory=set)

    def input(self, size_bytes: int, differentiated: bool = False) -> int:
        storage = self.storage(size_bytes)
        self.given.add(storage)
        if differentiated:
            self.differentiated.add(storage)
        return storage

    def storage(self, size_bytes: int) -> int:
        self.sizes.append(size_bytes)
        return len(self.sizes) - 1

    def run(self, name: str, reads: Sequence[int], out_bytes: int, seconds: float, **options: object) -> int:
        """One operation with one output; the output."""
        out = self.storage(out_bytes)
        writes = (out, *options.pop("also", ()))  # type: ignore[misc]
        unique = tuple(dict.fromkeys(reads))
        self.operations.append(Operation(name, unique, writes, seconds, **options))  # type: ignore[arg-type]
        return out

    def accumulate(self, storage: int, gradient: int) -> None:
        """Add ``gradient`` to that of ``storage``."""
        if storage in self.given - self.differentiated:
            return
        old = self.gradients.get(storage)
        if old is not None and old != gradient:
            size = self.sizes[storage]
            gradient = self.run("add", (old, gradient), size, size * POINTWISE_SECONDS_PER_BYTE)
        self.gradients[storage] = gradient

    def matmul(self, x: int, out_bytes: int, weight_bytes: int = 1000, workspace_bytes: int = 0) -> int:
        """A linear layer or a convolution: its input is saved for the gradient of the weight."""
        seconds = (self.sizes[x] + out_bytes) / 2 * MATMUL_SECONDS_PER_BYTE
        out = self.run("matmul", (x,), out_bytes, seconds, workspace_bytes=workspace_bytes)

        def backward() -> None:
            g = self.gradients[out]
            self.accumulate(x, self.run("matmul_dx", (g,), self.sizes[x], seconds, workspace_bytes=workspace_bytes))
            self.results.add(self.run("matmul_dw", (g, x), weight_bytes, seconds, workspace_bytes=workspace_bytes))

        self.backward.append(backward)
        return out

    def pointwise(self, name: str, x: int, saves: str = "out") -> int:
        """relu and tanh save their output, gelu and silu their input."""
        size = self.sizes[x]
        out = self.run(name, (x,), size, size * POINTWISE_SECONDS_PER_BYTE)

        def backward() -> None:
            saved = out if saves == "out" else x
            reads = (self.gradients[out], saved)
            self.accumulate(x, self.run(name + "_dx", reads, size, size * POINTWISE_SECONDS_PER_BYTE))

        self.backward.append(backward)
        return out

    def add(self, x: int, y: int) -> int:
        """A residual sum: nothing is saved, and its gradient is that of both."""
        size = self.sizes[x]
        out = self.run("residual", (x, y), size, size * POINTWISE_SECONDS_PER_BYTE)

        def backward() -> None:
            self.accumulate(x, self.gradients[out])
            self.accumulate(y, self.gradients[out])

        self.backward.append(backward)
        return out

    def concatenate(self, x: int, y: int) -> int:
        size = self.sizes[x] + self.sizes[y]
        out = self.run("cat", (x, y), size, size * POINTWISE_SECONDS_PER_BYTE)

        def backward() -> None:
            for part in (x, y):
                seconds = self.sizes[part] * POINTWISE_SECONDS_PER_BYTE
                self.accumulate(part, self.run("slice", (self.gradients[out],), self.sizes[part], seconds))

        self.backward.append(backward)
        return out

    def norm(self, x: int, batch: bool = False) -> int:
        """A layer norm. With ``batch``, a batch norm: new running statistics too, which a repeat spares."""
        size = self.sizes[x]
        seconds = 2 * size * POINTWISE_SECONDS_PER_BYTE
        statistics = self.storage(max(8, size // 256))
        if batch:
            running, out = self.storage(64), self.storage(size)
            self.forward_results.add(running)
            substitute = Operation("norm_again", (x,), (out, statistics), seconds)
            self.operations.append(Operation("norm", (x,), (out, statistics, running), seconds, substitute=substitute))
        else:
            out = self.run("norm", (x,), size, seconds, also=(statistics,))

        def backward() -> None:
            self.accumulate(x, self.run("norm_dx", (self.gradients[out], x, statistics), size, seconds))

        self.backward.append(backward)
        return out

    def attention(self, qkv: int) -> int:
        """Flash attention of a fused projection: the output and the row sums are saved."""
        size = self.sizes[qkv] // 3
        seconds = size * MATMUL_SECONDS_PER_BYTE * 0.7
        sums = self.storage(max(8, size // 64))
        out = self.run("attention", (qkv,), size, seconds, also=(sums,))

        def backward() -> None:
            reads = (self.gradients[out], qkv, out, sums)
            self.accumulate(qkv, self.run("attention_dx", reads, self.sizes[qkv], 2.5 * seconds))

        self.backward.append(backward)
        return out

    def dropout(self, x: int) -> int:
        """The mask is drawn once: a repeat multiplies by it."""
        size = self.sizes[x]
        seconds = size * POINTWISE_SECONDS_PER_BYTE
        mask, out = self.storage(size // 4), self.storage(size)
        substitute = Operation("dropout_again", (x, mask), (out,), seconds)
        self.operations.append(Operation("dropout", (x,), (out, mask), seconds, substitute=substitute))

        def backward() -> None:
            self.accumulate(x, self.run("dropout_dx", (self.gradients[out], mask), size, seconds))

        self.backward.append(backward)
        return out

    def flow(self, *outputs: int) -> Dataflow:
        """The step: a loss of ``outputs``, and the backward."""
        size = sum(self.sizes[out] for out in outputs)
        loss = self.run("loss", outputs, 4, size * POINTWISE_SECONDS_PER_BYTE)
        self.results.add(loss)
        forward = len(self.operations)
        for out in dict.fromkeys(outputs):
            size = self.sizes[out]
            self.accumulate(out, self.run("loss_dx", (out,), size, size * POINTWISE_SECONDS_PER_BYTE))
        for step in reversed(self.backward):
            step()
        self.results.update(self.gradients[storage] for storage in self.differentiated)
        frozen = frozenset(self.given), frozenset(self.results), frozenset(self.forward_results)
        return Dataflow(tuple(_needed(self, forward)), tuple(self.sizes), forward, *frozen)


def _needed(tape: Tape, forward: int) -> list[Operation]:
    """Without what nobody reads: the gradient of an input."""
    wanted, kept = set(tape.results), []
    for index in range(len(tape.operations) - 1, -1, -1):
        operation = tape.operations[index]
        if index < forward or wanted & set(operation.writes):
            wanted.update(operation.reads)
            kept.append(operation)
    return kept[::-1]


def chain(length: int, size_bytes: int = 1_000_000) -> Dataflow:
    """tanh after tanh, of one size: TensorFlow's memory-saving gradients are tested on it."""
    tape = Tape()
    x = tape.input(size_bytes, differentiated=True)
    for _ in range(length):
        x = tape.pointwise("tanh", x)
    return tape.flow(x)


def random_chain(length: int, seed: int = 0) -> Dataflow:
    """Layers of random size and cost."""
    rng, tape = random.Random(seed), Tape()
    x = tape.input(1000 * rng.randint(1, 8))
    for _ in range(length):
        x = tape.matmul(x, 1000 * rng.randint(1, 8))
        if rng.random() < 0.7:
            x = tape.pointwise("relu", x)
    return tape.flow(x)


def mlp(layers: int, size_bytes: int = 100_000, weight_bytes: int = 2_000) -> Dataflow:
    """linear, relu, linear, relu ..."""
    tape = Tape()
    x = tape.input(size_bytes)
    for _ in range(layers):
        x = tape.pointwise("relu", tape.matmul(x, size_bytes, weight_bytes))
    return tape.flow(x)


def transformer(layers: int, size_bytes: int = 100_000, dropout: bool = False) -> Dataflow:
    """GPT: some 50 operations a layer with ``dropout``, 40 without."""
    tape = Tape()
    x = tape.matmul(tape.input(size_bytes // 8), size_bytes)
    for _ in range(layers):
        y = tape.attention(tape.matmul(tape.norm(x), 3 * size_bytes))
        y = tape.matmul(y, size_bytes)
        x = tape.add(x, tape.dropout(y) if dropout else y)
        y = tape.pointwise("gelu", tape.matmul(tape.norm(x), 4 * size_bytes), saves="x")
        y = tape.matmul(y, size_bytes)
        x = tape.add(x, tape.dropout(y) if dropout else y)
    logits = tape.matmul(tape.norm(x), 2 * size_bytes)
    return tape.flow(tape.pointwise("log_softmax", logits))


def resnet(blocks: int, size_bytes: int = 100_000, workspace_bytes: int = 0) -> Dataflow:
    """Three stages, each with half of the bytes of the one before; training batch norm."""
    tape = Tape()
    x = tape.pointwise("relu", tape.norm(tape.matmul(tape.input(size_bytes // 5), size_bytes), batch=True))
    for block in range(blocks):
        size = size_bytes >> (3 * block // blocks)
        y = tape.norm(tape.matmul(x, size, workspace_bytes=workspace_bytes), batch=True)
        y = tape.matmul(tape.pointwise("relu", y), size, workspace_bytes=workspace_bytes)
        short = x if tape.sizes[x] == size else tape.norm(tape.matmul(x, size), batch=True)
        x = tape.pointwise("relu", tape.add(tape.norm(y, batch=True), short))
    return tape.flow(tape.matmul(x, 400))


def unet(depth: int, size_bytes: int = 200_000) -> Dataflow:
    """Down and up again, with a skip at each depth."""
    tape = Tape()
    x, skips = tape.input(size_bytes // 4), []
    for level in range(depth):
        x = _twice(tape, x, size_bytes >> level)
        skips.append(x)
        x = tape.matmul(x, size_bytes >> (level + 1))
    x = _twice(tape, x, size_bytes >> depth)
    for level in reversed(range(depth)):
        x = tape.concatenate(tape.matmul(x, size_bytes >> level), skips[level])
        x = _twice(tape, x, size_bytes >> level)
    return tape.flow(tape.matmul(x, size_bytes // 8))


def _twice(tape: Tape, x: int, size_bytes: int) -> int:
    for _ in range(2):
        x = tape.pointwise("relu", tape.norm(tape.matmul(x, size_bytes), batch=True))
    return x


def random_step(forward: int, seed: int = 0) -> Dataflow:
    """A forward of about that many layers with random branches and joins, and its backward."""
    rng, tape = random.Random(seed), Tape()
    ends = [tape.matmul(tape.input(1000), 1000 * rng.randint(1, 6))]
    while len(tape.operations) < forward:
        x = rng.choice(ends[-3:])
        kind = rng.random()
        twins = [y for y in ends[-5:] if y != x and tape.sizes[y] == tape.sizes[x]]
        if kind < 0.35:
            ends.append(tape.matmul(x, 1000 * rng.randint(1, 6), workspace_bytes=rng.choice((0, 0, 2000))))
        elif kind < 0.6:
            ends.append(tape.pointwise("relu", x, rng.choice(("x", "out"))))
        elif kind < 0.75:
            ends.append(tape.norm(x, batch=rng.random() < 0.5))
        elif kind < 0.85:
            ends.append(tape.dropout(x))
        elif twins:
            ends.append(tape.add(x, rng.choice(twins)))
        else:
            ends.append(tape.concatenate(x, rng.choice(ends)))
    read = {storage for operation in tape.operations for storage in operation.reads}
    return tape.flow(*[x for x in ends if x not in read])


def random_dag(operations: int, seed: int = 0) -> Dataflow:
    """No structure at all: any sizes, costs, fan-in; some cannot be repeated, some write twice, some need room."""
    rng = random.Random(seed)
    sizes = [rng.randint(1, 9)]
    drawn: list[Operation] = []
    open_storages: list[int] = []
    for index in range(operations):
        known = range(1, len(sizes))
        reads = {rng.choice(known) for _ in range(rng.choice((1, 1, 2, 3)))} if known else {0}
        if open_storages and rng.random() < 0.8:
            reads.add(open_storages.pop(rng.randrange(len(open_storages))))
        count = 2 if rng.random() < 0.15 else 1
        writes = tuple(range(len(sizes), len(sizes) + count))
        sizes += [rng.randint(1, 9) for _ in writes]
        open_storages = [storage for storage in open_storages if storage not in reads] + list(writes)
        drawn.append(Operation(
            f"op{index}", tuple(sorted(reads)), writes, rng.choice((0.1, 0.2, 1.0, 2.0, 5.0)),
            workspace_bytes=rng.choice((0, 0, 0, 3)), repeatable=rng.random() < 0.9,
        ))
    return Dataflow(tuple(drawn), tuple(sizes), operations // 2, frozenset({0}), frozenset(open_storages))


def budget_of(flow: Dataflow, share: float) -> int:
    """So much of the peak of eager."""
    return int(share * simulate(flow, flow.eager).peak_bytes)
