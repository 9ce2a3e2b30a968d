"""Updates: in-place writes of new buffer values at the end of a compiler's graph, taken out and put back.

A schedule handles values, not in-place writes. So an update is taken out of the joint graph, and its value becomes an
ordinary output. The emitted forward writes it into the buffer at its end. If the backward reads the old value of such a
buffer, the forward saves a copy of it before the write.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import fx

__all__ = ["Updates"]

_COPY: Any = torch.ops.aten.copy_.default


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
