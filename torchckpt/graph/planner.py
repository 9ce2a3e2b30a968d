"""Planner: turn the user's options (keep, budget, costs) into the schedule of a joint graph, and its plan."""
from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from copy import copy
from functools import cached_property

from torch import fx

from torchckpt.errors import BudgetInfeasible, Fault, check, raise_fault
from torchckpt.graph.keep import Keep, Values, check_keep, kept_by, schedule_of
from torchckpt.graph.private.trace import input_place
from torchckpt.graph.progress import Watch
from torchckpt.graph.step.costs import Cost, Costs, Measure, cost_of
from torchckpt.graph.step.joint import Joint
from torchckpt.planning.budget import Budget, check_budget, typed, written
from torchckpt.planning.budget import budget_bytes as in_bytes
from torchckpt.planning.remat.flow.dataflow import Dataflow, Schedule
from torchckpt.planning.remat.flow.memory import at_end, at_peak, simulate
from torchckpt.planning.remat.plan import Plan
from torchckpt.planning.remat.search.planner import fit

__all__ = ["Costs", "GraphPlanner"]

_RESERVED_BYTES = 64
"""Reserved for a loss outside of the call and its gradient: two scalars, alive during the step."""


class GraphPlanner:
    """Checks the options that ``rematerialize`` and ``backend`` share, and plans a joint graph.

    A call with a joint graph returns its schedule, and sets ``plan``. The first plan of a ``program`` turns a share
    into bytes. They stand in ``shares``, and later plans get the same.

    Raises:
        ArgumentError: the constructor found faults in the arguments; it lists all of them.
    """

    plan: Plan

    def __init__(
        self, keep: Keep | Plan, budget: Budget | None, costs: Costs, rng: str, exact: bool,
        shares: dict[Hashable, int],
    ) -> None:
        if not isinstance(keep, Plan):
            check_keep(keep)
        if budget is not None:
            check_budget(budget)
        check(_faults(costs, rng, exact, budget))
        self._keep, self._budget, self._exact = keep, budget, exact
        self._costs, self._measure = costs, Measure(rounds=3 if costs == "profile" else 0)
        self.watch = Watch()
        self.replay = rng == "replay"
        self.inputs: Collection[int] = ()  # places of the traced inputs that are not parameters
        self.program: Hashable = None
        self._shares = shares
        self._within_bytes: int | None = None

    def cost(self, node: fx.Node) -> Cost:
        """The cost of an operation, with the bytes that it allocated when it was run on made-up numbers."""
        return cost_of(node, self._measure, self._costs)

    def __call__(self, joint: Joint) -> Schedule:
        flow, values = joint.flow, Values(joint)
        eager_peak_bytes = simulate(flow, flow.eager).peak_bytes + _RESERVED_BYTES
        asked = self._first_bytes
        if asked is None and self._budget is not None:
            asked = in_bytes(self._budget, eager_peak_bytes)
        budget = asked if self._within_bytes is None else self._within_bytes
        with self.watch.planning(len(flow.operations)) as tell:
            schedule = tuple(self._schedule(values, budget, tell))
        names = {name: tuple(sorted(storages)) for name, storages in {**values.modules, **values.marks}.items()}
        self.plan = Plan(flow, schedule, values.paths, names, budget)
        if budget is not None and self.plan.peak_bytes > budget - _RESERVED_BYTES:
            raise self._infeasible(joint, asked or budget)
        if budget is not None:
            self._shares[self.program] = budget
        return schedule

    @property
    def room_bytes(self) -> float:
        """What the step of the last plan may take: its budget, without what is reserved for the caller's loss."""
        return math.inf if self.plan.budget_bytes is None else self.plan.budget_bytes - _RESERVED_BYTES

    def within(self, budget_bytes: int) -> GraphPlanner:
        """A planner of so many bytes, whose errors say what this one was asked for."""
        other = copy(self)
        other._within_bytes, other._shares = budget_bytes, {}
        return other

    @cached_property
    def _first_bytes(self) -> int | None:
        """What the share was of the first plan of the program, before those that this planner makes."""
        return self._shares.get(self.program)

    def _schedule(self, values: Values, budget: int | None, tell: Callable[[str], None]) -> Schedule:
        flow = values.flow
        if isinstance(self._keep, Plan):
            return _planned(self._keep.whole or self._keep, flow)
        if budget is None:
            return schedule_of(self._keep, values)
        pinned = frozenset[int]() if self._keep is None else kept_by(self._keep, values)
        room = budget - _RESERVED_BYTES
        solution = fit(flow, room, pinned, tell)
        if not self._exact:
            return solution.schedule
        from torchckpt.planning.remat.search.exact import optimum

        tell("the proof")
        best = optimum(flow, room, hint=solution.schedule, pinned=pinned) or solution
        return best.schedule

    def _infeasible(self, joint: Joint, budget_bytes: int) -> BudgetInfeasible:
        """The error for a budget below the plan with the least bytes found. Every figure includes the bytes reserved
        for the caller's loss, so that each figure is a possible budget."""
        plan = self.plan
        sizes = [size + _RESERVED_BYTES for size in (plan.peak_bytes, plan.lower_bound, plan.eager_peak_bytes)]
        least, lower, eager = map(written, sizes)
        asked = written(budget_bytes) if self._budget is None else typed(self._budget)
        asked += "" if asked == written(budget_bytes) else f", which is {written(budget_bytes)}"
        is_of_first = self._budget is not None and budget_bytes != in_bytes(self._budget, sizes[2])
        asked += " since the first plan" if is_of_first else ""
        kinds = self._kinds(joint)
        peak = at_peak(plan.flow, plan.schedule, kinds)
        path = plan.paths[peak.index]
        touched = f"what {peak.name} of {path} reads and writes" if path else f"what {peak.name} reads and writes"
        parts = {**peak.results_bytes, touched: peak.touched_bytes, "its workspace": peak.workspace_bytes}
        before = sum(plan.flow.sizes_bytes[storage] for storage in plan.flow.given)
        received = (
            f"{asked}; no schedule needs less than {lower}, eager {eager}",
            f"nobody can free, at the end of the step: {_listed(at_end(plan.flow, kinds))}",
            f"nobody can free, at the peak of the least: {_listed(parts)}",
            f"beside that, at that peak, {written(peak.kept_bytes)} is kept for operations that follow",
            f"parameters, buffers and inputs, {written(before)}, are there before the step and count for nothing",
        )
        works = f'budget="{least}" or more'
        works += " (nothing can be below the lower bound: a smaller batch can)" if budget_bytes < sizes[1] else ""
        rule = f"the budget is too small: the least found is {least}"
        return BudgetInfeasible(str(Fault(rule, "\n            ".join(received), works)), sizes[0], plan)

    def _kinds(self, joint: Joint) -> dict[int, str]:
        """By storage, the kind of each result of a joint graph."""
        placeholders = [node for node in joint.module.graph.find_nodes(op="placeholder") if node not in joint.tangents]
        kinds: dict[int, str] = {}
        for node, gradient in zip(placeholders, joint.outputs[joint.forward_outputs :]):
            kind = "gradients of inputs" if input_place(node) in self.inputs else "gradients of parameters"
            kinds.update(dict.fromkeys(joint.storages.get(gradient, ()), kind))
        for output in joint.outputs[: joint.forward_outputs]:
            kinds.update(dict.fromkeys(joint.storages.get(output, ()), "outputs"))
        return kinds


