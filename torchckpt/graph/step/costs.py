"""Costs: seconds, FLOPs and workspace bytes of an operation: counted from its shapes, measured, or given."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias, cast

from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from torchckpt.graph.private.operators import branches_of
from torchckpt.graph.step.measure import Measure
from torchckpt.tensors import tensors_in

__all__ = ["Cost", "CostOf", "flops_of", "given", "measured", "profiled", "roofline"]


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

_ATTENTION: dict[str, tuple[Callable[..., int], int]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": (sdpa_flop_count, 3),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": (sdpa_backward_flop_count, 4),
}
"""Operators whose FLOPs torch does not count: the formula, and the number of inputs whose shapes it takes."""


def roofline(node: fx.Node) -> Cost:
    """Seconds and FLOPs, counted from shapes. The workspace is 0: it is known only after a run.

    The seconds are the larger of the time to compute and the time to move bytes (the roofline model, Williams 2009), on
    a device that moves one gigabyte per second: memory bounds pointwise operations, arithmetic bounds matrix products.
    """
    values = [value.meta.get("val") for value in node.all_input_nodes]
    moved_bytes = sum(_bytes(tensor) for value in [*values, node.meta.get("val")] for tensor in tensors_in(value))
    flops = flops_of(node)
    device = next((tensor.device.type for tensor in tensors_in(node.meta.get("val"))), "cpu")
    seconds = max(moved_bytes, flops / _FLOPS_PER_BYTE.get(device, 20.0)) * 1e-9
    return Cost(seconds, flops)


def profiled(node: fx.Node, measure: Measure) -> Cost:
    """A cost whose seconds are measured: the least time of a few runs."""
    return measured(Cost(measure.of(node).seconds, flops_of(node)), node, measure)


def measured(cost: Cost, node: fx.Node, measure: Measure) -> Cost:
    """``cost`` with what shapes do not tell and a run does: workspace, sizes of results, random draws."""
    found = measure.of(node)
    return cost._replace(workspace_bytes=found.workspace_bytes, made_bytes=found.made_bytes, draws=found.draws)


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
    operator = str(getattr(node.target, "overloadpacket", ""))
    if operator in _ATTENTION:
        count_flops, inputs = _ATTENTION[operator]
        return int(count_flops(*(value.meta["val"].shape for value in cast(Any, node.args[:inputs]))))
    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return 0
    values = fx.node.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    arguments, named = cast(tuple[Any, Any], values)
    return int(count(*arguments, **named, out_val=node.meta["val"]))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
