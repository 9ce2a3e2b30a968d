"""Draw: a plan as SVG, under the step that keeps all."""
from __future__ import annotations

from torchckpt.model.plan.figures import PlanFigures
from torchckpt.model.plan.text import units_of
from torchckpt.model.svg import svg

__all__ = ["draw"]


def draw(plan: PlanFigures) -> str:
    """Who does what when, and of each rank the memory over time, under its budget."""
    names = ("everything kept", "planned")
    before, after = plan.problem.keep_all, plan.timeline
    return svg(before, after, names=names, budget_bytes=plan.problem.budget_bytes, units=units_of(plan))
