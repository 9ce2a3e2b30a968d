"""Choose: turn the user's options (keep, budget, costs) into the schedule of a joint graph, and its plan."""
from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from typing import TypeAlias

from torch import fx

from torchckpt.errors import Fault, raise_faults
from torchckpt.graph.choose.keep import Keep, check_keep, kept_by, schedule_of
from torchckpt.graph.choose.refusal import infeasible, kinds_of
from torchckpt.graph.progress import Watch
from torchckpt.graph.step.costs import Cost, given, measured, profiled, roofline
from torchckpt.graph.step.joint import Joint
from torchckpt.graph.step.measure import Measure
from torchckpt.graph.step.values import Values
from torchckpt.model.remat.budget import Budget, budget_bytes, check_budget
from torchckpt.model.remat.plan import Plan
from torchckpt.model.remat.search.planner import fit
from torchckpt.model.remat.step.dataflow import Dataflow, Schedule
from torchckpt.model.remat.step.memory import simulate

__all__ = ["Costs", "GraphPlanner"]

Costs: TypeAlias = "str | Mapping[str, float]"
"""``"roofline"``, ``"profile"``, or seconds by the names of operators."""

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
        self, caller: str, keep: Keep | Plan, budget: Budget | None, costs: Costs, rng: str, exact: bool,
        shares: dict[Hashable, int] | None = None,
    ) -> None:
        if not isinstance(keep, Plan):
            check_keep(caller, keep)
        if budget is not None:
            check_budget(caller, budget)
        raise_faults(caller, _faults(costs, rng, exact, budget))
        self._caller, self._keep, self._budget, self._exact = caller, keep, budget, exact
        self._costs, self._measure = costs, Measure(rounds=3 if costs == "profile" else 0)
        self.watch = Watch()
        self.replay = rng == "replay"
        self.inputs: Collection[int] = ()  # places of the traced inputs that are not parameters
        self.program: Hashable = None
        self._shares = {} if shares is None else shares

    def cost(self, node: fx.Node) -> Cost:
        """The cost of an operation, with the bytes that it allocated when it was run on made-up numbers."""
        if self._costs == "profile":
            return profiled(node, self._measure)
        counted = roofline(node) if isinstance(self._costs, str) else given(node, self._costs)
        return measured(counted, node, self._measure)

    def __call__(self, joint: Joint) -> Schedule:
        flow, values = joint.flow, Values(joint)
        eager_peak_bytes = simulate(flow, flow.eager).peak_bytes + _RESERVED_BYTES
        budget = self._shares.get(self.program)
        if budget is None and self._budget is not None:
            budget = budget_bytes(self._budget, eager_peak_bytes)
        with self.watch.planning(len(flow.operations)) as tell:
            schedule = tuple(self._schedule(joint, budget, tell))
        names = {name: tuple(sorted(found)) for name, found in {**values.modules, **values.marks}.items()}
        self.plan = Plan(flow, schedule, values.paths, names, budget)
        if budget is not None and self.plan.peak_bytes > budget - _RESERVED_BYTES:
            kinds = kinds_of(joint, self.inputs)
            raise infeasible(self._caller, self._budget, budget, self.plan, kinds, _RESERVED_BYTES)
        if budget is not None:
            self._shares.setdefault(self.program, budget)
        return schedule

    def _schedule(self, joint: Joint, budget: int | None, tell: Callable[[str], None]) -> Schedule:
        flow = joint.flow
        if isinstance(self._keep, Plan):
            return _planned(self._caller, self._keep.whole or self._keep, flow)
        if budget is None:
            return schedule_of(joint, self._keep)
        pinned = frozenset[int]() if self._keep is None else kept_by(self._keep, joint)
        room = budget - _RESERVED_BYTES
        found = fit(flow, room, pinned, tell)
        if not self._exact:
            return found.schedule
        from torchckpt.model.remat.search.exact import Infeasible, optimum

        tell("the proof")
        try:
            return optimum(flow, room, hint=found.schedule, pinned=pinned).schedule
        except Infeasible:
            return found.schedule


def _faults(costs: Costs, rng: str, exact: bool, budget: Budget | None) -> list[Fault]:
    faults = []
    if not isinstance(costs, Mapping) and costs not in ("roofline", "profile"):
        faults.append(Fault('costs is "roofline", "profile", or seconds by operator', repr(costs),
                            'costs="roofline"; costs={"aten.mm": 2e-3}'))
    if rng not in ("keep", "replay"):
        faults.append(Fault('rng is "keep" or "replay"', repr(rng), 'rng="keep"'))
    if exact and budget is None:
        faults.append(Fault("exact=True proves the least time under a budget", "budget=None", 'budget="6GiB"'))
    return faults


def _planned(caller: str, plan: Plan, flow: Dataflow) -> Schedule:
    """The schedule of an earlier plan, if that plan is for the same call."""
    if _shape(plan.flow) != _shape(flow):
        rule = "a plan fits the call that it was made for: the same operations on the same sizes"
        received = f"a plan of {len(plan.flow.operations)} operations for a call of {len(flow.operations)}"
        raise_faults(caller, [Fault(rule, received, 'budget="6GiB", to have a new one')])
    return plan.schedule


def _shape(flow: Dataflow) -> object:
    operations = [(operation.name, operation.reads, operation.writes) for operation in flow.operations]
    return operations, flow.sizes_bytes, flow.forward
