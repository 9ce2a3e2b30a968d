"""Balance: the number of layers of each stage, from the cost of each layer on a sample."""
from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, groupby
from statistics import median
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchckpt.errors import Fault, called, check
from torchckpt.pipe.partition import Layer, layer_faults, layers_of
from torchckpt.planning.draw.units import aligned, number, percent
from torchckpt.planning.order.schedule import whole
from torchckpt.planning.work.partition import balanced, count_faults
from torchckpt.regions.devices import accelerators_among
from torchckpt.regions.saved import bytes_of, telling_of_saved
from torchckpt.regions.state.ambient import generators_of, outside_inference, random_state, restore_states
from torchckpt.tensors import tensors_in

__all__ = ["Balance", "balance_by_bytes", "balance_by_time"]

_UNITS = {
    "seconds": (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)),
    "bytes": (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 1.0)),
}

_Weigh: TypeAlias = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[float, Any]]
"""Maps a layer and its arguments to the cost of the layer and its outputs."""


class Balance(list[int]):
    """Layers per stage, as ``Pipe(balance=)`` takes them, with the cost of each layer.

    >>> balance = Balance([2, 1], costs=[0.002, 0.001, 0.003], names=["Linear", "ReLU", "head"], unit="seconds")
    >>> balance, balance.stage_costs
    ([2, 1], [0.003, 0.003])
    >>> print(balance.table())
             layers  time   share
    stage 0  0 to 1  3 ms  50.0 %  Linear, ReLU
    stage 1       2  3 ms  50.0 %  head
    """

    def __init__(
        self, counts: Sequence[int], costs: Sequence[float], names: Sequence[str], unit: Literal["seconds", "bytes"]
    ) -> None:
        super().__init__(counts)
        self.costs, self.names, self.unit = list(costs), list(names), unit

    @property
    def stage_costs(self) -> list[float]:
        """The cost of each stage: the sum over its layers."""
        return [sum(self.costs[first:end]) for first, end in self._stages()]

    def table(self) -> str:
        """A table to read: for each stage its layers, its cost, its share of the total, and the names of the layers."""
        costs, all_costs = self.stage_costs, sum(self.costs)
        unit, size = next((unit for unit in _UNITS[self.unit] if unit[1] <= max(costs)), _UNITS[self.unit][-1])
        rows = [("", "layers", "time" if self.unit == "seconds" else "memory", "share")]
        for stage, ((first, end), cost) in enumerate(zip(self._stages(), costs)):
            layers = f"{first} to {end - 1}" if end - first > 1 else f"{first}"
            share = percent(cost / all_costs if all_costs else 0.0)
            rows.append((f"stage {stage}", layers, f"{number(cost / size)} {unit}", share))
        names = [""]
        for first, end in self._stages():
            counts = [(name, len(list(equal))) for name, equal in groupby(self.names[first:end])]
            names.append(", ".join(f"{name} x {count}" if count > 1 else name for name, count in counts))
        return "\n".join(f"{row}  {layers}".rstrip() for row, layers in zip(aligned(rows).split("\n"), names))

    def _stages(self) -> list[tuple[int, int]]:
        return [(end - count, end) for end, count in zip(accumulate(self), self)]


