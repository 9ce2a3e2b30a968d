"""Pipelines of many processes: recompute as an action in the schedules of ``torch.distributed.pipelining``.

    apply             what users call: ``recompute_ahead``, ``schedule_of``
    within, phases    a schedule that meets a byte budget: the first steps are measured, the others follow a plan
    ahead             a schedule of torch's that recomputes before gradients arrive
    runtime           torch's runtime, with recomputes among its actions
    moving            blocks that go to the host and come back, at the boundaries that a plan names
    meeting           what ranks tell each other, and when; when actions ran, on all ranks; the step that was measured
    faults            regions that are torch's own, what split backwards leave out, and steps that failed
    private           private names of torch
"""
from torchckpt.distributed.ahead import RecomputeAhead
from torchckpt.distributed.apply import recompute_ahead, schedule_of
from torchckpt.distributed.within import RecomputeWithin

__all__ = ["RecomputeAhead", "RecomputeWithin", "recompute_ahead", "schedule_of"]
