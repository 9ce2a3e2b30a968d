"""Every: plan all named schedules under the same budget on the same ranks."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torchckpt.errors import ArgumentError, BudgetInfeasible, Fault, called, check, raise_fault, without_traceback
from torchckpt.planning.budget import DeviceMemory, Limit
from torchckpt.planning.draw.units import aligned, percent
from torchckpt.planning.order.schedule import Schedule, whole
from torchckpt.planning.order.schedules import CHUNKS, NAMES, named_schedule
from torchckpt.planning.plan.pipeline import interruptible, planned, planned_with_moves
from torchckpt.planning.plan.problem import problem_of
from torchckpt.planning.plan.result import PipelinePlan
from torchckpt.planning.work.block import NOTHING, Links, Stage, per_stage, restaged
from torchckpt.planning.work.host import Host

__all__ = ["Comparison", "plan_every"]


@dataclass(frozen=True)
class Comparison:
    """The plans of all named schedules that fit the budget, shortest step first. (The class of this name in ``step``
    is of a measured step.)"""

    plans: tuple[PipelinePlan, ...]
    too_small: tuple[str, ...]
    """Schedules that need more than the budget."""
    reference: PipelinePlan
    """The plan of the first schedule that fits. All are compared with its step in which nothing is recomputed."""

    @property
    def best(self) -> PipelinePlan:
        return self.plans[0]

    def overhead(self, seconds: float) -> float:
        """The share by which a step of so many seconds is longer than the reference's that keeps all."""
        return self.reference.overhead(seconds)

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("schedule", "stages", "step", "over", "bound", "recomputed", "peak")]
        for plan in self.plans:
            share = self.overhead(plan.bound_seconds)
            rows.append((
                plan.schedule.name,
                str(plan.schedule.stages),
                f"{plan.step_seconds:.4g}{' s' * bool(plan.units.time)}",
                f"{self.overhead(plan.step_seconds) * 100:+.1f} %",
                f"{share * 100:+.1f} %",
                percent(plan.recomputed_share),
                plan.units.of_memory(max(plan.peak_bytes)),
            ))
        lines = [aligned(rows), f"over {self.reference.schedule.name} that keeps all"]
        if self.too_small:
            lines.append(f"the budget is too small for {', '.join(self.too_small)}")
        return "\n\n".join(lines)


@called("plan_every()")
def plan_every(
    stages: Sequence[Stage],
    micro_batches: int,
    budget: Limit,
    link: Links = 0.0,
    *,
    ranks: int | None = None,
    balance: bool = False,
    host: Host | None = None,
) -> Comparison:
    """Plan each schedule that has a name and fits.

    Schedules with another number of stages get the same blocks in the same order, cut into stages of as many blocks, if
    there are enough, and if only the first stage has something before its blocks, and the last after.

    Args:
        budget: as of :func:`~torchckpt.planning.plan.pipeline.plan_pipeline`; a share is one of the reference's peak.
        ranks: default: as many as stages.
        host: as of :func:`~torchckpt.planning.plan.pipeline.plan_pipeline`.

    Raises:
        ArgumentError: an argument is wrong, or no schedule fits.
        BudgetInfeasible: the budget is too small for all.
    """
    count = len(stages) if ranks is None and isinstance(stages, Sequence) else ranks
    check([*whole("ranks", count), *whole("micro_batches", micro_batches)])
    check(per_stage(stages, len(stages), is_planned=True)[1])
    fitting = list(_fitting(stages, micro_batches, count or 1))
    if not fitting:
        received = f"{len(stages)} stages, {count} ranks, {micro_batches} micro-batches"
        raise_fault(Fault("no schedule has these counts", received, "as many stages as ranks"))
    schedule, cut = fitting[0]
    limits = None if isinstance(budget, DeviceMemory) else problem_of(schedule, cut, budget, link).budget_bytes
    with interruptible([], lambda plan: None):  # for more than was asked
        reference = planned(problem_of(schedule, cut, "100%", link))
    plans: list[PipelinePlan] = []
    refused = []
    for schedule, cut in fitting:
        try:
            problem = problem_of(schedule, cut, budget if limits is None else "100%", link, host)
            problem = problem if limits is None else problem.within(limits)
            with interruptible(plans):
                plans.append(planned_with_moves(problem) if balance else planned(problem))
        except BudgetInfeasible as error:
            refused.append((schedule.name, without_traceback(error)))
    if not plans:
        nearest = min((error for _, error in refused), key=lambda error: error.least_bytes)
        raise without_traceback(nearest)
    plans.sort(key=lambda plan: plan.step_seconds)
    return Comparison(tuple(plans), tuple(name for name, _ in refused), reference)


def _fitting(stages: Sequence[Stage], micro_batches: int, ranks: int) -> Iterator[tuple[Schedule, Sequence[Stage]]]:
    """The schedules that fit these counts, each with its stages; 1F1B is the first.

    A schedule with several stages on each rank gets as many as ``stages`` has for a rank, but at least two.
    """
    per_rank = max(2, len(stages) // ranks)
    for name in sorted(NAMES, key=lambda name: name != "1f1b"):
        for chunks in (None, per_rank):
            try:
                schedule = named_schedule(name, ranks, micro_batches, chunks)
            except ArgumentError:
                continue
            cut = _cut(stages, schedule.stages)
            if cut is not None and (chunks is not None or CHUNKS.get(name, 1) == 1):
                yield schedule, cut


def _cut(stages: Sequence[Stage], count: int) -> Sequence[Stage] | None:
    if len(stages) == count:
        return stages
    blocks = [block for stage in stages for block in stage.blocks]
    inner = [*(stage.after for stage in stages[:-1]), *(stage.before for stage in stages[1:])]
    if len(blocks) < count or any(part != NOTHING for part in inner):
        return None
    few, more = divmod(len(blocks), count)
    counts = [few + (stage < more) for stage in range(count)]
    cut = list(restaged([Stage(tuple(blocks)), *[Stage(())] * (count - 1)], counts))
    cut[0] = replace(cut[0], before=stages[0].before)
    cut[-1] = replace(cut[-1], after=stages[-1].after)
    return cut
