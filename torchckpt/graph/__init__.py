"""The graph level: one traced graph of a step, one schedule, many ways to choose what is kept and what recomputed.

    capture ──► Joint ──► choose ──► Schedule ──► emit ──► a forward and a backward, or one graph of gradients
                          keep: marks, regions, names, policies
                          planner: a byte budget

A user begins with :func:`rematerialize`; a reader with ``joint``, then :mod:`torchckpt.model.remat`, where a step is
operations on storages and needs no torch.
"""
from __future__ import annotations

from torchckpt.graph.backend import backend
from torchckpt.graph.frontier import Frontier, frontier
from torchckpt.graph.gradient import gradient
from torchckpt.graph.gradients import gradients
from torchckpt.graph.in_place import RematerializeHandle, rematerialize_
from torchckpt.graph.inspect import separators, simulate
from torchckpt.graph.marks import mark, region, sequential
from torchckpt.graph.rematerialize import rematerialize
from torchckpt.graph.simplify import simplify
from torchckpt.model.remat.plan import Plan

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
