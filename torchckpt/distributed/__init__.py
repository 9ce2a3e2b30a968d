"""Many processes, on ``torch.distributed.pipelining``: recompute as an action of its schedules."""
from torchckpt.distributed.ahead import RecomputeAhead
from torchckpt.distributed.apply import recompute_ahead
from torchckpt.distributed.live import schedule_of

__all__ = ["RecomputeAhead", "recompute_ahead", "schedule_of"]
