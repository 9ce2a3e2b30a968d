"""Joint: the traced graph of a call and its derivatives, described as operations on storages.

Storages take memory, not tensors: several views share one storage. So every node of the graph is one of three things:
an operation, which writes storages; a view, which writes none and is made again wherever it is read; or one output of
an operation. :class:`~torchckpt.planning.remat.flow.dataflow.Dataflow` describes the operations, and
:mod:`~torchckpt.graph.step.emit` turns a schedule of them into graphs.
"""
from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, fx

from torchckpt.graph.private.runtime import is_backward, note_branches, storage_number
from torchckpt.graph.private.trace import GRADIENTS_STAY, input_place, mutated_inputs, uncompiled
from torchckpt.graph.step.costs import Cost, CostOf
from torchckpt.graph.step.repeat import (
    Repeat,
    as_eager_runs,
    forget_statistics,
    nodes_in,
    record_states,
    refuse_generators,
    repeat_of,
    runs_once,
)
from torchckpt.planning.remat.flow.dataflow import Dataflow, Operation
from torchckpt.tensors import tensors_in

__all__ = ["Joint", "added_in_place", "copied", "is_sum", "joint_of", "needed", "reached"]

_TANGENTS = "tangents"
_CUDA_BLOCK_BYTES = 512  # CUDA's caching allocator gives whole blocks


@dataclass(frozen=True)
class Joint:
    """A joint graph and the dataflow of its operations.

    Args:
        nodes: the node of each operation; None for the arrival of the gradients of the outputs.
        repeats: by operation, the substitute that a repeat runs.
        storages: by tensor node, its storage; a sparse tensor has one for each of its parts.
        views: the nodes that write no storage.
        changed: the inputs that have a new value after the forward.
        sums: by sum of two gradients that is added in place, the operand that it overwrites.
    """

    module: fx.GraphModule
    forward_outputs: int
    flow: Dataflow
    nodes: tuple[fx.Node | None, ...]
    repeats: dict[int, Repeat]
    storages: dict[fx.Node, frozenset[int]]
    views: frozenset[fx.Node]
    tangents: tuple[fx.Node, ...]
    changed: frozenset[fx.Node] = frozenset()
    sums: Mapping[fx.Node, fx.Node] = field(default_factory=dict)

    @property
    def outputs(self) -> tuple[Any, ...]:
        """The forward's outputs, then the gradients; some may be None."""
        return tuple(cast(Iterable[Any], self.module.graph.output_node().args[0]))


def joint_of(module: fx.GraphModule, forward_outputs: int, cost: CostOf, replay: bool = False) -> Joint:
    """Make the :class:`Joint` of a joint graph whose first ``forward_outputs`` outputs are the forward's.

    Args:
        replay: let random operations be repeated, each from the saved state of its generator. Default: False.
    """
    module = uncompiled(module, copied(module.graph))
    note_branches(module)
    forget_statistics(module.graph)
    as_eager_runs(module.graph)
    refuse_generators(module.graph)
    module.graph.eliminate_dead_code()
    if replay:
        record_states(module.graph)
    return _Builder(module.graph, forward_outputs, cost).joint(module)


