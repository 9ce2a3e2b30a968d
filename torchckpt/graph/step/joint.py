"""Joint: the traced graph of a call and its derivatives, described as operations on storages.

Storages take memory, not tensors: several views share one storage. So every node of the graph is one of three things:
an operation, which writes storages; a view, which writes none and is made again wherever it is read; or one output of
an operation. :class:`~torchckpt.planning.remat.flow.dataflow.Dataflow` describes the operations, and
:mod:`~torchckpt.graph.step.emit` turns a schedule of them into graphs.
"""
from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, fx

from torchckpt.graph.private.runtime import note_branches, storage_of
from torchckpt.graph.private.trace import GRADIENTS_STAY, input_place, mutated_inputs, uncompiled
from torchckpt.graph.step.costs import Cost, CostOf
from torchckpt.graph.step.repeat import Repeat, as_eager_runs, forget_statistics, repeat_of, runs_once
from torchckpt.graph.step.rng import record_states, refuse_generators
from torchckpt.planning.remat.flow.dataflow import Dataflow, Operation
from torchckpt.tensors import tensors_in

__all__ = ["Joint", "is_sum", "joint_of", "needed", "reached"]

TANGENTS = "tangents"
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
    builder = _Builder(module.graph, forward_outputs, cost)
    flow, repeats = builder.flow()
    return Joint(module, forward_outputs, flow, builder.order, repeats, builder.storages, frozenset(builder.views),
                 tuple(builder.tangents), frozenset(builder.changed))


