"""Costs of a pipeline that is never run, for :func:`torchckpt.planning.plan.plan_pipeline`.

    pipeline          what users call: ``pipeline_costs``
    chain             the stages, run one after the other on tensors without memory
    count             one stage: its forward and its backwards
    ledger            FLOPs and moved bytes by part and phase; bytes that wait for the backward
    operation         one operator call; what an accelerator runs in its place
    parts             which calls are blocks; weights, gradients, optimizer state
    private           private names of torch

>>> costs = torchckpt.costs.pipeline_costs(stages, "h100")
>>> plan = plan_pipeline(one_f_one_b(2, 8), costs.stages, "50%", costs.link)
"""
from torchckpt.costs.pipeline import EFFICIENCY, PipelineCosts, pipeline_costs

__all__ = ["EFFICIENCY", "PipelineCosts", "pipeline_costs"]
