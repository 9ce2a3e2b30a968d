"""Inspect: read off a graph, without running it, its memory in bytes and the values that all data flows through."""
from __future__ import annotations

import operator
from functools import cache, partial
from typing import Any

import torch
from torch import fx

from torchckpt.errors import Fault, called, raise_fault
from torchckpt.graph.derive.adjoint import FORWARD_OUTPUTS
from torchckpt.graph.step.costs import Measure, cost_of, roofline
from torchckpt.graph.step.joint import joint_of, needed
from torchckpt.planning.remat.flow.late import separators as separating_nodes
from torchckpt.planning.remat.flow.memory import Memory
from torchckpt.planning.remat.flow.memory import simulate as run_on_paper

__all__ = ["separators", "simulate"]


@called("simulate()")
def simulate(gm: fx.GraphModule, workspaces: bool = True) -> Memory:
    """The bytes alive while each operation of ``gm`` runs, without its inputs, parameters and buffers.

    >>> graph.simulate(graph.gradient(loss_of, x)).peak_bytes

    On a CPU these equal the bytes of the allocator.

    Args:
        gm: a functional ATen graph with ``meta["val"]``, such as :func:`gradient`, ``make_fx`` and ``torch.export``
            make; it may copy new values into its buffers at its end.
        workspaces: whether to run each kind of operation once, on made-up numbers, to measure the bytes that it
            allocates beside its outputs. Shapes do not tell them. Default: True.

    Returns:
        For the result of :func:`gradient`, forward and backward: ``boundary`` is the step at which the forward ends,
        ``saved`` the storages that the backward reads of it. For any other graph, one forward.

    Raises:
        ArgumentError: a node has no ``meta["val"]``.
    """
    operations = [node for node in gm.graph.nodes if node.op.startswith("call_")]
    bare = [node.name for node in operations if node.users and "val" not in node.meta]
    if bare:
        works = "make_fx(function, tracing_mode='fake')(*inputs)"
        raise_fault(Fault("a node has no meta['val'], which says what it makes", f"none of {bare[0]}", works))
    returned, forward = _returned(gm)
    graph, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.graph_copy(gm.graph, nodes)
    graph.output(tuple(nodes[node] for node in returned))
    cost = partial(cost_of, measure=Measure()) if workspaces else roofline
    joint = joint_of(fx.GraphModule(gm, graph), forward, cost)
    return run_on_paper(joint.flow, joint.flow.eager)


def separators(gm: fx.GraphModule) -> list[fx.Node]:
    """The nodes that separate the forward: from any one of them alone, the rest can be computed. In graph order.

    Parameters, buffers and inputs are always available, and do not count. A view counts as its base. A value that only
    the output reads separates nothing. Takes one sweep over nodes and edges.

    Args:
        gm: an ATen graph. For the result of :func:`gradient`, only the forward counts.
    """
    outputs: dict[fx.Node, tuple[int, fx.Node]] = {}  # by node: its operation's number, and the output node
    reads: list[list[int]] = []
    read: dict[int, fx.Node | None] = {}  # by operation: the one output that is read; None if several are
    returned, forward = _returned(gm)
    wanted = needed(returned[:forward]) if forward < len(returned) else set(gm.graph.nodes)
    for node in [node for node in gm.graph.nodes if node.op == "call_function" and node in wanted]:
        sources = [outputs[source] for source in node.all_input_nodes if source in outputs]
        if node.target is operator.getitem or _is_view(node.target):
            if sources:
                outputs[node] = (sources[0][0], node) if node.target is operator.getitem else sources[0]
            continue
        outputs[node] = len(reads), node
        reads.append([operation for operation, _ in sources])
        for operation, output in sources:
            read[operation] = output if read.get(operation, output) is output else None
    separating = (read.get(operation) for operation in separating_nodes(reads))
    return [output for output in separating if output is not None]


def _returned(gm: fx.GraphModule) -> tuple[list[fx.Node], int]:
    """The values that ``gm`` returns or copies into buffers, those of the forward first, and the number of those."""
    returned: list[fx.Node] = []
    fx.node.map_arg(gm.graph.output_node().args, returned.append)
    forward = gm.meta.get(FORWARD_OUTPUTS, len(returned))
    copied = [node.args[1] for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)]
    values = [value for value in copied if isinstance(value, fx.Node)]
    return [*returned[:forward], *values, *returned[forward:]], forward + len(values)


@cache
def _is_view(target: Any) -> bool:
    """Whether an operator returns a view, which shares the storage of its first argument."""
    schema = getattr(target, "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)
