"""Halves: the forward and the backward of a joint graph, and the backwards that miss some gradients of outputs.

AOTAutograd replaces missing gradients, of outputs that no loss reads, by zeros. Eager skips the operations that depend
only on them: a parameter that no loss depends on has the gradient None, and an optimizer applies no weight decay to it.
Zeros would also cost time, and give NaN where a derivative is infinite. So the backward of the plan is emitted again
without these operations. The other operations keep their order.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from threading import get_ident
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef

from torchckpt.errors import CaptureError, Fault
from torchckpt.graph.private.trace import backward_node, output_places, retainable, tangent_places
from torchckpt.graph.step.costs import CostOf
from torchckpt.graph.step.emit import Emitter, emit, forward_of
from torchckpt.graph.step.joint import Joint, added_in_place, is_sum, joint_of, reached
from torchckpt.planning.remat.flow.dataflow import Operation, Schedule
from torchckpt.planning.remat.flow.memory import simulate
from torchckpt.planning.remat.plan import Plan

__all__ = ["Backward", "Choose", "Halves", "Unread", "narrowed"]

Choose = Callable[[Joint], Schedule]
"""Returns the schedule of a joint graph."""

Backward = Callable[[list[Any]], Sequence[Any]]
"""Takes one list, the saved values and then the gradients of the outputs, and empties it."""

_Storages: TypeAlias = Mapping[int, StorageWeakRef]
"""By place of an output of the forward: the storage that the caller got."""


@dataclass(frozen=True)
class Unread:
    """What a backward went without.

    Args:
        missing: the placeholders of the gradients of outputs that did not arrive.
        released: storages of outputs without a gradient that the caller held no more.
    """

    missing: frozenset[fx.Node] = frozenset()
    released: frozenset[int] = frozenset()


class Halves:
    """The forward and the backwards of one joint graph. AOTAutograd calls ``partition``, and runs what it returns.

    A backward runs without the gradients of outputs that no loss reads, and may retain its graph. For each choice of
    missing gradients it is emitted when it is first needed.

    Args:
        cost: returns the cost of an operation.
        choose: returns the schedule of the joint graph.
        replay: whether random operations may be repeated. Default: False.
        note: called after each backward with what it went without.
    """

    joint: Joint
    unread = Unread()
    """What the latest backward went without."""

    def __init__(
        self, cost: CostOf, choose: Choose, replay: bool = False, note: Callable[[Unread], None] = lambda unread: None
    ) -> None:
        self._cost, self._choose, self._replay, self._note = cost, choose, replay, note
        self._emitted: dict[frozenset[fx.Node], Backward | None] = {}  # by the gradients that are missing
        self._gradients = 0  # as many as inputs; 0 if nothing is differentiated
        self._arrived: dict[int, tuple[set[int], _Storages]] = {}  # by thread: autograd has one for each device

    def partition(
        self, module: fx.GraphModule, inputs: Sequence[Any], *, num_fwd_outputs: int, **ignored: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The forward and the backward of the schedule that is chosen for a joint graph."""
        self.joint = joint = added_in_place(joint_of(module, num_fwd_outputs, self._cost, self._replay))
        self._schedule = self._choose(joint)
        self._boundary = simulate(joint.flow, self._schedule).boundary
        forward, backward = emit(joint, self._schedule, self._boundary)
        self._gradients = len(joint.outputs) - num_fwd_outputs
        self._takes = [str(node.target) for node in backward.graph.find_nodes(op="placeholder")]
        self._places, self._outputs = tangent_places(joint.module.graph), output_places(joint.module.graph)
        self._roots = [joint.storages.get(node, frozenset[int]()) for node in joint.outputs[:num_fwd_outputs]]
        return forward, backward

    def watch(self, outputs: Sequence[Any]) -> None:
        """Record which gradients of the call's ``outputs`` arrive in its backwards."""
        if not self._gradients:
            return
        tensors = {number: output for number, output in enumerate(outputs) if isinstance(output, Tensor)}
        nodes = {backward_node(tensor, self._gradients) for tensor in tensors.values()} - {None}
        strided = [number for number, tensor in tensors.items() if nodes and tensor.layout == torch.strided]
        storages = {
            place: StorageWeakRef(tensors[number].untyped_storage())  # type: ignore[no-untyped-call]  # in torch
            for place, number in self._outputs.items() if number in strided
        }
        for node in nodes:
            retainable(node)
            node.register_prehook(partial(self._arrive, storages))

    def backward(self, whole: Backward, arguments: list[Any]) -> Sequence[Any]:
        """Run ``whole``, the second graph, or the part of it for the gradients that have arrived in this thread.

        That gets the same list. If it would need values that are not in it, ``whole`` gets zeros.
        """
        arrived, storages = self._arrived.pop(get_ident(), (set(self._places.values()), {}))
        missing = frozenset(tangent for tangent, place in self._places.items() if place not in arrived)
        if missing and missing not in self._emitted:
            self._emitted[missing] = self._emit(missing)
        part = self._emitted.get(missing)
        gradients = (part or whole)(arguments)
        self.unread = Unread(missing, self._released(missing, storages)) if part else Unread()
        self._note(self.unread)
        return gradients

    def _arrive(self, storages: _Storages, gradients: Sequence[Any]) -> None:
        # Not a post-hook: autograd would keep all arrived gradients alive for it.
        if torch.is_grad_enabled():
            rule = "the backward of a traced call cannot be differentiated"
            works = "the original model for second derivatives, with torchckpt.checkpoint inside it to save memory"
            raise CaptureError(str(Fault(rule, "a backward with create_graph=True", works)))
        arrived = {place for place, gradient in enumerate(gradients) if gradient is not None}
        self._arrived[get_ident()] = arrived, storages

    def _released(self, missing: Set[fx.Node], storages: _Storages) -> frozenset[int]:
        """The storages of outputs that have no gradient, and that nobody holds any more."""
        read = {place for tangent, place in self._places.items() if tangent not in missing}
        freed = [place for place, storage in storages.items() if place not in read and storage.expired()]  # type: ignore[no-untyped-call]
        none = frozenset[int]()
        return none.union(*map(self._roots.__getitem__, freed)).difference(*map(self._roots.__getitem__, read))

    def _emit(self, missing: frozenset[fx.Node]) -> Backward | None:
        forward = forward_of(self.joint, self._schedule[: self._boundary])
        emitter = _Without(self.joint, forward, _Absent(self.joint, missing))
        emitter.run(self._schedule[self._boundary :])
        gradients = self.joint.outputs[self.joint.forward_outputs :]
        present = [None if node in emitter.absent.nodes else node for node in gradients]
        module = emitter.finish(emitter.resolve(present), "PartialBackward")
        takes = [str(node.target) for node in module.graph.find_nodes(op="placeholder")]
        if not set(takes) <= set(self._takes):  # a value that the whole backward does not get
            return None
        places = [self._takes.index(name) for name in takes]

        def run(arguments: list[Any]) -> Sequence[Any]:
            taken = [arguments[place] for place in places]
            arguments.clear()
            return module.forward(taken)  # type: ignore[no-any-return]

        return run


