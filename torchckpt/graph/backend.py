"""Backend: the graph level under ``torch.compile``: its compiler's kernels, the graphs of our schedule."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from torchckpt.errors import CaptureError, CheckpointError, Fault, raise_faults
from torchckpt.graph.capture import Choose
from torchckpt.graph.emit import emit
from torchckpt.graph.joint import Cost, joint_of
from torchckpt.graph.private import COMPILERS, break_of, require_supported_torch
from torchckpt.model.remat.memory import simulate

__all__ = ["Backend"]


class Backend:
    """A backend of ``torch.compile``: one graph, one schedule, one budget.

    Args:
        choose: the schedule of a joint graph.
        cost: of an operation.
        inner: what runs the two graphs of the schedule: ``"inductor"`` compiles them, fused; ``"eager"`` runs them
            operator by operator, bit-equal to the model.
    """

    def __init__(self, choose: Choose, cost: Cost, inner: str = "inductor") -> None:
        if inner not in COMPILERS:
            known = " or ".join(f'"{name}"' for name in COMPILERS)
            raise_faults("backend()", [Fault(f"inner is {known}", repr(inner), 'inner="inductor"')])
        require_supported_torch()
        self.__name__ = "torchckpt"  # what torch.compile's messages call it
        self._choose, self._cost, self._compile = choose, cost, COMPILERS[inner]

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Raise at the first call what compiling raised: Dynamo would wrap it in an error of its own."""
        try:
            _refuse_break(module)
            _refuse_symbols(module)
            return self._compile(module, inputs, self._partition)
        except CheckpointError as error:
            return _raising(error)

    def _partition(
        self, module: fx.GraphModule, inputs: Sequence[Any], *, num_fwd_outputs: int, **ignored: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        joint = joint_of(module, num_fwd_outputs, self._cost)
        schedule = self._choose(joint)
        return emit(joint, schedule, simulate(joint.flow, schedule).boundary)


def _refuse_break(module: fx.GraphModule) -> None:
    found = break_of(module)
    if found is not None:
        reason, place = found
        rule = "a schedule is that of one graph, and a budget too: each part of a graph that breaks would take it whole"
        works = "torch.compile(model, backend=..., fullgraph=True) lists what breaks it; or graph.rematerialize()"
        raise CaptureError(str(Fault(rule, f"a break {place}: {reason}", works)))


def _refuse_symbols(module: fx.GraphModule) -> None:
    for node in module.graph.nodes:
        sizes = [size for value in pytree.tree_leaves(_value_of(node)) for size in _sizes(value)]
        symbols = [size for size in sizes if not isinstance(size, int)]
        if symbols:
            rule = "bytes are counted for sizes that are known when the call is compiled"
            works = "torch.compile(model, backend=..., dynamic=False): each shape is compiled, and planned, on its own"
            raise CaptureError(str(Fault(rule, f"{node.name} has the size {symbols[0]}", works)))


def _value_of(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _sizes(value: Any) -> Iterable[Any]:
    return value.shape if isinstance(value, Tensor) else [value] if isinstance(value, torch.SymInt) else []


def _raising(error: CheckpointError) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        raise error

    return run