@called("balance_by_time()")
def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    *sample: Any,
    recompute: bool = True,
    rounds: int = 5,
    split_nested: bool = False,
    **kwargs: Any,
) -> Balance:
    """Layers per stage such that the slowest stage takes as little time as possible.

    Runs forward and backward of each layer by itself, on the output of the layer before it. After a warm-up round come
    ``rounds`` rounds through all layers. The cost of a layer is its median: a short disturbance of the machine then
    affects one round of many layers, and not all rounds of one layer. Synchronizes accelerators before and after each.

    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> balance = balance_by_time(2, model, torch.randn(16, 8))
    >>> pipe = Pipe(model, balance, chunks=4)

    Args:
        partitions: the number of stages.
        module: an ``nn.Sequential``. Its parameters, gradients, buffers, mode and devices do not change, and the random
            state is restored. It is measured in its current mode, train or eval.
        sample, kwargs: the arguments of the first layer for one micro-batch, on its device. The first layer computes
            gradients for those tensors that require grad.
        recompute: count forwards twice, as for a ``Pipe`` that recomputes. Use False for ``checkpoint="never"``.
        rounds: the number of measured rounds. With an odd number, the median is one of the measured times.
        split_nested: as in ``Pipe``: weigh the layers of Sequentials inside it.

    Returns:
        A list of layer counts, with the seconds of each layer in ``costs``, and a printable ``table()``.

    Raises:
        ArgumentError: an argument is wrong; the message lists every fault. Exceptions of layers pass through unchanged.

    The method, measuring and then balancing, is torchgpipe's (Kim et al., 2020).
    """
    layers = layers_of(module, split_nested) if isinstance(module, nn.Sequential) else []
    faults = [*_faults("balance_by_time", partitions, layers, module, sample, kwargs), *whole("rounds", rounds)]
    if any(tensor.is_meta for tensor in (*(module.parameters() if layers else ()), *tensors_in((sample, kwargs)))):
        faults.append(Fault("nothing takes time on meta", "a tensor on meta", "balance_by_bytes(2, module, x)"))
    check(faults)
    devices = accelerators_among((sample, list(module.parameters())), kwargs)

    def weigh(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, Any]:
        forward, backward, outputs = _timed(layer, args, kwargs, devices)
        return forward * (2 if recompute else 1) + backward, outputs

    with _as_found(module, devices):
        times = [_weighed(layers, sample, kwargs, weigh) for _ in range(1 + rounds)]
    costs = [median(seconds) for seconds in zip(*times[1:])]
    return Balance(balanced(costs, partitions), costs, _names(layers), "seconds")


@called("balance_by_bytes()")
def balance_by_bytes(
    partitions: int,
    module: nn.Sequential,
    *sample: Any,
    param_scale: float = 4.0,
    split_nested: bool = False,
    **kwargs: Any,
) -> Balance:
    """Layers per stage such that the largest stage keeps as few bytes as possible.

    A layer keeps its parameters, their gradients and their optimizer state; its buffers; and, of the one micro-batch
    that a recomputing ``Pipe`` has alive, its inputs and the tensors that autograd saves. (The inputs count because a
    stage may begin at the layer.) A tensor that two layers keep counts once: a parameter for the first layer that has
    it, an activation for the layer whose input it is.

    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> balance = balance_by_bytes(2, model, torch.randn(16, 8))
    >>> balance, balance.costs
    ([1, 2], [1664, 512, 800])

    Args:
        partitions: the number of stages.
        module, sample, split_nested, kwargs: as in :func:`balance_by_time`. Only forwards are run, each layer once.
        param_scale: the bytes kept for a parameter that requires grad, as a multiple of its own bytes: 1 for itself, 1
            for its gradient, and for the optimizer state 2 with Adam, 1 with momentum, 0 with plain SGD. Default: 4.

    Returns:
        As :func:`balance_by_time`, which also says what is raised, but with the bytes of each layer in ``costs``.
    """
    layers = layers_of(module, split_nested) if isinstance(module, nn.Sequential) else []
    faults = _faults("balance_by_bytes", partitions, layers, module, sample, kwargs)
    if not isinstance(param_scale, (int, float)) or not 1 <= param_scale < float("inf"):
        rule = "param_scale is not a number of at least 1, which the parameter itself counts"
        faults.append(Fault(rule, f"param_scale={param_scale!r}", "param_scale=4, for Adam"))
    check(faults)
    counted: set[Tensor] = set()

    def weigh(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, Any]:
        state = [tensor for tensor in (*layer.parameters(), *layer.buffers()) if tensor not in counted]
        counted.update(state)
        activations, outputs = _activation_bytes(layer, args, kwargs)
        kept = sum(tensor.nbytes * (param_scale if tensor.requires_grad else 1) for tensor in state)
        return activations + round(kept), outputs

    with _as_found(module, accelerators_among((sample, list(module.parameters())), kwargs)):
        costs = _weighed(layers, sample, kwargs, weigh)
    return Balance(balanced(costs, partitions), costs, _names(layers), "bytes")


