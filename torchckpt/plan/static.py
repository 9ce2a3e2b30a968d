"""Static: the memory of a stage besides activations: weights, their gradients, and optimizer state."""
from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from torchckpt.kernel.saved import storage_of

__all__ = ["Static", "static_of"]

_MASTER_BYTES, _MOMENTS_BYTES = 4, 8
"""Of Adam in mixed precision: a copy in float32 of a parameter that is smaller, and two moments in float32."""


@dataclass(frozen=True)
class Static:
    """A gradient has the type of its parameter. A frozen parameter has none, and no optimizer state."""

    weight_bytes: int = 0
    grad_bytes: int = 0
    trained: int = 0
    """Parameters, by element."""
    small: int = 0
    """Of them, those of fewer than 4 bytes."""

    def __add__(self, other: Static) -> Static:
        return Static(
            self.weight_bytes + other.weight_bytes,
            self.grad_bytes + other.grad_bytes,
            self.trained + other.trained,
            self.small + other.small,
        )

    def total_bytes(self, optimizer_bytes: float | None = None) -> float:
        """With so many bytes of optimizer state for each parameter; by default those of Adam: 12 where the parameter
        has two bytes, 8 where it has four.

        >>> Static(weight_bytes=20, grad_bytes=20, trained=10, small=10).total_bytes()
        160
        """
        if optimizer_bytes is None:
            return self.weight_bytes + self.grad_bytes + _MOMENTS_BYTES * self.trained + _MASTER_BYTES * self.small
        return self.weight_bytes + self.grad_bytes + optimizer_bytes * self.trained


def static_of(stage: nn.Module) -> dict[StorageWeakRef, Static]:
    """Of each storage of a parameter or a buffer."""
    found: dict[StorageWeakRef, Static] = {}
    for parameter in stage.parameters():
        trained = parameter.numel() if parameter.requires_grad else 0
        small = trained if parameter.element_size() < 4 else 0
        _add(found, parameter, Static(0, trained * parameter.element_size(), trained, small))
    for buffer in stage.buffers():
        _add(found, buffer, Static())
    return found


def _add(found: dict[StorageWeakRef, Static], tensor: Tensor, own: Static) -> None:
    """Parameters may be views of one storage, which is there once."""
    for storage, size in storage_of(tensor).items():
        found[storage] = found.get(storage, Static(size)) + own
