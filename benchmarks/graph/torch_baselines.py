"""Torch baselines: torch's own ways to save memory: its min-cut partitioner under a budget, and block checkpoints."""
from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from functorch.compile import aot_function, min_cut_rematerialization_partition
from torch import Tensor, fx, nn
from torch._functorch import config
from torch.func import functional_call

from benchmarks.graph.subjects import Call, Subject
from benchmarks.stock import Stock
from tests.models.image import Basic, Bottleneck, UNet
from tests.models.sequence import Block
from torchckpt.graph.private.trace import Boxed

__all__ = ["ROUTES", "budgeted", "by_block"]

ROUTES = ("ATen", "decomposed")
"""The graph's operations: as traced, or decomposed as by Inductor, which lets the partitioner recompute more."""


def budgeted(subject: Subject, budget: float, route: str) -> Call:
    """By AOTAutograd and the min-cut partitioner under ``activation_memory_budget``; 1.0 is the min-cut alone.

    As in ours, the loss is in the graph, operations run as eager runs them, and what is saved is freed after its last
    use.

    Raises:
        RuntimeError: at the first step, where a backward reads running statistics that the forward has changed.
    """
    module = subject.module
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def function(*tensors: Tensor) -> Any:
        return functional_call(module, dict(zip(state, tensors)), tensors[len(state) :])

    run = aot_function(
        function, fw_compiler=_boxed, bw_compiler=_boxed, decompositions=_decompositions(route),
        partition_fn=partial(_partition, budget=budget),
    )
    return lambda *inputs: run(*state.values(), *inputs)


def _partition(joint: fx.GraphModule, inputs: Any, *, budget: float, **named: Any) -> Any:
    with config.patch(activation_memory_budget=budget):
        return min_cut_rematerialization_partition(joint, inputs, **named)


def _decompositions(route: str) -> Any:
    if route == "ATen":
        return None
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def _boxed(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
    module.graph.set_codegen(Boxed())
    module.recompile()
    forward = module.forward

    def run(arguments: list[Any]) -> Any:
        return forward(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def by_block(subject: Subject) -> nn.Module:
    """A copy of the subject's module with a checkpoint around each block; in the perceptron, around five layers."""
    module: Any = copy.deepcopy(subject.module)
    if isinstance(module.model, nn.Sequential) and not any(map(_is_block, module.model)):
        parts = [nn.Sequential(*list(module.model)[start : start + 10]) for start in range(0, len(module.model), 10)]
        module.model = nn.Sequential(*map(Stock, parts))
        return module
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if _is_block(child) or (isinstance(parent, nn.ModuleList) and isinstance(child, nn.Sequential)):
                setattr(parent, name, Stock(child))
            elif isinstance(parent, UNet) and name == "bottom":
                parent.bottom = Stock(child)
    return module


def _is_block(module: nn.Module) -> bool:
    return isinstance(module, (Basic, Bottleneck, Block))