def _weighed(layers: Sequence[Layer], args: tuple[Any, ...], kwargs: dict[str, Any], weigh: _Weigh) -> list[float]:
    """The cost of each layer, called on the output of the layer before it."""
    costs = []
    for layer in layers:
        cost, outputs = weigh(layer.module, args, kwargs)
        costs.append(cost)
        args, kwargs = (outputs,), {}
    return costs


def _timed(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], devices: Sequence[torch.device]
) -> tuple[float, float, Any]:
    """The seconds of the forward and of the backward, and the outputs. No ``.grad`` is touched."""
    (args, kwargs), leaves = _fresh((args, kwargs))
    leaves += [parameter for parameter in layer.parameters() if parameter.requires_grad]
    begin = _now(devices)
    outputs = layer(*args, **kwargs)
    forward = _now(devices) - begin
    graded = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
    gradients = [torch.ones_like(tensor) for tensor in graded]
    begin = _now(devices)
    if graded and leaves:
        torch.autograd.grad(graded, leaves, gradients, allow_unused=True)
    return forward, _now(devices) - begin, outputs


def _activation_bytes(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, Any]:
    """The bytes of the layer's inputs and saved tensors, without its own tensors and its outputs; and the outputs."""
    (args, kwargs), _ = _fresh((args, kwargs))
    kept = tensors_in((args, kwargs))
    with telling_of_saved(lambda tensor: kept.append(tensor.detach())):
        outputs = layer(*args, **kwargs)
    return bytes_of(kept, but=(*layer.parameters(), *layer.buffers(), *tensors_in(outputs))), outputs


def _fresh(arguments: Any) -> tuple[Any, list[Tensor]]:
    """``arguments`` with copies of the tensors, which a layer may change in place; and their gradients' leaves."""
    leaves = []

    def copy(tensor: Tensor) -> Tensor:
        leaf = tensor.detach().requires_grad_(tensor.requires_grad)
        if leaf.requires_grad:
            leaves.append(leaf)
        return leaf.clone()

    return pytree.tree_map_only(Tensor, copy, arguments), leaves


def _now(devices: Sequence[torch.device]) -> float:
    """The time in seconds, after all work queued on ``devices`` is done."""
    for device in devices:
        torch.accelerator.synchronize(device)
    return time.perf_counter()


@contextmanager
def _as_found(module: nn.Module, devices: Sequence[torch.device]) -> Iterator[None]:
    """Inside, grad mode is on, and the layers hold copies of their buffers. The random state is restored."""
    states = random_state(generators_of(devices, ()))
    before = [(holder._buffers, dict(holder._buffers.items())) for holder in module.modules()]
    with outside_inference(), torch.enable_grad():
        copies: dict[Tensor | None, Tensor] = {buffer: buffer.clone() for buffer in module.buffers()}
        try:
            for buffers, originals in before:
                _replace(buffers, {name: copies.get(buffer, buffer) for name, buffer in originals.items()})
            yield
        finally:
            for buffers, originals in before:
                _replace(buffers, originals)
            restore_states(states)


def _replace(buffers: dict[str, Tensor | None], by: dict[str, Tensor | None]) -> None:
    # The buffers of a scripted module can only be set and deleted one by one.
    for name in set(buffers.keys()) - by.keys():
        del buffers[name]
    for name, buffer in by.items():
        buffers[name] = buffer


def _names(layers: Sequence[Layer]) -> list[str]:
    """The names of the layers; for layers that have only a number, the name of the class."""
    return [type(layer.module).__name__ if layer.name.replace(".", "").isdigit() else layer.name for layer in layers]


def _faults(
    function: str, partitions: Any, layers: Sequence[Layer], module: Any, sample: Any, kwargs: Any
) -> list[Fault]:
    works = f"{function}(2, nn.Sequential(embedding, *blocks, head), x)"
    faults = list(layer_faults(module, layers, works))
    faults += count_faults(partitions, len(layers)) if layers else whole("partitions", partitions)
    if not sample and not kwargs:
        faults.append(Fault("there is no sample, the arguments of the first layer", "none", works))
    return faults
