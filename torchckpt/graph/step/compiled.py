"""Compiled: a joint graph as a compiler runs it, with fused operations, and with updates of buffers at its end.

A pointwise operation whose result has a single reader is computed where it is read. It needs no storage, and a repeat
of the reader repeats it too. So the two become one operation here.

A schedule handles values, not in-place writes. So an update of a buffer is taken out of the joint graph, and its value
becomes an ordinary output. The emitted forward writes it into the buffer at its end. If the backward reads the old
value of such a buffer, the forward saves a copy of it before the write.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from torchckpt.graph.annotations import mark_of
from torchckpt.graph.step.joint import Joint
from torchckpt.planning.remat.flow.dataflow import Dataflow, Operation, Schedule

__all__ = ["Fusion", "Updates"]

_COPY: Any = torch.ops.aten.copy_.default

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
        merged = replace(flow, operations=tuple(operations), forward=forward)
        for place, taken in _in_place(joint, self._kept, merged).items():
            workspace_bytes = operations[place].workspace_bytes - flow.sizes_bytes[taken]
            operations[place] = replace(operations[place], workspace_bytes=workspace_bytes)
        repeats = {place: joint.repeats[index] for place, index in enumerate(self._kept) if index in joint.repeats}
        nodes = tuple(joint.nodes[index] for index in self._kept)
        flow = replace(merged, operations=tuple(operations))
        self.joint = replace(joint, flow=flow, nodes=nodes, repeats=repeats)

    def expanded(self, schedule: Schedule) -> Schedule:
        """The schedule of the original joint graph that a schedule of the merged ``joint`` stands for."""
        return [index for place in schedule for index in self._members[self._kept[place]]]


def _inlined(joint: Joint) -> dict[int, int]:
    """Maps each operation that is computed where it is read to the operation that reads it."""
    flow, nodes = joint.flow, joint.nodes
    kernels = list(accumulate(not (_is_pointwise(node) or _has(node, torch.Tag.reduction)) for node in nodes))
    marked = (joint.storages[node] for node in joint.views if mark_of(node) is not None)
    lasting = flow.results.union(flow.forward_results, *marked)  # marked tensors may be kept: they are in memory
    readers = {}
    for index, operation in enumerate(flow.operations):
        read = flow.readers.get(operation.writes[0], []) if len(operation.writes) == 1 else []
        near = len(read) == 1 and kernels[read[0]] == kernels[index] and not lasting & set(operation.writes)
        if near and _is_pointwise(nodes[index]) and operation.repeatable and operation.substitute is None:
            readers[index] = read[0]
    return readers


def _in_place(joint: Joint, kept: list[int], merged: Dataflow) -> dict[int, int]:
    """Maps each backward operation of ``merged`` that a compiler runs in place to the storage that it overwrites.

    That storage has the same size, its last reader is the operation, and a kernel of this backward has made it.
    """
    flow = joint.flow
    backward = [index for index in range(flow.forward, len(joint.nodes)) if joint.nodes[index] is not None]
    written = {storage for index in backward for storage in flow.operations[index].writes} - flow.results
    overwritten = {}
    for place, operation in enumerate(merged.operations):
        if kept[place] >= flow.forward and _is_pointwise(joint.nodes[kept[place]]) and len(operation.writes) == 1:
            size, read = flow.sizes_bytes[operation.writes[0]], written.intersection(operation.reads)
            alike = [s for s in sorted(read) if flow.sizes_bytes[s] == size and merged.readers[s][-1] == place]
            if alike:
                overwritten[place] = alike[0]
    return overwritten


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


def _is_pointwise(node: fx.Node | None) -> bool:
    name = str(getattr(node.target, "__name__", "")) if node is not None else ""  # such as full.default
    return _has(node, torch.Tag.pointwise) or name.startswith(_COMPUTED)


def _has(node: fx.Node | None, tag: torch.Tag) -> bool:
    return node is not None and tag in getattr(node.target, "tags", ())


class Updates:
    """The updates of ``graph``, a joint graph with ``forward_outputs`` forward outputs. They are removed from it.

    Instead, the graph gets ``values`` more outputs, right after those of the forward.
    """

    def __init__(self, graph: fx.Graph, forward_outputs: int) -> None:
        copies = graph.find_nodes(op="call_function", target=_COPY)
        nodes = [node for node in copies if isinstance(node.args[0], fx.Node) and node.args[0].op == "placeholder"]
        self._first = forward_outputs
        self._inputs = [node.args[0].name for node in nodes]
        values = [node.args[1] for node in nodes]
        for node, value in zip(nodes, values):
            node.replace_all_uses_with(value)
            graph.erase_node(node)
        output = graph.output_node()
        output.args = (_inserted(output.args[0], forward_outputs, values),)
        output.meta["desc"] = _inserted(output.meta.get("desc") or (), forward_outputs, [None] * len(values))

    @property
    def values(self) -> int:
        return len(self._inputs)

    def write(self, graph: fx.Graph) -> None:
        """Change ``graph``, a forward that returns the new values too, so that it writes them into the buffers."""
        output, after = graph.output_node(), self._first + self.values
        outputs: list[Any] = list(output.args[0])  # type: ignore[arg-type]
        inputs = {node.name: node for node in graph.find_nodes(op="placeholder")}
        saved = [self._before(graph, node) for node in outputs[after:]]
        with graph.inserting_before(output):
            for name, value in zip(self._inputs, outputs[self._first : after]):
                graph.call_function(_COPY, (inputs[name], value)).meta["val"] = inputs[name].meta["val"]
        output.args = ((*outputs[: self._first], *saved),)

    def _before(self, graph: fx.Graph, node: fx.Node) -> fx.Node:
        """The node to save for the backward: a copy made before the update, if ``node`` is updated."""
        if node.name not in self._inputs:
            return node
        with graph.inserting_before(graph.output_node()):
            copy = graph.call_function(torch.ops.aten.clone.default, (node,))
        copy.meta["val"] = node.meta["val"]
        return copy


def _inserted(values: Any, place: int, more: list[Any]) -> tuple[Any, ...]:
    return (*values[:place], *more, *values[place:])
