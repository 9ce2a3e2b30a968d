"""Fusion: a joint graph as a compiler runs it, with pointwise operations computed inside their only reader.

A pointwise operation whose result has a single reader is computed where it is read. It needs no storage, and a repeat
of the reader repeats it too. So the two become one operation here; ``expanded`` turns a schedule of such merged
operations into one of all operations.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate

import torch
from torch import fx

from torchckpt.graph.annotate.annotations import mark_of
from torchckpt.graph.step.joint import Joint
from torchckpt.planning.remat.flow.dataflow import Dataflow, Operation, Schedule

__all__ = ["Fusion"]

_COMPUTED = ("full.", "iota.", "scalar_tensor.", "inductor_lookup_seed.", "inductor_random.", "inductor_randint.")
"""Operators that compute their result from no input, or from a seed, inside the kernel that reads it."""


class Fusion:
    """A joint graph, ``joint``, in which pointwise operations are merged into the neighbour that reads them.

    Two operations are neighbours if all operations between them are pointwise or reductions: a matrix product or a
    convolution has a kernel of its own, and separates them.
    """

    def __init__(self, joint: Joint) -> None:
        flow, self._members = joint.flow, {index: [index] for index in range(len(joint.nodes))}
        for index, reader in sorted(_inlined(joint).items()):
            self._members[reader] = self._members.pop(index) + self._members[reader]
        self._kept = sorted(self._members)
        operations = [_merged(flow, self._members[index]) for index in self._kept]
        forward = sum(index < flow.forward for index in self._kept)
        for place, taken in _in_place(joint, self._kept, operations).items():
            workspace_bytes = operations[place].workspace_bytes - flow.sizes_bytes[taken]
            operations[place] = replace(operations[place], workspace_bytes=workspace_bytes)
        repeats = {place: joint.repeats[index] for place, index in enumerate(self._kept) if index in joint.repeats}
        nodes = tuple(joint.nodes[index] for index in self._kept)
        made = replace(flow, operations=tuple(operations), forward=forward)
        self.joint = replace(joint, flow=made, nodes=nodes, repeats=repeats)

    def expanded(self, schedule: Schedule) -> Schedule:
        """The schedule of the original joint graph that a schedule of the merged ``joint`` stands for."""
        return [index for place in schedule for index in self._members[self._kept[place]]]


def _inlined(joint: Joint) -> dict[int, int]:
    """Maps each operation that is computed where it is read to the operation that reads it."""
    flow, nodes = joint.flow, joint.nodes
    kernels = list(accumulate(not (_is_pointwise(node) or _has(node, torch.Tag.reduction)) for node in nodes))
    readers: dict[int, list[int]] = {}
    for index, operation in enumerate(flow.operations):
        for storage in operation.reads:
            readers.setdefault(storage, []).append(index)
    lasting = flow.results | flow.forward_results | _marked(joint)
    found = {}
    for index, operation in enumerate(flow.operations):
        read = readers.get(operation.writes[0], []) if len(operation.writes) == 1 else []
        near = len(read) == 1 and kernels[read[0]] == kernels[index] and not lasting & set(operation.writes)
        if near and _is_pointwise(nodes[index]) and operation.repeatable and operation.substitute is None:
            found[index] = read[0]
    return found


def _in_place(joint: Joint, kept: list[int], operations: list[Operation]) -> dict[int, int]:
    """Maps each backward operation that a compiler runs in place to the storage that it overwrites.

    That storage has the same size, its last reader is the operation, and a kernel of this backward has made it.
    """
    flow = joint.flow
    readers: dict[int, list[int]] = {}
    for place, operation in enumerate(operations):
        for storage in operation.reads:
            readers.setdefault(storage, []).append(place)
    made = {storage for index in range(flow.forward, len(joint.nodes)) if joint.nodes[index] is not None
            for storage in flow.operations[index].writes} - flow.results
    found = {}
    for place, operation in enumerate(operations):
        if kept[place] >= flow.forward and _is_pointwise(joint.nodes[kept[place]]) and len(operation.writes) == 1:
            size, read_last = flow.sizes_bytes[operation.writes[0]], made.intersection(operation.reads)
            alike = [s for s in sorted(read_last) if flow.sizes_bytes[s] == size and readers[s][-1] == place]
            if alike:
                found[place] = alike[0]
    return found


def _merged(flow: Dataflow, members: list[int]) -> Operation:
    """Several operations as one, which moves only the bytes that enter and leave the group."""
    operations = [flow.operations[index] for index in members]
    last = operations[-1]
    inside = {storage for operation in operations[:-1] for storage in operation.writes}
    reads = tuple(sorted({storage for operation in operations for storage in operation.reads} - inside))
    moved = sum(_bytes(flow, (*operation.reads, *operation.writes)) for operation in operations)
    share = _bytes(flow, (*reads, *last.writes)) / moved if moved and inside else 1.0
    return replace(
        last,
        reads=reads,
        seconds=share * sum(operation.seconds for operation in operations),
        flops=sum(operation.flops for operation in operations),
        workspace_bytes=max(operation.workspace_bytes for operation in operations),
    )


def _bytes(flow: Dataflow, storages: Iterable[int]) -> int:
    return sum(flow.sizes_bytes[storage] for storage in storages)


def _marked(joint: Joint) -> frozenset[int]:
    """The storages of marked tensors: they may be kept, so they are written to memory."""
    return frozenset[int]().union(*(joint.storages[node] for node in joint.views if mark_of(node) is not None))


def _is_pointwise(node: fx.Node | None) -> bool:
    name = str(getattr(node.target, "__name__", "")) if node is not None else ""  # such as full.default
    return _has(node, torch.Tag.pointwise) or name.startswith(_COMPUTED)


def _has(node: fx.Node | None, tag: torch.Tag) -> bool:
    return node is not None and tag in getattr(node.target, "tags", ())
