"""Pace: the seconds of operators on a device that is not there.

By kind and size, where it is known what a device reaches of its peaks (:mod:`torchckpt.planning.rates`): products in
whole tiles, kernels of attention, what is bound by memory, and the host that starts each kernel. Otherwise the larger
of what an operator computes, at one share of the peak, and what it moves.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torchckpt.planning.device import Device
from torchckpt.planning.rates import RATES, Machine, Product

__all__ = ["Pace", "Work", "pace_of"]


class Work(NamedTuple):
    """What an operator call does."""

    flops: int
    moved_bytes: int
    dtype: str
    """That it computes with, such as ``"bfloat16"``."""


class Pace(Protocol):
    @property
    def efficiency(self) -> float | None:
        """The share of the peak that stands for all operations, if one does."""

    def call(self, work: Work, operator: Any, args: Any, kwargs: Any) -> float:
        """Seconds of an operator call."""

    def part(self, seconds: float, kernels: int, beside: float) -> float:
        """Seconds of a part of a stage, whose operators take ``seconds`` in so many kernels; ``beside`` them run
        collectives."""


def pace_of(device: Device, efficiency: float | None, default: float) -> Pace:
    """By one share of the peak if it is given; ``default`` is that of devices of which no more is known."""
    if efficiency is None and device.name in RATES:
        return _ByKind(Machine(device, RATES[device.name]))
    return _ByShare(device, efficiency or default)


@dataclass(frozen=True)
class _ByShare:
    device: Device
    efficiency: float

    def call(self, work: Work, operator: Any, args: Any, kwargs: Any) -> float:
        return self.device.seconds(*work, self.efficiency)

    def part(self, seconds: float, kernels: int, beside: float) -> float:
        return max(seconds, beside)


_PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1}
"""Matrix products: the place of their first factor."""


@dataclass(frozen=True)
class _ByKind:
    machine: Machine
    efficiency: None = None

    def call(self, work: Work, operator: Any, args: Any, kwargs: Any) -> float:
        flops, moved_bytes, dtype = work
        name = operator.overloadpacket.__name__
        if not moved_bytes:
            return 0.0
        if flops and name in _PRODUCTS:
            first, second = args[_PRODUCTS[name] :][:2]
            product = Product(first.shape[-2], second.shape[-1], first.shape[-1], *first.shape[:-2])
            return self.machine.product(product, dtype, moved_bytes)
        if flops and name.startswith("_scaled_dot_product"):
            least = self.machine.operation(0, moved_bytes, dtype)
            return max(least, self._attention(flops, dtype, operator, args, kwargs))
        return self.machine.operation(flops, moved_bytes, dtype)

    def _attention(self, flops: int, dtype: str, operator: Any, args: Any, kwargs: Any) -> float:
        """That of torch is FlashAttention 2. Counted FLOPs have the scores that a causal mask leaves out."""
        given = {**dict(zip((argument.name for argument in operator._schema.arguments), args)), **kwargs}
        is_backward = operator.overloadpacket.__name__.endswith("_backward")
        forward = flops / (2.5 if is_backward else 1) / (2 if given.get("is_causal") else 1)
        longer = max(given["query"].shape[-2], given["key"].shape[-2])
        return self.machine.attention(forward, "flash2", longer, dtype)[is_backward]

    def part(self, seconds: float, kernels: int, beside: float) -> float:
        return self.machine.overlapped(self.machine.beside_host(seconds, kernels), beside)
