"""Pipelines of many processes: recompute as an action in the schedules of ``torch.distributed.pipelining``."""
from torchckpt.distributed.ahead import RecomputeAhead
from torchckpt.distributed.apply import recompute_ahead
from torchckpt.distributed.plan.recompute_within import RecomputeWithin
from torchckpt.distributed.torch_schedules import schedule_of

__all__ = ["RecomputeAhead", "RecomputeWithin", "recompute_ahead", "schedule_of"]