class _Absent:
    """Nodes to leave out. ``nodes`` depend only on ``missing`` gradients; ``same`` maps a sum of two gradients, one of
    which is absent, to the other one."""

    def __init__(self, joint: Joint, missing: Set[fx.Node]) -> None:
        self.nodes: set[fx.Node] = set(missing)
        self.same: dict[fx.Node, fx.Node] = {}
        gradients = reached(joint.tangents)
        for node in joint.module.graph.nodes:
            sources = [source for source in node.all_input_nodes if source in gradients]
            absent = [source for source in sources if source in self.nodes]
            if node in gradients and absent and node.op == "call_function":
                if len(absent) == len(sources):
                    self.nodes.add(node)
                elif is_sum(node):
                    self.same[node] = next(source for source in sources if source not in self.nodes)

    def is_copied(self, node: fx.Node) -> bool:
        """Whether ``node`` is in ``same`` and a copy of the other gradient: a view would keep its whole storage."""
        return node in self.same and self.bytes_of(self.same[node]) > self.bytes_of(node)

    @staticmethod
    def bytes_of(node: fx.Node) -> int:
        return int(node.meta["val"].untyped_storage().nbytes())


class _Without(Emitter):
    """Emits a backward without the absent nodes. An operation that still reads one of them gets zeros."""

    def __init__(self, joint: Joint, before: Emitter, absent: _Absent) -> None:
        # An operand that stands for another value is not overwritten: others may read that value.
        sums = {node: part for node, part in joint.sums.items() if part not in absent.same}
        inputs = [node for node in joint.tangents if node not in absent.nodes]
        super().__init__(replace(joint, sums=sums), inputs, before)
        self.absent = absent

    def _run(self, index: int) -> None:
        node = self.joint.nodes[index]
        if node is None or not (node in self.absent.nodes or node in self.absent.same):
            super()._run(index)
        elif self.absent.is_copied(node):
            part = self.resolve(self.absent.same[node])
            self._newest[node] = self.graph.call_function(torch.ops.aten.clone.default, (part,))

    def _node(self, node: fx.Node) -> fx.Node:
        if node in self.absent.nodes:
            return self._zeros(node.meta["val"])
        is_same = node in self.absent.same and node not in self._newest
        return self._node(self.absent.same[node]) if is_same else super()._node(node)

    def _zeros(self, like: Tensor) -> fx.Node:
        """Zeros with the strides of the gradient that they replace, which may be an expanded scalar."""
        size = like.untyped_storage().nbytes() // like.element_size()
        whole = self.graph.call_function(torch.zeros, (size,), {"dtype": like.dtype, "device": like.device})
        return self.graph.call_function(torch.as_strided, (whole, like.shape, like.stride(), like.storage_offset()))


