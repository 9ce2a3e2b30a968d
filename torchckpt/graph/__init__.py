"""The graph level: one traced graph of a step, one schedule, many ways to choose what is kept and what recomputed."""
from __future__ import annotations

from torchckpt.graph.frontier import frontier
from torchckpt.graph.marks import mark, region, sequential
from torchckpt.graph.rematerialize import rematerialize
from torchckpt.model.remat.plan import Plan

__all__ = ["Plan", "frontier", "mark", "region", "rematerialize", "sequential"]
