"""Costs of a pipeline that is never run, for :func:`torchckpt.planning.plan.plan_pipeline`.

    pipeline          what users call: ``pipeline_costs``
    chain             the stages, run one after the other on tensors without memory
    count             one stage: its forward and its backwards, by block; weights, gradients, optimizer state
    profile           the seconds of one stage that is run
    parts             the blocks, and what is before and after them
    mesh              what users call: ``fake_mesh``, ranks that are not there, for stages that are parallelized
    parallel          what one rank tells others, and what FSDP2 gathers
    operation         FLOPs, moved bytes and seconds of operator calls; what an accelerator runs in their place
    private           private names of torch

>>> costs = torchckpt.costs.pipeline_costs(stages, "h100")
>>> plan = plan_pipeline(one_f_one_b(2, 8), costs.stages, "50%", costs.link)
"""
from torchckpt.costs.mesh import fake_mesh
from torchckpt.costs.pipeline import EFFICIENCY, PipelineCosts, pipeline_costs
from torchckpt.planning.work.block import Collective

__all__ = ["EFFICIENCY", "Collective", "PipelineCosts", "fake_mesh", "pipeline_costs"]
