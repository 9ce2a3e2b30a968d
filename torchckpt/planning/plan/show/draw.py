"""Draw: a plan as SVG, under the step that keeps all."""
from __future__ import annotations

from dataclasses import replace

from torchckpt.planning.draw.svg import svg
from torchckpt.planning.plan.figures import PlanFigures
from torchckpt.planning.plan.show.text import units_of

__all__ = ["draw"]


def draw(plan: PlanFigures) -> str:
    """The step that keeps all and the planned step: the actions of each rank, and its memory under its budget."""
    before, after, units = plan.problem.keep_all.timeline, plan.timeline, replace(units_of(plan), digits=3)
    least, most = (max(of.peak_bytes) for of in (after, before))
    change = f"for {plan.overhead(plan.step_seconds) * 100:.1f} % more time"
    title = f"Peak memory {units.of_memory(least)} in place of {units.of_memory(most)}, {change}"
    schedule = plan.schedule
    counts = f"{schedule.stages} stages, {schedule.micro_batches} micro-batches"
    subtitle = f"{schedule.name}: {counts}; planned within the budget of each rank"
    return svg(
        before,
        after,
        names=("everything kept", "planned"),
        budget_bytes=plan.problem.budget_bytes,
        units=units,
        title=title if plan.recomputed_share else "Everything fits, so nothing is recomputed",
        subtitle=subtitle,
        lines=[{}, {"bound": plan.bound_seconds}] if plan.recomputed_share else (),
    )