# its plan -------------------------------------------------------------------------------------------------------------


def narrowed(joint: Joint, plan: Plan, unread: Unread) -> Plan:
    """The part of ``plan`` that a backward runs without what is ``unread``.

    The forward stays that of all outputs, since a loss may read them at the next call. What it saves for the missing
    gradients alone is freed when the backward starts.
    """
    flow, narrow = plan.flow, _Narrow(joint, plan, unread.missing)
    staying = flow.results.intersection(flow.operations[flow.forward].writes)  # gradients of outputs, before torch 2.13
    results = narrow.stand_ins(flow.results) - unread.released | staying
    steps = narrow.live_steps(results)
    kept = sorted(set(steps))
    place = {index: position for position, index in enumerate(kept)}
    operations = tuple(narrow.operations[index] for index in kept)
    passing = flow.forward_results | unread.released & flow.results
    flow = replace(flow, operations=operations, results=results, forward_results=passing)
    paths = tuple(plan.paths[index] for index in kept)
    return replace(plan, flow=flow, schedule=tuple(place[index] for index in steps), paths=paths, whole=plan)


class _Narrow:
    """The operations that are left, by their index in ``joint``, and what stands for the storages of the others."""

    def __init__(self, joint: Joint, plan: Plan, missing: frozenset[fx.Node]) -> None:
        self._joint, self._plan, self._absent = joint, plan, _Absent(joint, missing)
        self.operations: dict[int, Operation] = {}
        arrived = frozenset[int]().union(*(joint.storages[node] for node in joint.tangents if node not in missing))
        absent = frozenset[int]().union(*(joint.storages[node] for node in missing)) - arrived
        self._stands: dict[int, frozenset[int]] = dict.fromkeys(absent, frozenset())
        for index, node in enumerate(joint.nodes):
            operation = self._operation(plan.flow.operations[index], node)
            if operation is not None:
                self.operations[index] = operation

    def stand_ins(self, storages: Iterable[int]) -> frozenset[int]:
        """``storages`` without those of absent values; a sum with one absent part is its other part."""
        return frozenset[int]().union(*(self._stands.get(storage, {storage}) for storage in storages))

    def live_steps(self, results: frozenset[int]) -> Sequence[int]:
        """The steps of the plan but those of its backward that make nothing that is read."""
        schedule, boundary = self._plan.schedule, self._plan.boundary
        first = {schedule[step]: step for step in reversed(range(len(schedule)))}
        needed, live = set(results), []
        for step in reversed(range(len(schedule))):
            index = schedule[step]
            if index not in self.operations:
                continue
            is_first, node = first[index] == step, self._joint.nodes[index]
            run = self.operations[index] if is_first else self.operations[index].repeat
            makes = needed.intersection(run.writes) - (frozenset() if is_first else results)
            if makes or step < boundary or (is_first and (node is None or node.is_impure())):
                live.append(index)
                needed -= makes
                needed.update(run.reads)
        return live[::-1]

    def _operation(self, operation: Operation, node: fx.Node | None) -> Operation | None:
        """``operation`` without its absent inputs. None, if it does not run."""
        if node is None:  # autograd makes zeros of missing gradients, while all that was saved is still there
            return replace(operation, reads=self._plan.memory.saved)
        reads, absent = tuple(self.stand_ins(operation.reads)), self._absent
        if node in absent.nodes:
            self._stands.update(dict.fromkeys(operation.writes, frozenset()))
            return None
        if absent.is_copied(node):
            return replace(operation, reads=reads, workspace_bytes=0)
        if node in absent.same:
            self._stands.update(dict.fromkeys(operation.writes, frozenset(reads)))
            return None
        more = sum(absent.bytes_of(source) for source in node.all_input_nodes if source in absent.nodes)  # zeros
        if self._joint.sums.get(node) in absent.same:  # it is not added in place
            more += absent.bytes_of(node)
        again = operation.substitute and self._operation(operation.substitute, node)
        return replace(operation, reads=reads, workspace_bytes=operation.workspace_bytes + more, substitute=again)
