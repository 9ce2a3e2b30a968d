"""Text: a plan as a table by stage, a table by rank, and the line that says what it is worth."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torchckpt.planning.draw.svg import svg
from torchckpt.planning.draw.units import Units, aligned, number, percent, units_for
from torchckpt.planning.plan.figures import PlanFigures
from torchckpt.planning.work.choice import Choice

__all__ = ["by_stage", "picture", "summary", "table", "units_of"]

_LONGEST_PERIOD = 12
"""Micro-batches that are written as one pattern."""


def table(plan: PlanFigures) -> str:
    """The plan as text: a table by stage, and one by rank."""
    problem, units = plan.problem, units_of(plan)
    counts = f"{len(problem.stages)} stages on {len(plan.schedule.ranks)} ranks, {plan.schedule.micro_batches}"
    head = f"{plan.schedule.name}: {counts} micro-batches"
    return "\n\n".join((head, by_stage(plan, units), aligned(_by_rank(plan, units))))


def summary(plan: PlanFigures) -> str:
    """One line: the step, its bound, and what people do without a plan, over keeping all."""
    parts = [f"step {_step(plan, plan.step_seconds)}, {_over(plan, plan.step_seconds)} over keeping all"]
    parts[0] += f" (bound {_over(plan, plan.bound_seconds)})"
    if not plan.recomputed_share:
        parts.append("everything fits, so nothing need be recomputed")
        return "; ".join(parts)
    every, same = plan.all_recomputed, plan.same_recomputed
    others = [_rule("recomputing all", every.step_seconds, plan)]
    blocks = "block" if same.blocks == 1 else f"{same.blocks} blocks"
    others.append(_rule(f"the same {blocks} on every stage", same.step_seconds, plan))
    return "; ".join((*parts, ", ".join(others)))


def units_of(plan: PlanFigures) -> Units:
    """Bytes and seconds where budgets are large; else memory in the caller's own unit, time as a bare number."""
    return units_for(max(plan.problem.budget_bytes), memory="")


def by_stage(plan: PlanFigures, units: Units) -> str:
    """A table of what each stage recomputes. The choices are its last column, as they may be long; a legend follows."""
    rows = [("stage", "rank", "blocks", "bytes", "recomputed", "seconds")]
    texts = ["kept/early/late"]
    for stage, work in enumerate(plan.problem.stages):
        redone = plan.recompute_seconds[stage]
        every = plan.schedule.micro_batches * work.recompute_seconds
        share = percent(redone / every) if every else "-"
        rank = plan.schedule.placement[stage]
        blocks, saved = str(len(work.blocks)), units.of_memory(work.saved_bytes)
        rows.append((str(stage), str(rank), blocks, saved, share, units.of_time(redone)))
        texts.append(_runs([plan.step.choice((stage, i)) for i in range(plan.schedule.micro_batches)]))
    lines = aligned(rows).split("\n")
    width = max(map(len, lines))
    key = "blocks kept/early/late by micro-batch: kept; recomputed before the gradient arrives; inside the backward"
    return "\n".join([*(f"{line.ljust(width)}  {text}" for line, text in zip(lines, texts)), "", key])


def _runs(choices: Sequence[Choice]) -> str:
    """The choices as text. ``3/0/5 x4, (8/0/0, 0/8/0) x2``: four equal micro-batches, then a pair that occurs twice."""
    texts, runs, start = list(map(str, choices)), [], 0
    while start < len(texts):
        period = max(range(1, _LONGEST_PERIOD + 1), key=lambda length: (_covered(texts, start, length), -length))
        covered = max(period, _covered(texts, start, period))
        if covered == period:
            period = covered = 1
        text = ", ".join(texts[start : start + period])
        times = covered // period
        runs.append((f"({text}) x{times}" if period > 1 else f"{text} x{times}") if times > 1 else text)
        start += covered
    return ", ".join(runs)


def _covered(texts: Sequence[str], start: int, period: int) -> int:
    """The texts from ``start`` on that repeat the first ``period`` of them, these included: their number, or 0."""
    times = 1
    while texts[start : start + period] == texts[start + times * period : start + (times + 1) * period]:
        times += 1
    return times * period if times > 1 else 0


def _by_rank(plan: PlanFigures, units: Units) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("rank", "peak", "budget", "idle")]
    budgets, peaks = plan.whole_step or (plan.problem.budget_bytes, plan.peak_bytes)
    has_static = any(stage.static_bytes for stage in plan.problem.stages)
    if has_static:
        rows = [(*rows[0], "parameters and optimizer")]
    for rank, idle in enumerate(plan.timeline.idle_share):
        row = (str(rank), units.of_memory(peaks[rank]), units.of_memory(budgets[rank]), percent(idle))
        rows.append((*row, units.of_memory(plan.static_bytes[rank])) if has_static else row)
    return rows


def _step(plan: PlanFigures, seconds: float) -> str:
    """The seconds of a step, with their unit where stages are in bytes and seconds."""
    units = units_of(plan)
    if units.time and seconds < 1:
        return units.of_time(seconds)
    amount = f"{seconds:.1f}" if 10 <= seconds < 1e6 else number(seconds)
    return f"{amount} s" if units.time else amount


def _over(plan: PlanFigures, seconds: float) -> str:
    share = plan.overhead(seconds) * 100
    return f"{share if abs(share) >= 0.05 else 0.0:+.1f} %"


def _rule(name: str, seconds: float, plan: PlanFigures) -> str:
    return f"{name} {_over(plan, seconds)}" if math.isfinite(seconds) else f"{name} does not fit"


def picture(plan: PlanFigures) -> str:
    """The step that keeps all and the planned step: the actions of each rank, and its memory under its budget."""
    before, after, units = plan.problem.keep_all.timeline, plan.timeline, replace(units_of(plan), digits=3)
    least, most = (max(of.peak_bytes) for of in (after, before))
    change = f"for {plan.overhead(plan.step_seconds) * 100:.1f} % more time"
    title = f"Peak memory {units.of_memory(least)} in place of {units.of_memory(most)}, {change}"
    counts = f"{plan.schedule.stages} stages, {plan.schedule.micro_batches} micro-batches"
    return svg(
        before,
        after,
        names=("everything kept", "planned"),
        budget_bytes=plan.problem.budget_bytes,
        units=units,
        title=title if plan.recomputed_share else "Everything fits, so nothing is recomputed",
        subtitle=f"{plan.schedule.name}: {counts}; planned within the budget of each rank",
        lines=[{}, {"bound": plan.bound_seconds}] if plan.recomputed_share else (),
    )
