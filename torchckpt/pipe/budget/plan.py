"""Plan: what becomes of the blocks of each visit, for the bytes and seconds that were counted.

A rank of the plan is a device. So stages on one accelerator share a budget. On the CPU each stage is a rank: it stands
for a device there.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from torch import nn

from torchckpt.errors import BudgetInfeasible
from torchckpt.pipe.budget.count import Counted
from torchckpt.pipe.partition import ChangedInputs, Stage
from torchckpt.pipe.run.pipeline import clock_cycles
from torchckpt.pipe.run.step import Order, one_ahead
from torchckpt.planning import Action, Choice, Kind, Link, Schedule, arrival, with_recompute
from torchckpt.planning.budget import Bytes
from torchckpt.planning.plan import PipelinePlan
from torchckpt.planning.plan.figures import WholeStep
from torchckpt.planning.plan.run.extra_memory import MeasuredStep, beside_of, peaks_of
from torchckpt.planning.plan.run.fit_measured import Fitted, fitted
from torchckpt.planning.plan.run.repair import repaired
from torchckpt.planning.step.measured import measured_step
from torchckpt.planning.step.memory import Level
from torchckpt.planning.step.simulated import Step
from torchckpt.planning.work.block import Stage as Work

__all__ = ["blocks_of", "fit", "graph_order", "parts_of", "placement_of", "step_order", "whole_bytes"]


def placement_of(stages: Sequence[Stage]) -> tuple[int, ...]:
    """The rank of each stage."""
    homes = [stage.number if stage.device.type == "cpu" else stage.device for stage in stages]
    ranks = list(dict.fromkeys(homes))
    return tuple(map(ranks.index, homes))


def step_order(placement: tuple[int, ...], m: int) -> Order:
    """The order of ``Pipe.step``, without recomputes."""
    plain = one_ahead(len(placement), m, False)
    return _by_rank(plain.schedule.name, plain.launched, placement, m)


def graph_order(placement: tuple[int, ...], m: int) -> Order:
    """The order of ``loss.backward()``, without recomputes: autograd goes back as the forward came."""
    forwards = [(stage, i) for tick in clock_cycles(m, len(placement)) for i, stage in tick]
    launched = [Action(stage, Kind.FORWARD, i) for stage, i in forwards]
    launched += [Action(stage, Kind.BACKWARD, i) for stage, i in reversed(forwards)]
    return _by_rank("gpipe", launched, placement, m)


def _by_rank(name: str, launched: Sequence[Action], placement: tuple[int, ...], m: int) -> Order:
    orders = (tuple(one for one in launched if placement[one.stage] == rank) for rank in range(max(placement) + 1))
    return Order(Schedule(name, tuple(orders), placement, m), launched)


def fit(order: Schedule, counted: Counted, budget: Bytes, lookahead: int | None) -> Fitted:
    """The shortest plan found whose step takes at most ``budget``.

    Args:
        order: that of the step that was counted. Everything was recomputed in its backwards.
        lookahead: of ``loss.backward()``: how many micro-batches of a stage may hold what was recomputed early. None:
            the order of the plan is run as it is.

    Raises:
        BudgetInfeasible: the budget is below what a step takes that recomputes everything.
    """
    took, stages, links = _took(order, counted)
    try:
        found = fitted(order, stages, links, budget, [took])
    except BudgetInfeasible as error:
        error.caller = "Pipe"
        raise
    best = found if lookahead is None else _in_graph(found, took, lookahead)
    step, rules = WholeStep(best.budget_bytes, best.peak_bytes), found.plan.counted_rules
    return replace(best, plan=replace(best.plan, whole_step=step, counted_rules=rules))


def whole_bytes(order: Schedule, counted: Counted) -> float:
    """What the device that takes most takes in a step that keeps everything."""
    took, stages, links = _took(order, counted)
    kept, beside = Step(order, stages, links), beside_of([took], stages)
    return max(peaks_of(kept, beside))


def _took(order: Schedule, counted: Counted) -> tuple[MeasuredStep, tuple[Work, ...], tuple[Link, ...]]:
    """The step that was counted, and its stages and links for a planner."""
    # One thread launches all, so what passes between two actions is no message.
    paper = Step(order, counted.blocks, (Link(),) * (len(counted.blocks) - 1), arrival(order))
    step = measured_step(order, (), None, counted.blocks, [counted.spans(paper.program.actions)])
    levels: dict[Action, Level] = {}
    for rank, measured in enumerate(counted.levels):
        levels |= measured or dict(zip(order.ranks[rank], step.levels(rank)))
    return MeasuredStep(order, paper.choices, levels), step.stages, paper.links


def _in_graph(best: Fitted, took: MeasuredStep, lookahead: int) -> Fitted:
    """``best`` with its recomputes where the graph runs them: right before the backwards that ``lookahead`` says; or
    with all of them in the backwards. Then blocks are kept in what room is left."""
    problem, limits = best.plan.problem, best.budget_bytes
    visits = [action.visit for order in took.schedule.ranks for action in order if action.kind is Kind.FORWARD]
    late = {visit: _late(best.plan.step.choice(visit)) for visit in visits}
    beside = beside_of([took], problem.stages)
    orders = ((with_recompute(took.schedule, choices, lookahead), choices) for choices in (best.plan.choices, late))
    plans = [PipelinePlan.of(problem, *order) for order in orders]
    plans += [plan for plan in [repaired(plan, limits, beside) for plan in plans] if plan is not None]
    tries = [Fitted(plan, limits, peaks_of(plan.step, beside)) for plan in plans]
    return min((tried for tried in tries if tried.fits), key=lambda tried: tried.plan.step_seconds, default=tries[1])


def _late(choice: Choice) -> Choice:
    return replace(choice, early=(), late=tuple(sorted((*choice.early, *choice.late))))


# blocks: the layers of a stage that are kept or recomputed together --------------------------------------------------


def blocks_of(layers: Sequence[nn.Module]) -> list[int]:
    """The number of layers of each block.

    A layer that has layers inside, or a class of one's own, is a block, together with the layers without parameters
    behind it. Layers of torch without layers inside are small, and to keep the input of each would save little. So they
    are one block up to the next layer that is none of these.

    >>> blocks_of([nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2)), nn.ReLU(), nn.Linear(2, 2), nn.ReLU()])
    [2, 2, 2]
    """
    counts: list[int] = []
    is_after_large = False
    for layer in layers:
        is_large = not type(layer).__module__.startswith("torch.nn.") or next(layer.children(), None) is not None
        has_parameters = next(layer.parameters(), None) is not None
        if is_large or not counts or (is_after_large and has_parameters):
            counts.append(0)
            is_after_large = is_large
        counts[-1] += 1
    return counts


def parts_of(stage: Stage, in_place: dict[tuple[int, int], ChangedInputs]) -> list[Stage]:
    """The blocks of ``stage``, each as a stage of its own. ``in_place`` is as in ``partition``: what a block changes is
    found when it runs for the first time, which is in a step that recomputes everything."""
    counts = blocks_of([layer.module for layer in stage.layers])
    parts = []
    for end, count in zip(accumulate(counts), counts):
        first = stage.first + end - count
        changed = in_place.setdefault((first, first + count), {})
        parts.append(Stage(stage.number, first, stage.layers[end - count : end], stage.device, changed))
    return parts
