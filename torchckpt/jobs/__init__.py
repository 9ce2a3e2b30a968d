"""Jobs: a training job that is described: model, layout, devices; its step, its memory, the layouts that fit.

No torch is imported, and no model is made: parameters, FLOPs, bytes and collectives follow from sizes.

    search               the best of all layouts of a model on so many GPUs
    plan                 a job within the memory of its devices; its picture
    memory               what each rank holds, by part
    job                  a model in a layout on devices, as stages, with the step
    layer                the seconds of one layer; the bytes that it keeps
    layout               how a job is split, its schedule, and what its software keeps
    presets              public models by name
    model                sizes of a transformer; what is wrong with the values of a description
"""
from __future__ import annotations

from torchckpt.jobs.job import Job
from torchckpt.jobs.layout import Layout, Software
from torchckpt.jobs.memory import RankMemory, memory_of
from torchckpt.jobs.model import Model
from torchckpt.jobs.plan import JobPlan, plan_job
from torchckpt.jobs.presets import MODELS, model_named
from torchckpt.jobs.search import Outcome, SearchResult, search_layouts
from torchckpt.planning.rates import MACHINES, Machine, Rates, machine_named

__all__ = [
    "MACHINES", "MODELS", "Job", "JobPlan", "Layout", "Machine", "Model", "Outcome", "RankMemory", "Rates",
    "SearchResult", "Software", "machine_named", "memory_of", "model_named", "plan_job", "search_layouts",
]
