"""Deferred batch norm: BatchNorm layers that run on micro-batches and keep running statistics of the mini-batch."""
from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.overrides import TorchFunctionMode

from torchckpt.errors import Fault, called, check
from torchckpt.regions.core.checkpointing import outside
from torchckpt.regions.flags import is_recomputing
from torchckpt.regions.private import batch_norm_layer
from torchckpt.regions.state import norms
from torchckpt.regions.wrap.mixin import Mixin, put, take

__all__ = ["DeferredBatchNorm", "Statistics"]


class Statistics:
    """Count, mean and sum of squared deviations of all values so far, per channel.

    Parts are merged as by Chan, Golub and LeVeque (1979). The mean of the first part is subtracted from all values: if
    values are large and close together, their plain means have too few digits to tell two parts apart. Computes in
    float32, and in float64 for float64 values. Any number of threads may add. Never waits for an accelerator.

    >>> statistics = Statistics()
    >>> statistics.add(torch.tensor([[1.0], [2.0]]))
    >>> statistics.add(torch.tensor([[6.0]]))
    >>> statistics.count, statistics.mean(), statistics.variance()
    (3, tensor([3.]), tensor([7.]))
    """

    def __init__(self) -> None:
        self.count = 0
        """The number of values per channel."""
        self._lock = threading.Lock()
        self._origin = self._mean = self._squares = torch.zeros(())  # the mean is its distance from the origin

    @torch.no_grad()
    def add(self, values: Tensor) -> None:
        """Add ``values`` of the shape (rows, channels, ...)."""
        if not values.numel():
            return
        dims = [dim for dim in range(values.dim()) if dim != 1]
        with self._lock:
            if not self.count:
                dtype = torch.promote_types(values.dtype, torch.float32)
                self._origin = values.mean(dims, keepdim=True, dtype=dtype)
            variance, mean = torch.var_mean(values - self._origin, dims, correction=0)
            count = values.numel() // values.shape[1]
            total = self.count + count
            delta = mean - self._mean if self.count else mean
            self._squares = self._squares + variance * count + delta.square() * (self.count * count / total)
            self._mean = self._mean + delta * (count / total)
            self.count = total

    def mean(self) -> Tensor:
        return self._origin.flatten() + self._mean

    def variance(self) -> Tensor:
        """The unbiased variance; needs at least two values."""
        return self._squares / (self.count - 1)


M = TypeVar("M", bound=nn.Module)


class DeferredBatchNorm(Mixin):
    """BatchNorm with running statistics of the whole mini-batch, for any number of micro-batches.

    A converted layer normalises each micro-batch by the statistics of that micro-batch: a pipeline does not know the
    mean of the mini-batch in time. But inside ``mini_batch`` it updates its running statistics only once, at the end,
    to the values that the whole mini-batch would give. Replays do not count. Outside ``mini_batch`` it works as a plain
    BatchNorm.

    >>> model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3))
    >>> model = DeferredBatchNorm.convert(model)
    >>> with DeferredBatchNorm.mini_batch(model):
    ...     outputs = [model(micro_batch) for micro_batch in torch.randn(8, 3).tensor_split(4)]
    >>> model[0].num_batches_tracked
    tensor(1)

    The idea comes from torchgpipe (Kim et al., 2020).
    """

    _torchckpt_setting = "_torchckpt_deferred"

    @staticmethod
    def _torchckpt_call(plain: Any, args: tuple[Any, ...], kwargs: dict[str, Any], is_set: bool) -> Any:
        """Call the forward ``plain`` of a converted layer."""
        if torch.compiler.is_dynamo_compiling():
            return outside(DeferredBatchNorm._torchckpt_call, plain, args, kwargs, is_set)
        layer = plain.__self__
        batch = _under_way.get(layer)
        if batch is None or is_recomputing() or not norms.updates(layer):
            return plain(*args, **kwargs)
        # A replay, which is outside the mini-batch, must save the same tensors as this call: another reason for copies.
        with norms.on_copies(layer), _Adding(layer, batch.statistics):
            return plain(*args, **kwargs)

    @staticmethod
    @called("DeferredBatchNorm.convert")
    def convert(module: M) -> M:
        """Defer the running statistics of every BatchNorm layer in ``module``, in place.

        ``state_dict`` keys, parameters, buffers, ``isinstance``, ``repr``, hooks, pickling and copying stay as they
        are, and a copy is converted too. A second call changes nothing. Layers without running statistics,
        SyncBatchNorm and other norm layers are not converted.

        Returns:
            ``module`` itself.

        Raises:
            ArgumentError: ``module`` is no module, a lazy layer has not seen its first input, or a layer has its
                ``forward`` set on the instance.
        """
        check(_module_faults(module))
        check(_layer_faults(module))
        for _, layer in _layers(module):
            put(layer, DeferredBatchNorm, True)
        return module

    @staticmethod
    @called("DeferredBatchNorm.revert")
    def revert(module: M) -> M:
        """Undo :meth:`convert`, for every layer in ``module``; returns ``module`` itself."""
        check(_module_faults(module))
        for layer in _converted(module):
            take(layer, DeferredBatchNorm)
        return module

    @staticmethod
    @contextmanager
    def mini_batch(module: nn.Module) -> Iterator[None]:
        """Inside, calls of the converted layers in ``module``, on any thread, are micro-batches of one mini-batch.

        At the end of the block, each layer that was called updates its running statistics once, even if it was called
        several times for a micro-batch. If the block or the update raises, no layer does. Blocks that overlap or are
        nested are one mini-batch, which ends with the last block; if any of them raises, no layer updates.
        """
        check(_module_faults(module), "DeferredBatchNorm.mini_batch")
        layers, block = _converted(module), object()
        try:
            with _lock:
                for layer in layers:
                    _under_way.setdefault(layer, _MiniBatch()).blocks.add(block)
            yield
            _commit(_leave(layers, block, completed=True))
        except BaseException:
            _leave(layers, block, completed=False)  # those that it has not left
            raise


