"""Planning of a pipeline under a byte budget, without torch: what to keep, what to recompute, and when.

    pipeline          what users call: ``plan_pipeline``, ``plan_bound``; blocks moved between stages
    every             all schedules side by side
    run               plans for steps that are run
    result            what users get: the plan, its tables and its picture
    stored            the plan as JSON
    figures           its figures, beside those of the usual ways to recompute
    away              plans that send blocks to a host
    search            what to keep and when to recompute; the bound
    problem           the input, checked

>>> from torchckpt.planning import Block, Stage, one_f_one_b
>>> stages = [Stage((Block(boundary_bytes=0.06),) * 8)] * 4
>>> plan = plan_pipeline(one_f_one_b(4, 8), stages, budget="50%")
>>> plan.step_seconds, plan.bound_seconds
(282.0, 282.0)
"""
from torchckpt.planning.plan.pipeline import plan_bound, plan_pipeline
from torchckpt.planning.plan.result import PipelinePlan

__all__ = ["PipelinePlan", "plan_bound", "plan_pipeline"]
