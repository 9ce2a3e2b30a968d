"""The graph level: it traces a step as one graph, and schedules which values are kept and which are recomputed.

    capture ──► Joint ──► choose ──► Schedule ──► emit ──► a forward and a backward, or one graph of gradients
                          keep: marks, regions, names, policies
                          planner: a byte budget

    run, frontier     what users call: ``rematerialize``, ``rematerialize_``, ``backend``; many budgets in one call
    derive            derivatives as graphs
    choose            from a budget or names to a schedule
    trace, step       a call as a graph; a graph as a dataflow, and a schedule as graphs
    annotations       marks, regions, names
    progress, private    one line for people; private names of torch

A user begins with :func:`rematerialize`. A reader of the code begins with ``step/joint``, then reads
:mod:`torchckpt.planning.remat`, which describes a step as operations on storages and does not need torch.
"""
from __future__ import annotations

from torchckpt.graph.annotations import mark, region, sequential
from torchckpt.graph.derive.gradient import gradient, gradients
from torchckpt.graph.derive.inspect import separators, simulate
from torchckpt.graph.derive.simplify import simplify
from torchckpt.graph.frontier import Frontier, frontier
from torchckpt.graph.run.backend import backend
from torchckpt.graph.run.in_place import RematerializeHandle, rematerialize_
from torchckpt.graph.run.rematerialize import rematerialize
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