class _Builder:
    """Numbers the storages of a graph, and lists its operations: the forward's, the arrival of gradients, the rest."""

    def __init__(self, graph: fx.Graph, forward_outputs: int, cost: CostOf) -> None:
        self._cost, self._costs = cost, dict[fx.Node, Cost]()
        self._sizes: list[int] = []
        self._storages: dict[fx.Node, frozenset[int]] = {}
        self._writes: dict[fx.Node, tuple[int, ...]] = {}  # of each operation
        self._views: set[fx.Node] = set()
        self._known: dict[int, int] = {}
        self._tangents = [node for node in graph.find_nodes(op="placeholder") if node.name.startswith(_TANGENTS)]
        outputs = list(cast(Iterable[Any], graph.output_node().args[0]))
        mutated = mutated_inputs(graph.output_node())
        self._new_values = [outputs[place] for place in mutated if place < forward_outputs]
        self._changed = [node for node in graph.find_nodes(op="placeholder") if input_place(node) in mutated.values()]
        self._outputs, self._gradients = outputs[:forward_outputs], outputs[forward_outputs:]
        for node in graph.nodes:
            self._add(node)
        once = {node for node in self._writes if self._runs_once(node) and not is_backward(node)}
        forward = needed([*nodes_in(self._outputs), *(once - reached(self._tangents))])
        first = [node for node in self._writes if node in forward]
        arrival = [None] if self._tangents else []
        self._forward = len(first)
        self._order: tuple[fx.Node | None, ...] = (*first, *arrival, *(n for n in self._writes if n not in forward))

    def joint(self, module: fx.GraphModule) -> Joint:
        repeats = {index: repeat for index, node in enumerate(self._order) if node and (repeat := repeat_of(node))}
        operations = [self._operation(node, repeats.get(index)) for index, node in enumerate(self._order)]
        self._keep_order(operations)
        self._begin_with_arrival(operations)
        sources = [node for node in self._storages if node.op in ("placeholder", "get_attr")]
        given = self._roots_of(sources) - self._roots_of(self._tangents)
        passing = self._roots_of(self._new_values) - given
        lasting = [output for output in self._outputs if output not in self._new_values]
        staying = self._tangents if GRADIENTS_STAY else []
        results = self._roots_of([*lasting, *self._gradients, *staying]) - given
        flow = Dataflow(tuple(operations), tuple(self._sizes), self._forward, given, results, passing - results)
        return Joint(module, len(self._outputs), flow, self._order, repeats, self._storages, frozenset(self._views),
                     tuple(self._tangents), frozenset(self._changed))

    def _keep_order(self, operations: list[Operation]) -> None:
        """Let each operation that runs once read a token of the one before: so they keep their order."""
        before: tuple[int, ...] = ()
        for index, node in enumerate(self._order):
            if node is not None and self._runs_once(node):
                operation, token = operations[index], len(self._sizes)
                self._sizes.append(0)
                reads, writes = (*operation.reads, *before), (*operation.writes, token)
                operations[index] = replace(operation, reads=reads, writes=writes)
                before = (token,)

    def _begin_with_arrival(self, operations: list[Operation]) -> None:
        """Let what the backward makes of saved values alone read a token of the arrival: gradients are there first."""
        arrival, token = self._forward, len(self._sizes)
        backward = operations[arrival:] if self._tangents else []
        written = {storage for operation in backward for storage in operation.writes}
        early = [index for index, o in enumerate(backward) if index and written.isdisjoint(o.reads)]
        if early:
            self._sizes.append(0)
            operations[arrival] = replace(backward[0], writes=(*backward[0].writes, token))
        for index in early:
            operations[arrival + index] = replace(backward[index], reads=(*backward[index].reads, token))

    def _operation(self, node: fx.Node | None, repeat: Repeat | None) -> Operation:
        if node is None:
            return Operation(_TANGENTS, (), self._reads_of(self._tangents), 0.0, repeatable=False)
        cost = self._costs[node]
        reads, writes = self._reads_of(node.all_input_nodes), self._writes[node]
        substitute = None if repeat is None else self._substitute(node.name, repeat)
        changed = self._roots_of(self._changed).intersection(reads if substitute is None else substitute.reads)
        # A changed input has a new value afterwards, so its readers cannot be repeated.
        once = bool(changed) or (self._runs_once(node) and repeat is None)
        return Operation(node.name, reads, writes, cost.seconds, cost.flops, cost.workspace_bytes, not once, substitute)

    def _runs_once(self, node: fx.Node) -> bool:
        return runs_once(node) or self._costs[node].draws

    def _substitute(self, name: str, repeat: Repeat) -> Operation:
        """``repeat`` as an operation, with the costs of the nodes that it emits. Intermediate values are workspace."""
        graph = fx.Graph()
        inputs = {node: graph.placeholder(node.name) for node in repeat.reads}
        for node, placeholder in inputs.items():
            placeholder.meta["val"] = node.meta["val"]
        repeat.emit(graph, lambda argument: fx.node.map_arg(argument, inputs.__getitem__))
        emitted = [node for node in graph.nodes if node.op == "call_function" and node.target is not operator.getitem]
        costs = [self._cost(node) for node in emitted]
        seconds, flops = sum(cost.seconds for cost in costs), sum(cost.flops for cost in costs)
        reads, writes = self._reads_of(repeat.reads), self._reads_of(repeat.writes)
        return Operation(name, reads, writes, seconds, flops, max(cost.workspace_bytes for cost in costs))

    def _add(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if node.op == "output" or (value is None and node.op != "call_function"):
            return
        is_called = node.op == "call_function"
        if is_called and _is_sparse(value) and not sum(self._cost(node).made_bytes):  # made of others without a copy
            self._storages[node] = self._roots_of(node.all_input_nodes)
            self._views.add(node)
            return
        parts = tensors_in(value)
        keys = list(map(storage_number, parts))
        fresh = [key for key in dict.fromkeys(keys) if key not in self._known]
        is_part = node.target is operator.getitem and node.all_input_nodes[0] not in self._views
        if is_called and not is_part and (fresh or not parts):
            self._costs[node] = self._cost(node)
        unread = self._unread_copies(node, keys)
        first = len(self._sizes)
        for key in fresh:
            self._known[key] = len(self._sizes)
            places = [place for place, other in enumerate(keys) if other == key and place not in unread]
            self._sizes.append(self._allocated_bytes(node, parts, places))
        self._sizes += [self._allocated_bytes(node, parts, [place]) for place in unread]
        if isinstance(value, Tensor):
            self._storages[node] = frozenset({self._known[keys[0]]})
        if node in self._costs:
            self._writes[node] = tuple(range(first, len(self._sizes)))
        elif is_called and not is_part:
            self._views.add(node)

    def _unread_copies(self, node: fx.Node, keys: list[int]) -> list[int]:
        """Places of unread outputs that share a storage with another output in the trace, but not in a run.

        For example, the trace has one tensor for the gradients of both biases of a recurrent layer.
        """
        made_bytes = self._costs[node].made_bytes if node in self._costs else ()
        if len(set(keys)) == len(keys) or len(made_bytes) != len(keys):
            return []
        read = {user.args[1] for user in node.users if user.target is operator.getitem}
        order = sorted(range(len(keys)), key=lambda place: place not in read)  # outputs that are read come first
        stands = {keys[place]: place for place in reversed(order)}
        return [place for place in order if place not in read and stands[keys[place]] != place and made_bytes[place]]

    def _allocated_bytes(self, node: fx.Node, parts: list[Tensor], places: list[int]) -> int:
        """The size of a storage that holds the parts at ``places``: as measured in a run, else as traced.

        The two may differ: in a run a loss may be a view of a larger tensor, and the trace may merge two tensors.
        """
        part = parts[places[0]]
        made_bytes = self._costs[node].made_bytes if node in self._costs else ()
        if _is_sparse(part):  # 0 for an input
            return sum(made_bytes)
        size = sum(made_bytes[place] for place in places) if len(made_bytes) == len(parts) else 0
        size = size or part.untyped_storage().nbytes()
        return size if part.device.type == "cpu" else -(-size // _CUDA_BLOCK_BYTES) * _CUDA_BLOCK_BYTES

    def _reads_of(self, nodes: Iterable[fx.Node]) -> tuple[int, ...]:
        return tuple(sorted(self._roots_of(nodes)))

    def _roots_of(self, nodes: Iterable[Any]) -> frozenset[int]:
        none = frozenset[int]()
        return none.union(*(self._storages.get(node, none) for node in nodes_in(nodes)))


def added_in_place(joint: Joint) -> Joint:
    """``joint`` with sums of gradients that overwrite one of their operands, as autograd adds. Each runs only once.

    A backward that adds out of place holds three tensors where autograd holds two. An operand is overwritten if an
    operator of torch makes it in the backward, in a storage of its own that fits it and the sum alike, and the sum
    alone reads it.
    """
    flow, operations = joint.flow, list(joint.flow.operations)
    backward = reached(joint.tangents)
    tensors = Counter(storage for storages in joint.storages.values() for storage in storages)
    alone = {storage for storage, count in tensors.items() if count == 1} - flow.results - flow.given
    sums: dict[fx.Node, fx.Node] = {}
    for index in range(flow.forward, len(operations)):
        node = joint.nodes[index]
        if node is None or node not in backward or not is_sum(node):
            continue
        (size,) = (flow.sizes_bytes[storage] for storage in operations[index].writes)
        for part in node.all_input_nodes:
            fits = joint.storages[part] <= alone and [flow.sizes_bytes[s] for s in joint.storages[part]] == [size]
            if fits and part in backward and _is_free(part, node):
                sums[node] = part
                less = operations[index].workspace_bytes - size
                operations[index] = replace(operations[index], workspace_bytes=less, repeatable=False)
                break
    return replace(joint, flow=replace(flow, operations=tuple(operations)), sums=sums)


def _is_free(part: fx.Node, node: fx.Node) -> bool:
    """Whether ``node`` alone reads ``part``, which an operator of torch has made with the layout of ``node``."""
    maker = part.args[0] if part.target is operator.getitem else part
    value = part.meta["val"]
    is_whole = value.untyped_storage().nbytes() == value.numel() * value.element_size()
    is_torch = getattr(getattr(maker, "target", None), "namespace", "") == "aten"
    return is_torch and is_whole and value.stride() == node.meta["val"].stride() and set(part.users) == {node}


def copied(graph: fx.Graph) -> fx.Graph:
    """A copy of ``graph`` that shares only the values in ``meta``."""
    copy, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        nodes[node] = copy.node_copy(node, nodes.__getitem__)
    return copy


def _is_sparse(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout != torch.strided


def is_sum(node: fx.Node) -> bool:
    """Whether autograd adds two gradients of one value here, if ``node`` depends on gradients."""
    if node.target is not torch.ops.aten.add.Tensor or node.kwargs or len(node.all_input_nodes) != 2:
        return False
    return len({(part.meta["val"].shape, part.meta["val"].dtype) for part in (node, *node.all_input_nodes)}) == 1


def reached(sources: Iterable[fx.Node]) -> set[fx.Node]:
    """``sources`` and every node that depends on one of them."""
    return _closed(sources, lambda node: node.users)


def needed(targets: Iterable[fx.Node]) -> set[fx.Node]:
    """``targets`` and every node that one of them depends on."""
    return _closed(targets, lambda node: node.all_input_nodes)


def _closed(nodes: Iterable[fx.Node], following: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    stack, closed = list(nodes), set[fx.Node]()
    while stack:
        if (node := stack.pop()) not in closed:
            closed.add(node)
            stack.extend(following(node))
    return closed
