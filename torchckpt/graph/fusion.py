"""Fusion: a joint graph as a compiler sees it that never writes what one neighbour alone reads.

A pointwise operation whose result has a single reader is computed where it is read: there is no storage for it, and who
repeats the reader repeats it too. So the two become one operation, and a schedule of such operations one of all.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate

import torch
from torch import fx

from torchckpt.graph.joint import Joint
from torchckpt.graph.notes import mark_of
from torchckpt.model.remat.dataflow import Dataflow, Operation, Schedule

__all__ = ["Fusion"]

_COMPUTED = ("full.", "iota.", "scalar_tensor.", "inductor_lookup_seed.", "inductor_random.", "inductor_randint.")
"""Made of nothing, or of a seed, in the kernel that reads it."""


class Fusion:
    """``joint`` is the joint graph given, with pointwise operations a part of the neighbour that reads them.

    Neighbours have no kernel of its own between them: no product, no convolution, nothing that is neither pointwise nor
    a reduction.
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
        agains = {place: joint.agains[index] for place, index in enumerate(self._kept) if index in joint.agains}
        nodes = tuple(joint.nodes[index] for index in self._kept)
        made = replace(flow, operations=tuple(operations), forward=forward)
        self.joint = replace(joint, flow=made, nodes=nodes, agains=agains)

    def expanded(self, schedule: Schedule) -> Schedule:
        """A schedule of ``joint`` as one of the joint graph given."""
        return [index for place in schedule for index in self._members[self._kept[place]]]


def _inlined(joint: Joint) -> dict[int, int]:
    """Of each operation that is computed where it is read, the one that reads it."""
    flow, nodes = joint.flow, joint.nodes
    kernels = list(accumulate(not (_is_pointwise(node) or _is_reduction(node)) for node in nodes))
    readers: dict[int, list[int]] = {}
    for index, operation in enumerate(flow.operations):
        for storage in operation.reads:
            readers.setdefault(storage, []).append(index)
    lasting = flow.results | flow.forward_results | _marked(joint)
    found = {}
    for index, operation in enumerate(flow.operations):
        read = readers.get(operation.writes[0], []) if len(operation.writes) == 1 else []
        near = len(read) == 1 and kernels[read[0]] == kernels[index] and not lasting & set(operation.writes)
        if near and _is_pointwise(nodes[index]) and operation.repeatable and operation.again is None:
            found[index] = read[0]
    return found


def _in_place(joint: Joint, kept: list[int], operations: list[Operation]) -> dict[int, int]:
    """Of each operation of the backward that writes over a storage which nobody reads after it, that storage.

    A compiler does so where sizes are the same, and with what its kernels have made, not with what they are given.
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
    """Operations as one, which moves only what enters and leaves it."""
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
    """What carries a mark may be kept, so that it is written."""
    return frozenset[int]().union(*(joint.storages[node] for node in joint.views if mark_of(node) is not None))


def _is_pointwise(node: fx.Node | None) -> bool:
    return node is not None and (_has(node, torch.Tag.pointwise) or _name(node).startswith(_COMPUTED))


def _is_reduction(node: fx.Node | None) -> bool:
    return node is not None and _has(node, torch.Tag.reduction)


def _has(node: fx.Node, tag: torch.Tag) -> bool:
    return tag in getattr(node.target, "tags", ())


def _name(node: fx.Node) -> str:
    """Such as ``full.default``."""
    return str(getattr(node.target, "__name__", ""))
