"""Costs of a pipeline that is never run, for :func:`torchckpt.model.plan.plan_pipeline`.

>>> costs = torchckpt.plan.pipeline_costs(stages, "h100")
>>> plan = plan_pipeline(one_f_one_b(2, 8), costs.stages, "50%", costs.link)
"""
from torchckpt.plan.costs import EFFICIENCY, PipelineCosts, pipeline_costs

__all__ = ["EFFICIENCY", "PipelineCosts", "pipeline_costs"]
