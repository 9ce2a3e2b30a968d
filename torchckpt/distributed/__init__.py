"""Pipelines of many processes: recompute as an action in the schedules of ``torch.distributed.pipelining``.

    apply             what users call: ``recompute_ahead``
    plan              a schedule that meets a byte budget
    ahead             a schedule of torch's that recomputes before gradients arrive
    torch_schedules   torch's schedules as those of torchckpt.model
    frames, region_options    frames of regions, by micro-batch; which regions keep their activations
    record, sizes     when actions ran; the bytes of a micro-batch
    meeting, plain_regions    errors: a rank that calls alone; regions that are torch's own
    objects           what ranks tell each other, without NumPy
    private           private names of torch
"""
from torchckpt.distributed.ahead import RecomputeAhead
from torchckpt.distributed.apply import recompute_ahead
from torchckpt.distributed.plan.recompute_within import RecomputeWithin
from torchckpt.distributed.torch_schedules import schedule_of

__all__ = ["RecomputeAhead", "RecomputeWithin", "recompute_ahead", "schedule_of"]
