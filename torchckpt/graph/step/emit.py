"""Emit: turn a schedule of a joint graph into graphs that run: a forward and a backward, or one graph of both.

Each operation reads the newest copy of its inputs. Views are made again from that copy wherever they are read: a view
of an older copy would keep the older copy alive.
"""
from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx

from torchckpt.graph.private.trace import Boxed
from torchckpt.graph.step.joint import Joint
from torchckpt.graph.step.repeat import outputs_of
from torchckpt.planning.remat.flow.dataflow import Schedule

__all__ = ["Emitter", "emit", "emit_one", "forward_of"]


def emit(joint: Joint, schedule: Schedule, boundary: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The first ``boundary`` steps of ``schedule`` as a forward, the rest as a backward.

    The forward takes the inputs of the joint graph without the gradients of outputs. It returns its outputs, then the
    saved values. The backward takes the saved values, then the gradients of outputs, and returns the gradients. Both
    take one list, and clear it.
    """
    forward = forward_of(joint, schedule[:boundary])
    backward = Emitter(joint, joint.tangents, before=forward)
    backward.run(schedule[boundary:])
    outputs, gradients = joint.outputs[: joint.forward_outputs], joint.outputs[joint.forward_outputs :]
    second = backward.finish(backward.resolve(gradients), "Backward")
    return forward.finish([*forward.resolve(outputs), *backward.crossing.values()], "Forward"), second


def forward_of(joint: Joint, schedule: Schedule) -> Emitter:
    """An emitter that has emitted these steps. Its graph takes the joint graph's inputs without output gradients."""
    inputs = [node for node in joint.module.graph.find_nodes(op="placeholder") if node not in joint.tangents]
    forward = Emitter(joint, inputs)
    forward.run(schedule)
    return forward


def emit_one(joint: Joint, schedule: Schedule) -> fx.GraphModule:
    """Emit all of ``schedule`` as one graph with the outputs of the joint graph."""
    emitter = Emitter(joint, joint.module.graph.find_nodes(op="placeholder"))
    emitter.run(schedule)
    return emitter.finish(emitter.resolve(joint.outputs), "Adjoint")


class Emitter:
    """Builds a graph from operations of a joint graph, one after the other.

    Args:
        inputs: placeholders of the joint graph that the new graph takes.
        before: the forward's emitter, when this one emits the backward. Values that the backward reads and does not
            make are saved by the forward: they cross from there. Default: None, for a forward.
    """

    def __init__(self, joint: Joint, inputs: Sequence[fx.Node], before: Emitter | None = None) -> None:
        self.joint, self.graph, self.before = joint, fx.Graph(), before
        self.crossing: dict[fx.Node, fx.Node] = {}  # by placeholder, the node of the graph before
        self._newest: dict[fx.Node, fx.Node] = {}
        self._views: dict[tuple[fx.Node, ...], fx.Node] = {}
        self._ran: set[int] = set() if before is None else before._ran
        for node in inputs:
            self._newest[node] = self._copy(node)

    def run(self, schedule: Schedule) -> None:
        for index in schedule:
            self._run(index)

    def _run(self, index: int) -> None:
        node = self.joint.nodes[index]
        first = index not in self._ran
        self._ran.add(index)
        if node is None:
            return
        repeat = None if first else self.joint.repeats.get(index)
        if repeat is not None:
            copies = dict(zip(repeat.writes, repeat.emit(self.graph, self.resolve)))
        else:
            called, parts = self._copy(node), outputs_of(node)
            copies = {part: self._part(called, place, part) for place, part in parts.items()} or {node: called}
        results, storages = self.joint.flow.results, self.joint.storages
        self._newest.update(
            (old, new) for old, new in copies.items() if first or not storages.get(old, set()) & results
        )

    def resolve(self, argument: Any) -> Any:
        """An argument of a node of the joint graph, with the joint graph's nodes replaced by this graph's."""
        return fx.node.map_arg(argument, self._node)

    def finish(self, outputs: Sequence[Any], name: str) -> fx.GraphModule:
        self.graph.output(tuple(outputs))
        self.graph.eliminate_dead_code(_has_effect)
        # Saved values that only dead code read would stay alive until the end: nothing reads them last.
        for placeholder in [placeholder for placeholder in self.crossing if not placeholder.users]:
            del self.crossing[placeholder]
            self.graph.erase_node(placeholder)
        inputs = self.graph.find_nodes(op="placeholder")
        self.graph.set_codegen(Boxed([str(node.target) for node in inputs if not node.users]))
        return fx.GraphModule(self.joint.module, self.graph, name)

    def _node(self, node: fx.Node) -> fx.Node:
        if node in self.joint.views:
            sources = [self._node(source) for source in node.all_input_nodes]
            key = (node, *sources)
            if key not in self._views:
                self._views[key] = self.graph.node_copy(node, dict(zip(node.all_input_nodes, sources)).__getitem__)
            return self._views[key]
        if node not in self._newest:
            self._newest[node] = self._copy(node) if node.op == "get_attr" else self._cross(node)
        return self._newest[node]

    def _cross(self, node: fx.Node) -> fx.Node:
        before = cast(Emitter, self.before)  # a forward reads nothing that it has not made
        last = next(reversed(self.crossing), None)
        with self.graph.inserting_before(None) if last is None else self.graph.inserting_after(last):
            saved = self.graph.placeholder(f"saved_{node.name}")
        saved.meta = dict(node.meta)
        self.crossing[saved] = before._lasting(node)
        return saved

    def _lasting(self, node: fx.Node) -> fx.Node:
        """The node to save for the backward: a copy, if ``node`` is an input that the forward changes."""
        newest = self._node(node)
        if node not in self.joint.changed:
            return newest
        copy = self.graph.call_function(torch.ops.aten.clone.default, (newest,))
        copy.meta = dict(node.meta)
        return copy

    def _part(self, called: fx.Node, place: int, part: fx.Node) -> fx.Node:
        copy = self.graph.call_function(operator.getitem, (called, place))
        copy.meta = dict(part.meta)
        return copy

    def _copy(self, node: fx.Node) -> fx.Node:
        if node.op == "placeholder":
            copy = self.graph.placeholder(node.name)
        else:
            target, arguments, part = node.target, node.args, self.joint.sums.get(node)
            if part is not None:
                others = [argument for argument in arguments if argument is not part]
                target, arguments = torch.ops.aten.add_.Tensor, (part, *others)
            arguments, named = self.resolve(arguments), self.resolve(node.kwargs)
            copy = self.graph.create_node(node.op, target, arguments, named, name=node.name)
        copy.meta = dict(node.meta)
        return copy


def _has_effect(node: fx.Node) -> bool:
    """Whether ``node`` is kept although nothing reads its result. Our operations in place are not."""
    return node.is_impure() and node.target not in (torch.ops.aten.mul_.Tensor, torch.ops.aten.add_.Tensor)
