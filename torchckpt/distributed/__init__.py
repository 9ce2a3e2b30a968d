"""Pipelines of many processes: recompute as an action in the schedules of ``torch.distributed.pipelining``.

    apply             what users call: ``recompute_ahead``
    budget            a schedule that meets a byte budget
    ahead             a schedule of torch's that recomputes before gradients arrive
    frames            frames of regions, by micro-batch, and which regions keep their activations
    record            when actions ran, on all ranks; the step that was measured
    counting          a stage as it was measured: bytes by region, and then seconds
    meeting, plain_regions    what ranks tell each other; errors about regions that are torch's own
    torch_schedules   torch's schedules as those of torchckpt.planning
    private           private names of torch
"""
from torchckpt.distributed.ahead import RecomputeAhead
from torchckpt.distributed.apply import recompute_ahead
from torchckpt.distributed.budget.recompute_within import RecomputeWithin
from torchckpt.distributed.torch_schedules import schedule_of

__all__ = ["RecomputeAhead", "RecomputeWithin", "recompute_ahead", "schedule_of"]
