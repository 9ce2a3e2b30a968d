"""Many processes, on ``torch.distributed.pipelining``."""
from torchckpt.distributed.live import schedule_of

__all__ = ["schedule_of"]
