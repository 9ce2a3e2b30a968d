"""Count: one stage run with tensors that have no memory: a forward, and two backwards.

    forward                    backward for inputs           backward for inputs and parameters
    [1] parts start and end;   [3] the number of a node      [4] the same; its excess
        each has the storages      tells the part that           over [3] is the
        that it saves              made it                       weight gradient
    [2] for each part, what has run when it saves its last tensor: a replay ends there
"""
from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from torchckpt.costs.ledger import AFTER, BEFORE, BOTH_GRADS, FORWARD, INPUT_GRAD, REPLAY, Ledger, SecondsOf
from torchckpt.costs.parts import static_of, watched
from torchckpt.planning.work.block import Block
from torchckpt.regions.private import newest_node, number_of
from torchckpt.regions.saved import storage_of
from torchckpt.tensors import tensors_in

__all__ = ["Counted", "Part", "counted"]


@dataclass(frozen=True)
class Part:
    """What was counted for a block, or for operations outside of blocks."""

    work: Block
    """Its seconds and bytes. A replay has the operations of the forward up to the last tensor that it saves."""
    forward_flops: int
    backward_flops: int
    replay_flops: int
    unsaved_bytes: int = 0
    """Bytes of the boundary that a kept block does not save: half-precision inputs of which it saves copies in float32.
    If the block is recomputed before its gradient arrives, they are in memory beside its saved bytes."""
    changes_input: bool = False
    """Whether it changes an input in place. Then it cannot run again."""


@dataclass(frozen=True)
class Counted:
    """What was counted for one stage."""

    before: Part
    blocks: tuple[Part, ...]
    after: Part
    message_bytes: int
    """The bytes of the floating-point tensors that the stage is called with."""
    parameters: int
    """The elements of its trained parameters."""

    @property
    def parts(self) -> tuple[Part, ...]:
        return (self.before, *self.blocks, self.after)


class _Forward:
    """Data about a stage, collected during its forward."""

    def __init__(self, ledger: Ledger, static: Collection[StorageWeakRef]) -> None:
        self.ledger = ledger
        self.inputs: list[Tensor] = []  # inputs of blocks that need a gradient
        self.changing: set[int] = set()  # blocks that change what they are given
        self.given: list[set[StorageWeakRef]] = []  # the inputs of each block
        self._saved: defaultdict[int, set[StorageWeakRef]] = defaultdict(set)  # by part
        self._static = static
        self._sizes: dict[StorageWeakRef, int] = {}
        self._versions: list[tuple[Tensor, int]] = []
        self._starts: list[tuple[int, int]] = [(-1, BEFORE)]  # the number of a node, and the part from there on

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = tensors_in((args, kwargs))
        self.inputs += [one for one in tensors if one.requires_grad and not isinstance(one, nn.Parameter)]
        self._versions = [(tensor, tensor._version) for tensor in tensors]
        self._turn(len(self.given))
        self.given.append({storage for tensor in tensors for storage in self._met(tensor)})

    def leave(self) -> None:
        if any(tensor._version != version for tensor, version in self._versions):
            self.changing.add(self.ledger.part)
        self._turn(AFTER)

    def pack(self, tensor: Tensor) -> Tensor:
        self._saved[self.ledger.part].update(self._met(tensor))
        self.ledger.saved()
        return tensor if tensor.is_leaf else tensor.detach()

    def part_of(self, node: Node) -> int:
        at = bisect_right(self._starts, number_of(node), key=lambda start: start[0])
        return self._starts[at - 1][1]

    def bytes_of_parts(self) -> dict[int, tuple[int, int, int]]:
        """The bytes of each part: saved, of its boundary, and of the boundary if it is kept and does not save them.
        Operations outside of blocks have no boundary."""
        makers, saved = self.ledger.makers, self._saved
        times = Counter(storage for given in self.given for storage in given)
        before, after = set(saved[BEFORE]), set(saved[AFTER])
        before |= {storage for storage, count in times.items() if count > 1}
        for block in range(len(self.given)):
            before |= {one for one in saved[block] if makers.get(one, BEFORE) != block} - times.keys()
        after -= before
        always, anywhere = before | after, set().union(*saved.values())
        amounts = {BEFORE: (self._bytes(before), 0, 0), AFTER: (self._bytes(after), 0, 0)}
        for block, given in enumerate(self.given):
            inner, boundary = saved[block] - always - times.keys(), given - always
            unsaved = boundary - anywhere
            sets = inner | boundary - unsaved, boundary, unsaved
            amounts[block] = self._bytes(sets[0]), self._bytes(sets[1]), self._bytes(sets[2])
        return amounts

    def _bytes(self, storages: Iterable[StorageWeakRef]) -> int:
        return sum(map(self._sizes.__getitem__, storages))

    def _met(self, tensor: Tensor) -> Iterable[StorageWeakRef]:
        sizes = {storage: size for storage, size in storage_of(tensor).items() if storage not in self._static}
        self._sizes.update(sizes)
        return sizes

    def _turn(self, part: int) -> None:
        self._starts.append((newest_node() + 1, part))
        self.ledger.part = part


