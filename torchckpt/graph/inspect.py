"""Inspect: what a call takes over all budgets; the bytes of a graph, and the values that all its data flows through."""
from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import cache, partial
from numbers import Integral
from os import PathLike
from typing import Any, Literal

import torch
from torch import fx, nn

from torchckpt.errors import Fault, called, check, raise_fault
from torchckpt.graph.derive.adjoint import FORWARD_OUTPUTS
from torchckpt.graph.planner import Costs
from torchckpt.graph.progress import Watch
from torchckpt.graph.run.rematerialize import rematerialize
from torchckpt.graph.step.costs import Measure, cost_of, roofline
from torchckpt.graph.step.joint import joint_of, needed
from torchckpt.graph.trace.capture import TRACE_LOCK
from torchckpt.planning.draw.units import aligned, units_of_bytes
from torchckpt.planning.figures import Drawn
from torchckpt.planning.remat.flow.late import separators as separating_nodes
from torchckpt.planning.remat.flow.memory import Memory
from torchckpt.planning.remat.flow.memory import simulate as run_on_paper
from torchckpt.planning.remat.frontier_svg import draw_frontier
from torchckpt.planning.remat.search.planner import frontier as solutions_of
from torchckpt.planning.remat.table import page

__all__ = ["Frontier", "frontier", "separators", "simulate"]


class Frontier(list[tuple[int, float]], Drawn):
    """A list of ``(peak_bytes, recompute_share)``, by falling peak; the share is of the step's time, from 0.0 on."""

    def draw(
        self,
        path: str | PathLike[str] | None = None,
        others: Mapping[str, Sequence[tuple[int, float]]] | None = None,
        title: str = "Memory and recomputation",
    ) -> str:
        """The curve as SVG text, together with the points of ``others``. It is written to ``path`` if one is given."""
        return self._written(path, draw_frontier(self, others, eager_peak_bytes=self[0][0], title=title))

    def __str__(self) -> str:
        """A table with one row for each plan."""
        of_memory = units_of_bytes(self[0][0]).of_memory
        rows = [(of_memory(peak), f"+{share:.1%}", f"{peak / self[0][0]:.0%}") for peak, share in self]
        return aligned([("peak", "recompute", "of eager's"), *rows])

    def _repr_html_(self) -> str:
        return page(self.draw(), f"Frontier of {len(self)} plans", str(self))


@called("frontier()")
def frontier(
    model: nn.Module,
    *example: Any,
    example_kwargs: Mapping[str, Any] | None = None,
    points: int = 20,
    costs: Costs = "roofline",
    rng: Literal["keep", "replay"] = "keep",
) -> Frontier:
    """The best plans found, for budgets from the peak with everything kept down to the least peak.

    >>> graph.frontier(model, inputs).draw("frontier.svg")

    Args:
        model, example, example_kwargs, costs, rng: as for :func:`~torchckpt.graph.rematerialize`. The model is not run,
            and does not change.
        points: the largest number of plans, at least 2. Default: 20.

    Raises:
        ArgumentError: an argument breaks a rule.
        CaptureError: the call cannot be traced.
    """
    faults = []
    if isinstance(points, bool) or not isinstance(points, Integral) or points < 2:
        faults.append(Fault("points is not an integer of at least 2", f"points={points!r}", "points=20"))
    if not (example or example_kwargs):
        faults.append(Fault("there are no inputs of a call", "no example", "graph.frontier(model, inputs)"))
    check(faults)
    flow = rematerialize(model, *example, example_kwargs=example_kwargs, costs=costs, rng=rng).plan.flow
    with Watch().planning(len(flow.operations)) as tell:
        solutions = solutions_of(flow, int(points), tell=tell)
    return Frontier((plan.peak_bytes, max(0.0, plan.seconds / flow.seconds - 1.0)) for plan in solutions)


@called("simulate()")
@TRACE_LOCK.tracing()
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