class _Builder:
    def __init__(self, graph: fx.Graph, forward_outputs: int, cost: CostOf) -> None:
        self._cost, self._costs = cost, dict[fx.Node, Cost]()
        self.sizes: list[int] = []
        self.storages: dict[fx.Node, frozenset[int]] = {}
        self.writes: dict[fx.Node, tuple[int, ...]] = {}  # of each operation
        self.views: set[fx.Node] = set()
        self._known: dict[int, int] = {}
        self.tangents = [node for node in graph.find_nodes(op="placeholder") if node.name.startswith(TANGENTS)]
        outputs = list(cast(Iterable[Any], graph.output_node().args[0]))
        mutated = mutated_inputs(graph.output_node())
        self.new_values = [outputs[place] for place in mutated if place < forward_outputs]
        self.changed = [node for node in graph.find_nodes(op="placeholder") if input_place(node) in mutated.values()]
        self.outputs, self.gradients = outputs[:forward_outputs], outputs[forward_outputs:]
        for node in graph.nodes:
            self._add(node)
        after = reached(self.tangents)
        forward = needed([*_nodes(self.outputs), *(n for n in self.writes if self._runs_once(n) and n not in after)])
        first = [node for node in self.writes if node in forward]
        arrival = [None] if self.tangents else []
        self.forward = len(first)
        self.order: tuple[fx.Node | None, ...] = (*first, *arrival, *(n for n in self.writes if n not in forward))

    def flow(self) -> tuple[Dataflow, dict[int, Repeat]]:
        repeats = {index: repeat for index, node in enumerate(self.order) if node and (repeat := repeat_of(node))}
        operations = [self._operation(node, repeats.get(index)) for index, node in enumerate(self.order)]
        self._keep_order(operations)
        there = [node for node in self.storages if node.op in ("placeholder", "get_attr")]
        given = self._roots_of(there) - self._roots_of(self.tangents)
        passing = self._roots_of(self.new_values) - given
        lasting = [output for output in self.outputs if output not in self.new_values]
        staying = self.tangents if GRADIENTS_STAY else []
        results = self._roots_of([*lasting, *self.gradients, *staying]) - given
        sizes = tuple(self.sizes)
        return Dataflow(tuple(operations), sizes, self.forward, given, results, passing - results), repeats

    def _keep_order(self, operations: list[Operation]) -> None:
        """Let each operation that runs once read a token of the one before: so they keep their order."""
        before: tuple[int, ...] = ()
        for index, node in enumerate(self.order):
            if node is not None and self._runs_once(node):
                operation, token = operations[index], len(self.sizes)
                self.sizes.append(0)
                reads, writes = (*operation.reads, *before), (*operation.writes, token)
                operations[index] = replace(operation, reads=reads, writes=writes)
                before = (token,)

    def _operation(self, node: fx.Node | None, repeat: Repeat | None) -> Operation:
        if node is None:
            return Operation(TANGENTS, (), self._reads_of(self.tangents), 0.0, repeatable=False)
        cost = self._costs[node]
        reads, writes = self._reads_of(node.all_input_nodes), self.writes[node]
        substitute = None if repeat is None else self._substitute(node.name, repeat)
        changed = self._roots_of(self.changed).intersection(reads if substitute is None else substitute.reads)
        # A changed input has a new value afterwards, so its readers cannot be repeated.
        once = bool(changed) or (self._runs_once(node) and repeat is None)
        return Operation(node.name, reads, writes, cost.seconds, cost.flops, cost.workspace_bytes, not once, substitute)

    def _runs_once(self, node: fx.Node) -> bool:
        return runs_once(node) or self._costs[node].draws

    def _substitute(self, name: str, repeat: Repeat) -> Operation:
        """``repeat`` as an operation, with the costs of the nodes that it emits. Intermediate values are workspace."""
        graph, inputs = fx.Graph(), dict[fx.Node, fx.Node]()

        def resolve(argument: Any) -> Any:
            return fx.node.map_arg(argument, given)

        def given(node: fx.Node) -> fx.Node:
            if node not in inputs:
                inputs[node] = graph.placeholder(node.name)
                inputs[node].meta["val"] = node.meta["val"]
            return inputs[node]

        repeat.emit(graph, resolve)
        made = [node for node in graph.nodes if node.op == "call_function" and node.target is not operator.getitem]
        costs = [self._cost(node) for node in made]
        seconds, flops = sum(cost.seconds for cost in costs), sum(cost.flops for cost in costs)
        reads, writes = self._reads_of(repeat.reads), self._reads_of(repeat.writes)
        return Operation(name, reads, writes, seconds, flops, max(cost.workspace_bytes for cost in costs))

    def _add(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if node.op == "output" or (value is None and node.op != "call_function"):
            return
        if self._is_made_of_others(node):
            self.storages[node] = self._roots_of(node.all_input_nodes)
            self.views.add(node)
            return
        parts = tensors_in(value)
        keys = [storage_of(part) for part in parts]
        fresh = [key for key in dict.fromkeys(keys) if key not in self._known]
        is_called = node.op == "call_function" and not self._is_part(node)
        if is_called and (fresh or not parts):
            self._costs[node] = self._cost(node)
        unread = self._unread_copies(node, keys)
        first = len(self.sizes)
        for key in fresh:
            self._known[key] = len(self.sizes)
            places = [place for place, other in enumerate(keys) if other == key and place not in unread]
            self.sizes.append(self._allocated_bytes(node, parts, places))
        self.sizes += [self._allocated_bytes(node, parts, [place]) for place in unread]
        if isinstance(value, Tensor):
            self.storages[node] = frozenset({self._known[keys[0]]})
        if node in self._costs:
            self.writes[node] = tuple(range(first, len(self.sizes)))
        elif is_called:
            self.views.add(node)

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
        seen = self._costs[node].made_bytes if node in self._costs else ()
        if _is_sparse(part):  # 0 for an input
            return sum(seen)
        size = sum(seen[place] for place in places) if len(seen) == len(parts) else 0
        size = size or part.untyped_storage().nbytes()
        return size if part.device.type == "cpu" else -(-size // _CUDA_BLOCK_BYTES) * _CUDA_BLOCK_BYTES

    def _is_made_of_others(self, node: fx.Node) -> bool:
        """Whether ``node`` is a sparse tensor made of existing tensors, its indices and values, without a copy."""
        is_called = _is_sparse(node.meta.get("val")) and node.op == "call_function"
        return is_called and not sum(self._cost(node).made_bytes)

    def _is_part(self, node: fx.Node) -> bool:
        """Whether ``node`` is one of the outputs of an operation."""
        return node.target is operator.getitem and node.all_input_nodes[0] not in self.views

    def _reads_of(self, nodes: Iterable[fx.Node]) -> tuple[int, ...]:
        return tuple(sorted(self._roots_of(nodes)))

    def _roots_of(self, nodes: Iterable[Any]) -> frozenset[int]:
        none: frozenset[int] = frozenset()
        return none.union(*(self.storages.get(node, none) for node in _nodes(nodes)))


def copied(graph: fx.Graph) -> fx.Graph:
    """A copy of ``graph`` that shares only the values in ``meta``."""
    made, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        nodes[node] = made.node_copy(node, nodes.__getitem__)
    return made


def _is_sparse(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout != torch.strided


def _nodes(values: Iterable[Any]) -> list[fx.Node]:
    return [value for value in values if isinstance(value, fx.Node)]


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
    stack, found = list(nodes), set[fx.Node]()
    while stack:
        if (node := stack.pop()) not in found:
            found.add(node)
            stack.extend(following(node))
    return found
