"""Costs: what an operation takes: counted from its shapes, measured, or given."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias, cast

from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from torchckpt.graph.measure import Measure
from torchckpt.graph.private.operators import branches_of
from torchckpt.tensors import tensors_in

__all__ = ["Cost", "CostOf", "flops_of", "given", "measured", "profiled", "roofline"]


class Cost(NamedTuple):
    """Of an operation. Where it was run, ``made_bytes`` are the storages of the tensors that it returned, and ``draws``
    tells of random numbers that it drew though its operator does not say so."""

    seconds: float
    flops: int
    workspace_bytes: int = 0
    made_bytes: tuple[int, ...] = ()
    draws: bool = False


CostOf: TypeAlias = Callable[[fx.Node], Cost]
"""Of the node of an operation."""

_FLOPS_PER_BYTE = {"cpu": 10.0, "cuda": 20.0}
"""What a device computes while it moves a byte, in float32; a processor with AVX2, an H100 (its data sheet)."""

_ATTENTION: dict[str, tuple[Callable[..., int], int]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": (sdpa_flop_count, 3),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": (sdpa_backward_flop_count, 4),
}
"""What torch does not count though it could: the formula, and of how many inputs' shapes."""


def roofline(node: fx.Node) -> Cost:
    """Seconds and FLOPs, counted, and no workspace: nobody knows it who has not run it.

    The seconds are the larger of what an operation computes and what it moves (Williams 2009), on a device that moves
    one gigabyte a second: pointwise operations are bound by memory, products of matrices by arithmetic.
    """
    values = [value.meta.get("val") for value in node.all_input_nodes]
    moved_bytes = sum(_bytes(tensor) for value in [*values, node.meta.get("val")] for tensor in tensors_in(value))
    flops = flops_of(node)
    device = next((tensor.device.type for tensor in tensors_in(node.meta.get("val"))), "cpu")
    seconds = max(moved_bytes, flops / _FLOPS_PER_BYTE.get(device, 20.0)) * 1e-9
    return Cost(seconds, flops)


def profiled(node: fx.Node, measure: Measure) -> Cost:
    """Measured: the least time of a few runs."""
    return measured(Cost(measure.of(node).seconds, flops_of(node)), node, measure)


def measured(cost: Cost, node: fx.Node, measure: Measure) -> Cost:
    """``cost``, with what no shape tells."""
    found = measure.of(node)
    return cost._replace(workspace_bytes=found.workspace_bytes, made_bytes=found.made_bytes, draws=found.draws)


def given(node: fx.Node, seconds: Mapping[str, float]) -> Cost:
    """Told: by the name of the operator (``aten.mm``, ``aten.mm.default``) or of the node; counted where it is not."""
    operator = str(node.target)
    for name in (node.name, operator, operator.rpartition(".")[0]):
        if name in seconds:
            return Cost(float(seconds[name]), flops_of(node))
    return roofline(node)


def flops_of(node: fx.Node) -> int:
    """Multiplications and additions of products and convolutions, as torch counts them; of others, none.

    Of control flow, those of the branch that has most.
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