# a mini-batch ---------------------------------------------------------------------------------------------------------


class _MiniBatch:
    """What one layer has seen of a mini-batch."""

    def __init__(self) -> None:
        self.failed, self.statistics = False, Statistics()
        self.blocks: set[object] = set()
        """The blocks that have not ended."""


_lock = threading.Lock()
_under_way: dict[nn.Module, _MiniBatch] = {}


def _leave(layers: list[nn.Module], block: object, completed: bool) -> list[tuple[nn.Module, Statistics]]:
    """End a block. Return the layers whose mini-batch is now complete and which were called in it."""
    ended = []
    with _lock:
        for layer in layers:
            batch = _under_way.get(layer)
            if batch is None or block not in batch.blocks:
                continue
            batch.failed |= not completed
            if len(batch.blocks) > 1:
                batch.blocks.remove(block)
                continue
            if batch.statistics.count and not batch.failed:
                ended.append((layer, batch.statistics))
            del _under_way[layer]
    return ended


@torch.no_grad()
def _commit(ended: list[tuple[nn.Module, Statistics]]) -> None:
    """Update the buffers of all layers in ``ended``; if that raises, of none."""
    after = [update for layer, statistics in ended for update in _updates(layer, statistics)]
    before = [(buffer, buffer.clone()) for buffer, _ in after]
    try:
        _write(after)
    except BaseException:
        _write(before)
        raise


def _updates(layer: Any, statistics: Statistics) -> Iterator[tuple[Tensor, Tensor]]:
    """The buffers of ``layer``, each with its value after the mini-batch."""
    buffers = norms.own_buffers(layer)
    batches, momentum = buffers.get("num_batches_tracked"), layer.momentum
    if batches is not None:
        yield batches, batches + 1
    for name, value in (("running_mean", statistics.mean()), ("running_var", statistics.variance())):
        running = buffers.get(name)
        if running is None:
            continue
        factor: Any = momentum
        if factor is None:  # the average of all mini-batches
            factor = 0.0 if batches is None else (batches + 1).to(value.dtype).reciprocal()
        yield running, running * (1 - factor) + value * factor


def _write(values: list[tuple[Tensor, Tensor]]) -> None:
    for buffer, value in values:
        # Of what it moves, BatchNorm raises one version counter: that of the number of batches, which has no fraction.
        (buffer.data if buffer.is_floating_point() else buffer).copy_(value)


class _Adding(TorchFunctionMode):
    """Adds the values that ``layer`` normalises; in a subclass of BatchNorm they may differ from the layer's input."""

    def __init__(self, layer: nn.Module, statistics: Statistics) -> None:
        super().__init__()
        self._mean, self._statistics = layer._buffers["running_mean"], statistics

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if func is F.batch_norm or func is torch.batch_norm:
            training = args[5] if len(args) > 5 else kwargs.get("training", False)
            if training and any(value is self._mean for value in (*args, *kwargs.values())):
                self._statistics.add(args[0] if args else kwargs["input"])
        return output


# layers ---------------------------------------------------------------------------------------------------------------


def _layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, layer in module.named_modules():
        if isinstance(layer, nn.SyncBatchNorm):
            continue
        if isinstance(layer, batch_norm_layer) and layer.track_running_stats:
            yield name, layer


def _converted(module: nn.Module) -> list[nn.Module]:
    return [layer for layer in module.modules() if DeferredBatchNorm._torchckpt_setting in layer.__dict__]


def _module_faults(module: object) -> Iterator[Fault]:
    if not isinstance(module, nn.Module):
        yield Fault("the module is not an nn.Module", type(module).__name__, "DeferredBatchNorm.convert(model)")


def _layer_faults(module: nn.Module) -> Iterator[Fault]:
    for name, layer in _layers(module):
        received = f"{type(layer).__name__}{f' {name!r}' if name else ''}"
        if isinstance(layer, LazyModuleMixin):
            rule = "a lazy BatchNorm has no parameters yet, and its first call changes its class"
            yield Fault(rule, received, "model(example) first, then DeferredBatchNorm.convert(model)")
        elif "forward" in layer.__dict__:
            rule = "the forward is not a method of the layer's class"
            works = "a subclass of BatchNorm with that forward"
            yield Fault(rule, f"{received}, whose forward is set on the instance", works)
