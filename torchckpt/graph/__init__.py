"""The graph level: it traces a step as one graph, and schedules which values are kept and which are recomputed.

    capture ──► Joint ──► planner ──► Schedule ──► emit ──► a forward and a backward, or one graph of gradients
                          keep: marks, regions, names, policies
                          a byte budget

    run, derive       what users call: ``rematerialize``, ``rematerialize_``, ``backend``; derivatives as graphs
    inspect           what a call takes over all budgets, and a graph, without a run
    planner, keep     from a budget or names to a schedule
    trace, step       a call as a graph; a graph as a dataflow, and a schedule as graphs
    annotations       marks, regions, names
    progress, private    one line for people; private names of torch

A user begins with :func:`rematerialize`. A reader of the code begins with ``step/joint``, then reads
:mod:`torchckpt.planning.remat`, which describes a step as operations on storages and does not need torch.
"""
from __future__ import annotations

from torchckpt.graph.annotations import mark, region, sequential
from torchckpt.graph.derive.gradient import gradient, gradients
from torchckpt.graph.derive.simplify import simplify
from torchckpt.graph.inspect import Frontier, frontier, separators, simulate
from torchckpt.graph.run.backend import backend
from torchckpt.graph.run.rematerialize import RematerializeHandle, rematerialize, rematerialize_
from torchckpt.planning.remat.plan import Plan

__all__ = [
    "Frontier",
    "Plan",
    "RematerializeHandle",
    "backend",
    "frontier",
    "gradient",
    "gradients",
    "mark",
    "region",
    "rematerialize",
    "rematerialize_",
    "separators",
    "sequential",
    "simplify",
    "simulate",
]
