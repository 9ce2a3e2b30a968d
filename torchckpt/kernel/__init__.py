"""One checkpointed call."""
from torchckpt.kernel.checkpointing import Checkpointing, checkpoint
from torchckpt.kernel.flags import is_checkpointing, is_recomputing
from torchckpt.kernel.module import checkpoint_module

__all__ = ["Checkpointing", "checkpoint", "checkpoint_module", "is_checkpointing", "is_recomputing"]
