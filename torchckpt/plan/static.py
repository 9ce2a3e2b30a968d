"""Static: the memory of a stage besides activations: weights, their gradients, and optimizer state."""
from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from torchckpt.kernel.saved import storage_of

__all__ = ["Static", "static_of"]

_MASTER_BYTES, _MOMENTS_BYTES = 4, 8
"""Bytes of Adam's state in mixed precision: a float32 copy of a smaller parameter, and two float32 moments."""


@dataclass(frozen=True)
class Static:
    """Weights, their gradients, and the counts that decide the bytes of optimizer state.

    A gradient has the dtype of its parameter. A frozen parameter has no gradient and no optimizer state.
    """

    weight_bytes: int = 0
    grad_bytes: int = 0
    trained: int = 0
    """Elements of trained parameters."""
    below_float32: int = 0
    """Those of fewer than 4 bytes each."""

    def __add__(self, other: Static) -> Static:
        return Static(
            self.weight_bytes + other.weight_bytes,
            self.grad_bytes + other.grad_bytes,
            self.trained + other.trained,
            self.below_float32 + other.below_float32,
        )

    def total_bytes(self, optimizer_bytes: float | None = None) -> float:
        """Bytes of weights, gradients and optimizer state.

        >>> Static(weight_bytes=20, grad_bytes=20, trained=10, below_float32=10).total_bytes()
        160

        Args:
            optimizer_bytes: state of each trained element. Default: Adam's, 12 for one of two bytes, 8 for one of four.
        """
        state_bytes: float = _MOMENTS_BYTES * self.trained + _MASTER_BYTES * self.below_float32
        if optimizer_bytes is not None:
            state_bytes = optimizer_bytes * self.trained
        return self.weight_bytes + self.grad_bytes + state_bytes


def static_of(stage: nn.Module) -> dict[StorageWeakRef, Static]:
    """What each storage of a parameter or a buffer adds."""
    found: dict[StorageWeakRef, Static] = {}
    for parameter in stage.parameters():
        trained = parameter.numel() if parameter.requires_grad else 0
        below_float32 = trained if parameter.element_size() < 4 else 0
        _add(found, parameter, Static(0, trained * parameter.element_size(), trained, below_float32))
    for buffer in stage.buffers():
        _add(found, buffer, Static())
    return found


def _add(found: dict[StorageWeakRef, Static], tensor: Tensor, own: Static) -> None:
    """Add ``own`` to the storages of ``tensor``. Several parameters may be views of one storage; it counts once."""
    for storage, size in storage_of(tensor).items():
        found[storage] = found.get(storage, Static(size)) + own
