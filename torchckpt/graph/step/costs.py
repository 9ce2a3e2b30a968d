"""Costs: seconds, FLOPs and workspace bytes of an operation: counted from its shapes, measured, or given."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias, cast

from torch import fx

from torchckpt.graph.private.runtime import branches_of
from torchckpt.graph.step.measure import Measure, bytes_of
from torchckpt.tensors import flop_formula, tensors_in

__all__ = ["Cost", "CostOf", "Costs", "cost_of", "flops_of", "given", "roofline"]


class Cost(NamedTuple):
    """The cost of one operation. Where the operation was run, ``made_bytes`` has the storage size of each tensor that
    it returned, and ``draws`` says whether it drew random numbers although its operator is not tagged as random."""

    seconds: float
    flops: int
    workspace_bytes: int = 0
    made_bytes: tuple[int, ...] = ()
    draws: bool = False


CostOf: TypeAlias = Callable[[fx.Node], Cost]
"""Returns the cost of an operation, given its node."""

_FLOPS_PER_BYTE = {"cpu": 10.0, "cuda": 20.0}
"""FLOPs in float32 that a device computes while it moves one byte: a CPU with AVX2, an H100 (its data sheet)."""

Costs: TypeAlias = "str | Mapping[str, float]"
"""``"roofline"``, ``"profile"``, or seconds by the names of operators."""


def cost_of(node: fx.Node, measure: Measure, costs: Costs = "roofline") -> Cost:
    """The cost of an operation, with what shapes do not tell and a run on made-up numbers does."""
    run = measure.of(node)
    if costs == "profile":
        seconds, flops = run.seconds, flops_of(node)
    else:
        seconds, flops, *_ = roofline(node) if isinstance(costs, str) else given(node, costs)
    return Cost(seconds, flops, run.workspace_bytes, run.made_bytes, run.draws)


def roofline(node: fx.Node) -> Cost:
    """Seconds and FLOPs, counted from shapes. The workspace is 0: it is known only after a run.

    The seconds are the larger of the time to compute and the time to move bytes (the roofline model, Williams 2009), on
    a device that moves one gigabyte per second: memory bounds pointwise operations, arithmetic bounds matrix products.
    """
    moved_bytes = sum(map(bytes_of, [*node.all_input_nodes, node]))
    flops = flops_of(node)
    device = next((tensor.device.type for tensor in tensors_in(node.meta.get("val"))), "cpu")
    seconds = max(moved_bytes, flops / _FLOPS_PER_BYTE.get(device, 20.0)) * 1e-9
    return Cost(seconds, flops)


def given(node: fx.Node, seconds: Mapping[str, float]) -> Cost:
    """A cost with the user's seconds, by operator (``aten.mm``, ``aten.mm.default``) or node name; else counted."""
    operator = str(node.target)
    for name in (node.name, operator, operator.rpartition(".")[0]):
        if name in seconds:
            return Cost(float(seconds[name]), flops_of(node))
    return roofline(node)


def flops_of(node: fx.Node) -> int:
    """FLOPs of matrix products, convolutions and attention, as torch counts them; 0 for other operations.

    Control flow counts as its branch with the most FLOPs.
    """
    branches = [sum(map(flops_of, branch.graph.nodes)) for branch in branches_of(node)]
    if branches:
        return max(branches)
    count = flop_formula(getattr(node.target, "overloadpacket", None))
    if count is None:
        return 0
    values = fx.node.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    arguments, named = cast(tuple[Any, Any], values)
    return int(count(*arguments, **named, out_val=node.meta["val"]))
