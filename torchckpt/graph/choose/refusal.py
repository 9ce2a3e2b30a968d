"""Refusal: the error for a budget that no schedule fits into, with the bytes that no schedule can free."""
from __future__ import annotations

from collections.abc import Collection, Mapping

from torchckpt.errors import BudgetInfeasible, Fault
from torchckpt.graph.private.trace import input_place
from torchckpt.graph.step.joint import Joint
from torchckpt.planning.budget import Budget, typed, written
from torchckpt.planning.budget import budget_bytes as in_bytes
from torchckpt.planning.remat.flow.breakdown import Breakdown, at_end, at_peak
from torchckpt.planning.remat.plan import Plan

__all__ = ["infeasible", "kinds_of"]

OF_PARAMETERS, OF_INPUTS, OUTPUTS = "gradients of parameters", "gradients of inputs", "outputs"


def kinds_of(joint: Joint, inputs: Collection[int]) -> dict[int, str]:
    """By storage, the kind of each result of a joint graph; ``inputs`` are the places of inputs, not parameters."""
    given = [node for node in joint.module.graph.find_nodes(op="placeholder") if node not in joint.tangents]
    kinds: dict[int, str] = {}
    for node, gradient in zip(given, joint.outputs[joint.forward_outputs :]):
        kind = OF_INPUTS if input_place(node) in inputs else OF_PARAMETERS
        kinds.update(dict.fromkeys(joint.storages.get(gradient, ()), kind))
    for output in joint.outputs[: joint.forward_outputs]:
        kinds.update(dict.fromkeys(joint.storages.get(output, ()), OUTPUTS))
    return kinds


def infeasible(
    caller: str, budget: Budget | None, budget_bytes: int, plan: Plan, kinds: Mapping[int, str], reserved_bytes: int
) -> BudgetInfeasible:
    """The error for a budget below ``plan``, the plan with the least bytes found. Every figure includes the bytes
    reserved for the caller's loss, so that each figure is a possible budget.

    Args:
        budget: the budget as the user wrote it.
        kinds: by storage, the kind of each result.
        reserved_bytes: bytes reserved for the loss.
    """
    sizes = [size + reserved_bytes for size in (plan.peak_bytes, plan.lower_bound, plan.eager_peak_bytes)]
    least, lower, eager = map(written, sizes)
    asked = written(budget_bytes) if budget is None else typed(budget)
    asked += "" if asked == written(budget_bytes) else f", which is {written(budget_bytes)}"
    is_of_first = budget is not None and budget_bytes != in_bytes(budget, sizes[2])
    asked += " since the first plan" if is_of_first else ""
    peak = at_peak(plan.flow, plan.schedule, kinds)
    there = sum(plan.flow.sizes_bytes[storage] for storage in plan.flow.given)
    received = (
        f"{asked}; the least found is {least}, no schedule needs less than {lower}, eager {eager}",
        f"nobody can free, at the end of the step: {_listed(at_end(plan.flow, kinds))}",
        f"nobody can free, at the peak of the least: {_listed(_parts(peak, plan.paths[peak.index]))}",
        f"beside that, at that peak, {written(peak.kept_bytes)} is kept for operations that follow",
        f"parameters, buffers and inputs, {written(there)}, are there before the step and count for nothing",
    )
    works = f'budget="{least}" or more'
    works += " (nothing can be below the lower bound: a smaller batch can)" if budget_bytes < sizes[1] else ""
    rule = f"{caller}: a budget holds what the step cannot do without"
    return BudgetInfeasible(str(Fault(rule, "\n            ".join(received), works)), sizes[0], plan)


def _parts(peak: Breakdown, path: str) -> dict[str, int]:
    """By purpose, the bytes at the peak that every other schedule needs at this operation, too."""
    operation = f"{peak.name} of {path}" if path else peak.name
    touched, workspace = f"what {operation} reads and writes", "its workspace"
    return {**peak.results_bytes, touched: peak.touched_bytes, workspace: peak.workspace_bytes}


def _listed(parts: Mapping[str, int]) -> str:
    """The parts as text, the largest first."""
    order = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {written(size)}" for name, size in order if size) or "nothing"
