"""Result: the plan that users get: its figures, and how it is printed, drawn and stored."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from torchckpt.planning.draw.svg import svg
from torchckpt.planning.draw.units import Units, aligned, number, percent, units_for
from torchckpt.planning.figures import Drawn
from torchckpt.planning.order.schedule import Schedule, number_of
from torchckpt.planning.plan.figures import PlanFigures
from torchckpt.planning.plan.problem import Problem
from torchckpt.planning.plan.stored import read, written
from torchckpt.planning.work.choice import Choices
from torchckpt.planning.work.host import Move

__all__ = ["PipelinePlan"]


@dataclass(frozen=True)
class PipelinePlan(PlanFigures, Drawn):
    """What :func:`~torchckpt.planning.plan.pipeline.plan_pipeline` found."""

    @classmethod
    def of(cls, problem: Problem, schedule: Schedule, choices: Choices, moves: tuple[Move, ...] = ()) -> PipelinePlan:
        """The plan. If a rank holds more than its budget, for its order was given, what it holds is its budget."""
        plan = cls(problem, schedule, choices, moves=moves)
        if not plan.over_budget:
            return plan
        return replace(plan, problem=problem.within(tuple(map(max, plan.peak_bytes, problem.budget_bytes))))

    @property
    def units(self) -> Units:
        """Bytes and seconds where budgets are large; else memory in the caller's own unit, time as a bare number."""
        return units_for(max(self.problem.budget_bytes), memory="")

    @property
    def summary(self) -> str:
        """One line: the step, its bound, and what people do without a plan, over keeping all."""
        step = f"step {self._text(self.step_seconds)}, {self._over(self.step_seconds)}"
        step += f"{' over keeping all' * (self.alone is None)} (bound {self._over(self.bound_seconds)})"
        if not self.recomputed_share and not self.moves:
            if self.overhead(self.step_seconds) >= 5e-4:
                return f"{step}; nothing is recomputed, as another order of the actions holds little enough"
            return f"{step}; everything fits, so nothing need be recomputed"
        if self.alone is not None:
            recomputing, offloading = map(self._over, self.alone)
            return f"{step}; recomputing alone {recomputing}, offloading alone {offloading}"
        every, same = (self._over(rule.step_seconds) for rule in (self.all_recomputed, self.same_recomputed))
        blocks = "block" if self.same_recomputed.blocks == 1 else f"{self.same_recomputed.blocks} blocks"
        return f"{step}; recomputing all {every}, the same {blocks} on every stage {same}"

    def by_stage(self, units: Units | None = None) -> str:
        """A table of what each stage recomputes. The choices are its last column, as they may be long; a legend
        follows. Default: in the units of the plan."""
        units = units or self.units
        rows = [("stage", "rank", "blocks", "bytes", "recomputed", "seconds")]
        names = "/".join(state.value for state in self.states)
        texts = [names]
        for stage, work in enumerate(self.problem.stages):
            redone = self.recompute_seconds[stage]
            every = self.schedule.micro_batches * work.recompute_seconds
            share = percent(redone / every) if every else "-"
            rank = self.schedule.placement[stage]
            blocks, saved = str(len(work.blocks)), units.of_memory(work.saved_bytes)
            rows.append((str(stage), str(rank), blocks, saved, share, units.of_time(redone)))
            visits = ((stage, i) for i in range(self.schedule.micro_batches))
            texts.append(_runs([self.step.choice(visit).text(self.states) for visit in visits]))
        lines = aligned(rows).split("\n")
        width = max(map(len, lines))
        key = f"blocks {names} by micro-batch: {'; '.join(state.words for state in self.states)}"
        return "\n".join([*(f"{line.ljust(width)}  {text}" for line, text in zip(lines, texts)), "", key])

    def __str__(self) -> str:
        sizes = len(self.problem.stages), len(self.schedule.ranks), self.schedule.micro_batches
        stages, ranks, batches = map(number_of, sizes, ("stage", "rank", "micro-batch"))
        head = f"{self.schedule.name}: {stages} on {ranks}, {batches}"
        return "\n\n".join((head, self.by_stage(), aligned(self._by_rank()), self.summary))

    def _by_rank(self) -> list[tuple[str, ...]]:
        units = self.units
        rows: list[tuple[str, ...]] = [("rank", "peak", "budget", "idle")]
        budgets, peaks = self.whole_step or (self.problem.budget_bytes, self.peak_bytes)
        has_static = any(stage.static_bytes for stage in self.problem.stages)
        if has_static:
            rows = [(*rows[0], "parameters and optimizer")]
        if self.problem.host is not None:
            rows = [(*rows[0], "on host", "host", "waits")]
        waits = self.timeline.waited_seconds or (0.0,) * len(peaks)
        for rank, idle in enumerate(self.timeline.idle_share):
            row = [str(rank), units.of_memory(peaks[rank]), units.of_memory(budgets[rank]), percent(idle)]
            row += [units.of_memory(self.static_bytes[rank])] * has_static
            if self.problem.host is not None:
                on_host = (self.step.host_peak_bytes[rank], self.problem.host_bytes[rank])
                row += [*map(units.of_memory, on_host), units.of_time(waits[rank])]
            rows.append(tuple(row))
        return rows

    def _text(self, seconds: float) -> str:
        """The seconds of a step, with their unit where stages are in bytes and seconds."""
        if self.units.time and seconds < 1:
            return self.units.of_time(seconds)
        amount = f"{seconds:.1f}" if 10 <= seconds < 1e6 else number(seconds)
        return f"{amount} s" if self.units.time else amount

    def _over(self, seconds: float) -> str:
        share = self.overhead(seconds) * 100
        return f"{share if abs(share) >= 0.05 else 0.0:+.1f} %" if math.isfinite(share) else "does not fit"

    def _svg(self) -> str:
        """The step of what was asked that keeps all, and the planned step: the actions of each rank, and its memory
        under its budget."""
        before, after = (self.asked or self.problem).keep_all.timeline, self.timeline
        units, share = replace(self.units, digits=3), self.overhead(self.step_seconds) * 100
        least, most = (units.of_memory(max(step.peak_bytes)) for step in (after, before))
        change = f"for {abs(share):.1f} % {'less' if share <= -0.05 else 'more'} time"
        title, lines = "Everything fits, so nothing is recomputed", []
        if self.recomputed_share or self.moves:
            title = f"Peak memory {least} in place of {most}, {change}"
            lines = [{}, {"bound": self.bound_seconds}]
        return svg(
            before,
            after,
            names=("everything kept", "planned"),
            budget_bytes=self.problem.budget_bytes,
            units=units,
            title=title,
            subtitle=f"{self.schedule.name}: {self.schedule.counts}; planned within the budget of each rank",
            lines=lines,
        )

    def to_json(self) -> str:
        """The plan as text, which :meth:`from_json` reads."""
        return written(self)

    @classmethod
    def from_json(cls, text: str) -> PipelinePlan:
        """The plan that :meth:`to_json` wrote.

        Raises:
            ArgumentError: ``text`` is no plan, or is one that cannot run as it says: its orders, recomputes and bytes
                are counted again.
        """
        stored = read(text)
        return cls(**{field.name: getattr(stored, field.name) for field in fields(stored)})


_LONGEST_PERIOD = 12
"""Micro-batches that are written as one pattern."""


def _runs(texts: Sequence[str]) -> str:
    """The choices as text. ``3/0/5 x4, (8/0/0, 0/8/0) x2``: four equal micro-batches, then a pair that occurs twice."""
    runs, start = [], 0
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