def _listed(parts: Mapping[str, int]) -> str:
    """The parts as text, the largest first."""
    order = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {written(size)}" for name, size in order if size) or "nothing"


def _faults(costs: Costs, rng: str, exact: bool, budget: Budget | None) -> Iterator[Fault]:
    if not isinstance(costs, Mapping) and costs not in ("roofline", "profile"):
        yield Fault('costs is not "roofline", "profile", or seconds by operator', repr(costs),
                    'costs="roofline"; costs={"aten.mm": 2e-3}')
    if rng not in ("keep", "replay"):
        yield Fault('rng is neither "keep" nor "replay"', repr(rng), 'rng="keep"')
    if exact and budget is None:
        yield Fault("exact=True is given without a budget", "budget=None", 'budget="6GiB"')


def _planned(plan: Plan, flow: Dataflow) -> Schedule:
    """The schedule of an earlier plan, if that plan is for the same call."""
    if _shape(plan.flow) != _shape(flow):
        rule = "the plan was made for another call: other operations, or other sizes"
        received = f"a plan of {len(plan.flow.operations)} operations for a call of {len(flow.operations)}"
        raise_fault(Fault(rule, received, 'budget="6GiB" without keep=, to have a new one'))
    return plan.schedule


def _shape(flow: Dataflow) -> object:
    operations = [(operation.name, operation.reads, operation.writes) for operation in flow.operations]
    return operations, flow.sizes_bytes, flow.forward
