"""Pipelines of many processes: recompute as an action in the schedules of ``torch.distributed.pipelining``."""
from torchckpt.distributed.ahead import RecomputeAhead
from torchckpt.distributed.apply import recompute_ahead
from torchckpt.distributed.live import schedule_of
from torchckpt.distributed.plan.within import RecomputeWithin

__all__ = ["RecomputeAhead", "RecomputeWithin", "recompute_ahead", "schedule_of"]
