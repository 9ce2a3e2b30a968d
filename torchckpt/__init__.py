"""Activation recomputation for PyTorch that starts before the gradient arrives."""
from torchckpt import errors, testing
from torchckpt.errors import CheckpointError
from torchckpt.kernel import Checkpointing, checkpoint, checkpoint_module, is_checkpointing, is_recomputing
from torchckpt.pipe import Pipe
from torchckpt.version import __version__

__all__ = [
    "CheckpointError",
    "Checkpointing",
    "Pipe",
    "__version__",
    "checkpoint",
    "checkpoint_module",
    "errors",
    "is_checkpointing",
    "is_recomputing",
    "testing",
]