def counted(
    stage: nn.Module,
    call: Callable[[], Any],
    inputs: Any,
    seconds_of: SecondsOf,
    children: Sequence[nn.Module] | None,
    optimizer_bytes: float | None,
) -> tuple[Counted, Any]:
    """Run ``call``, the forward of ``stage`` on ``inputs``, and its backwards. Returns the counts and the outputs.

    Args:
        children: the modules whose calls are blocks; None where regions are.
        optimizer_bytes: see :func:`~torchckpt.costs.parts.static_of`.
    """
    static = static_of(stage, optimizer_bytes)
    ledger = Ledger(seconds_of, static)
    forward = _Forward(ledger, static)
    parameters = [one for one in stage.parameters() if one.requires_grad]
    with ledger:
        blocks_watched = watched(forward.enter, forward.leave, children)
        with saved_tensors_hooks(forward.pack, _same), blocks_watched, _phase(ledger, FORWARD):
            outputs = call()
        graded = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
        leaves = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
        _follow(graded, forward)
        _backward(ledger, INPUT_GRAD, graded, [*leaves, *forward.inputs])
        _backward(ledger, BOTH_GRADS, graded, [*leaves, *forward.inputs, *parameters])
    before, after, *blocks = _parts(forward, static)
    message = sum(one.numel() * one.element_size() for one in tensors_in(inputs) if one.is_floating_point())
    return Counted(before, tuple(blocks), after, message, sum(one.numel() for one in parameters)), outputs


def _parts(forward: _Forward, static: Mapping[StorageWeakRef, float]) -> Iterator[Part]:
    """What is before the blocks, what is after them, and the blocks."""
    ledger, amounts = forward.ledger, forward.bytes_of_parts()
    static_bytes: defaultdict[int, float] = defaultdict(float)
    for storage, size in static.items():
        static_bytes[ledger.users.get(storage, BEFORE)] += size
    for part in (BEFORE, AFTER, *range(len(forward.given))):
        phases = FORWARD, INPUT_GRAD, BOTH_GRADS, REPLAY
        ahead, inner, both, replay = (ledger.seconds[phase, part] for phase in phases)
        forward_flops, _, backward_flops, replay_flops = (ledger.flops[phase, part] for phase in phases)
        saved, boundary, unsaved = amounts[part]
        work = Block(ahead, inner, max(0.0, both - inner), replay, saved, boundary, static_bytes[part])
        changes_input = part in forward.changing
        yield Part(work, forward_flops, backward_flops, replay_flops, unsaved, changes_input)


def _follow(outputs: Sequence[Tensor], forward: _Forward) -> None:
    """Have each node of the graph say in which part it was made, before it runs backwards."""
    stack = [output.grad_fn for output in outputs]
    seen: set[Node] = set()
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            node.register_prehook(_turning(forward.ledger, forward.part_of(node)))
            stack.extend(parent for parent, _ in node.next_functions)


def _turning(ledger: Ledger, part: int) -> Callable[[Any], None]:
    def turn(_: Any) -> None:
        ledger.part = part

    return turn


def _backward(ledger: Ledger, phase: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    if not outputs or not inputs:
        return
    gradients = [torch.ones_like(output) for output in outputs]
    with _phase(ledger, phase):
        torch.autograd.grad(outputs, inputs, gradients, retain_graph=phase == INPUT_GRAD, allow_unused=True)


@contextmanager
def _phase(ledger: Ledger, phase: str) -> Iterator[None]:
    ledger.phase, ledger.part = phase, BEFORE
    try:
        yield
    finally:
        ledger.phase = None


def _same(tensor: Tensor) -> Tensor:
    return tensor
