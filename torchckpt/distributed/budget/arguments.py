"""Arguments: checks the ``budget`` and ``plan`` arguments of ``recompute_ahead``."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import TypeAlias

from torchckpt.errors import Fault, check, raise_fault
from torchckpt.planning import Schedule
from torchckpt.planning.budget import Bytes, bytes_per_rank
from torchckpt.planning.plan import PipelinePlan

__all__ = ["Plan", "budget_key", "plan_for", "use_faults"]

Plan: TypeAlias = "PipelinePlan | str | Path"
"""A plan, its JSON text (``to_json()``), or the path of a file with that text."""

_WORKS = "plan=plan_pipeline(schedule_of(schedule), stages, budget), or its to_json() text, or a file with that text"


def use_faults(budget: object, plan: object, others: Mapping[str, object]) -> Iterator[Fault]:
    """The faults of arguments that must not be given together: a budget or a plan decides the ``others`` itself.

    Args:
        others: the other arguments that were given, by name.
    """
    if budget is not None and plan is not None:
        yield Fault("both a budget and a plan are given", f"budget={budget!r} and a plan", "budget=... or plan=...")
    if (budget is not None or plan is not None) and others:
        received = ", ".join(f"{name}={value!r}" for name, value in others.items())
        given = "a budget" if plan is None else "a plan"
        rule = f"{', '.join(others)} cannot go with {given}, which decides what is kept and what is recomputed early"
        yield Fault(rule, f"{given} and {received}", 'recompute_ahead(schedule, budget="60GiB")')


def budget_key(budget: Bytes, ranks: int) -> str:
    """The same for budgets that mean the same, however they are written.

    Raises:
        ArgumentError: ``budget`` is not a valid budget for ``ranks`` ranks.
    """
    return str([bytes_per_rank(budget, ranks, peak) for peak in (1.0, 2.0)])  # a share differs in the two


def plan_for(plan: Plan, schedule: Schedule) -> PipelinePlan:
    """Read ``plan`` and check that it is a plan for ``schedule``.

    Raises:
        ArgumentError: it is no plan, or a plan for another schedule.
    """
    if isinstance(plan, (str, Path)):
        plan = _read(plan)
    if not isinstance(plan, PipelinePlan):
        raise_fault(Fault("the plan is neither a PipelinePlan nor its JSON text", type(plan).__name__, _WORKS))
    check(_schedule_faults(plan.problem.schedule, schedule))
    return plan


def _read(plan: str | Path) -> PipelinePlan:
    text = str(plan)
    if not text.lstrip().startswith("{"):
        try:
            text = Path(plan).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # such as a file that is not UTF-8
            rule = "the plan is neither JSON nor a file that can be read"
            said = getattr(error, "strerror", None) or type(error).__name__
            reason = f"{text if len(text) <= 80 else text[:77] + '...'!r}: {said}"
            raise_fault(Fault(rule, reason, _WORKS))
    return PipelinePlan.from_json(text)


def _schedule_faults(planned: Schedule, schedule: Schedule) -> Iterator[Fault]:
    works = "plan_pipeline(schedule_of(schedule), stages, budget)"
    sizes = {
        "stages": (planned.stages, schedule.stages),
        "micro-batches": (planned.micro_batches, schedule.micro_batches),
        "ranks": (len(planned.ranks), len(schedule.ranks)),
    }
    wrong = [f"{own} {name} for one of {other}" for name, (own, other) in sizes.items() if own != other]
    if wrong:
        yield Fault("the plan was made for another schedule", f"a plan of {', of '.join(wrong)}", works)
    elif planned.ranks != schedule.ranks:
        orders = enumerate(zip(planned.ranks, schedule.ranks))
        rank, own, other = next((at, *pair) for at, pair in orders if pair[0] != pair[1])
        actions = enumerate(zip_longest(own, other))
        place, first, second = next((at, *pair) for at, pair in actions if pair[0] != pair[1])
        where = f"action {place} of rank {rank} is {first or 'none'} in the plan, {second or 'none'} in the schedule"
        yield Fault("the plan was made for another schedule", f"a plan of another {planned.name!r}: {where}", works)
