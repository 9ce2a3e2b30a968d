"""Partial: backwards for missing gradients of outputs, which no loss reads.

Autograd skips the operations that depend only on the missing gradients. Zeros in place of those gradients would cost
time, and would give NaN where a derivative is infinite. So the backward of the plan is emitted again without these
operations. The other operations keep their order.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
from torch import Tensor, fx

from torchckpt.graph.step.emit import Emitter, forward_of
from torchckpt.graph.step.joint import Joint, is_sum, reached
from torchckpt.planning.remat.flow.dataflow import Schedule

__all__ = ["Absent", "Backward", "PartialBackwards"]

Backward = Callable[[list[Any]], Sequence[Any]]
"""Takes one list, the saved values and then the gradients of the outputs, and empties it."""


class PartialBackwards:
    """The backwards of a joint graph for missing gradients of outputs, each emitted when it is first needed.

    Args:
        whole: the backward for all gradients; its placeholders name the arguments.
    """

    def __init__(self, joint: Joint, schedule: Schedule, boundary: int, whole: fx.GraphModule) -> None:
        self._joint, self._schedule, self._boundary = joint, schedule, boundary
        self._takes = [str(node.target) for node in whole.graph.find_nodes(op="placeholder")]
        self._made: dict[frozenset[fx.Node], Backward | None] = {}

    def without(self, missing: Set[fx.Node]) -> Backward | None:
        """The backward without these gradients of outputs. It takes the same list as the whole backward.

        None, if it would need values that are not in that list: the whole backward then gets zeros.
        """
        key = frozenset(missing)
        if key not in self._made:
            self._made[key] = self._emitted(key)
        return self._made[key]

    def _emitted(self, missing: frozenset[fx.Node]) -> Backward | None:
        forward = forward_of(self._joint, self._schedule[: self._boundary])
        emitter = _Without(self._joint, forward, Absent(self._joint, missing))
        for index in self._schedule[self._boundary :]:
            emitter.run(index)
        gradients = self._joint.outputs[self._joint.forward_outputs :]
        module = emitter.finish(emitter.resolved(gradients), "PartialBackward")
        takes = [str(node.target) for node in module.graph.find_nodes(op="placeholder")]
        if not set(takes) <= set(self._takes):  # a value that the whole backward does not get
            return None
        places = [self._takes.index(name) for name in takes]

        def run(arguments: list[Any]) -> Sequence[Any]:
            taken = [arguments[place] for place in places]
            arguments.clear()
            return module.forward(taken)  # type: ignore[no-any-return]

        return run


class Absent:
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

    def __init__(self, joint: Joint, before: Emitter, absent: Absent) -> None:
        super().__init__(joint, [node for node in joint.tangents if node not in absent.nodes], before)
        self._absent = absent

    def run(self, index: int) -> None:
        node = self.joint.nodes[index]
        if node is None or not (node in self._absent.nodes or node in self._absent.same):
            super().run(index)
        elif self._absent.is_copied(node):
            part = self.resolve(self._absent.same[node])
            self._newest[node] = self.graph.call_function(torch.ops.aten.clone.default, (part,))

    def finish(self, outputs: Sequence[Any], name: str) -> fx.GraphModule:
        gradients = self.joint.outputs[self.joint.forward_outputs :]
        present = [None if node in self._absent.nodes else made for node, made in zip(gradients, outputs)]
        return super().finish(present, name)

    def _node(self, node: fx.Node) -> fx.Node:
        if node in self._absent.nodes:
            return self._zeros(node.meta["val"])
        is_same = node in self._absent.same and node not in self._newest
        return self._node(self._absent.same[node]) if is_same else super()._node(node)

    def _is_needed(self, node: fx.Node) -> bool:
        """Whether to keep ``node`` though nothing reads it. Our operations in place are not kept."""
        return super()._is_needed(node) and node.target not in (torch.ops.aten.mul_.Tensor, torch.ops.aten.add_.Tensor)

    def _overwritten(self, node: fx.Node) -> fx.Node | None:
        """None also if the operand stands for another value, which others may read."""
        part = super()._overwritten(node)
        return None if part in self._absent.same else part

    def _zeros(self, like: Tensor) -> fx.Node:
        storage = like.untyped_storage().nbytes() // like.element_size()
        arguments = storage, like.shape, like.stride(), like.storage_offset(), like.dtype, like.device
        return self.graph.call_function(_zeros, arguments)


def _zeros(
    storage: int, shape: Sequence[int], stride: Sequence[int], offset: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Zeros with the strides of the gradient that they replace, which may be an expanded scalar."""
    return torch.zeros(storage, dtype=dtype, device=device).as_strided(shape, stride, offset)
