"""Many processes, on ``torch.distributed.pipelining``: recompute as an action of its schedules."""
from torchckpt.distributed.ahead import RecomputeAhead
from torchckpt.distributed.apply import recompute_ahead
from torchckpt.distributed.live import schedule_of
from torchckpt.distributed.plan.within import RecomputeWithin

__all__ = ["RecomputeAhead", "RecomputeWithin", "recompute_ahead", "schedule_of"]
