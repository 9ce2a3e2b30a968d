"""Statistics: mean and variance per channel of values that arrive in parts, without loss of precision."""
from __future__ import annotations

import threading

import torch
from torch import Tensor

__all__ = ["Statistics"]


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
            self._merge(values.numel() // values.shape[1], mean, variance)

    def _merge(self, count: int, mean: Tensor, variance: Tensor) -> None:
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
