"""Fewest: a lower bound of the recomputed FLOPs of all schedules within a budget, proven by an integer programme.

While one operation of the backward runs, what the later ones read is in memory or is repeated after it; so is what that
repeat reads. What is in memory beside that operation's own bytes fits into the budget. The fewest FLOPs that this
leaves, at the operation where they are the most, are a lower bound of every schedule with that order of first runs.
"""
from __future__ import annotations

from typing import Any

from torchckpt.planning.remat.flow.dataflow import Dataflow

__all__ = ["fewest_flops"]


def fewest_flops(flow: Dataflow, budget_bytes: int, seconds: float = 60.0) -> int:
    """A lower bound of recomputed FLOPs: a linear programme chooses the operation, then the integer one is solved."""
    at, most = flow.forward, 0.0
    for index in range(flow.forward, len(flow.operations)):
        found = _Programme(flow, budget_bytes, index, "GLOP").solved(seconds)
        at, most = (index, found) if found > most else (at, most)
    return round(_Programme(flow, budget_bytes, at, "SCIP").solved(seconds)) if most else 0


class _Programme:
    """Variables: for each forward storage, whether it is alive while ``index`` runs; for each operation, its repeat."""

    def __init__(self, flow: Dataflow, budget_bytes: int, index: int, solver: str) -> None:
        from ortools.linear_solver import pywraplp

        self._is_linear = solver == "GLOP"
        self._solver: Any = pywraplp.Solver.CreateSolver(solver)
        made = {s: place for place in range(flow.forward) for s in flow.operations[place].writes}
        self._there = {storage: self._solver.IntVar(0, 1, "") for storage in made}
        self._again = [self._solver.IntVar(0, 1, "") for _ in range(flow.forward)]
        self._hold(flow, budget_bytes, index)
        for storage in {s for one in flow.operations[index + 1 :] for s in one.reads} & set(made):
            self._solver.Add(self._there[storage] + self._again[made[storage]] >= 1)
        for place, repeated in enumerate(self._again):
            operation = flow.operations[place]
            if not operation.repeatable:
                self._solver.Add(repeated == 0)
            for storage in set(operation.repeat.reads) & set(made):
                self._solver.Add(self._there[storage] + self._again[made[storage]] >= repeated)
        flops = (flow.operations[place].repeat.flops * repeated for place, repeated in enumerate(self._again))
        self._solver.Minimize(sum(flops))

    def _hold(self, flow: Dataflow, budget_bytes: int, index: int) -> None:
        """Require that the inputs and outputs of ``index``, and the results before it, are alive."""
        operation, sizes = flow.operations[index], flow.sizes_bytes
        before = {storage for one in flow.operations[:index] for storage in one.writes}
        own = {*operation.reads, *operation.writes, *(before & flow.results)} - flow.given
        for storage in own & set(self._there):
            self._solver.Add(self._there[storage] == 1)
        room = budget_bytes - operation.workspace_bytes - sum(sizes[s] for s in own - set(self._there))
        self._solver.Add(sum(sizes[storage] * there for storage, there in self._there.items()) <= room)

    def solved(self, seconds: float) -> float:
        """The bound; 0 if the programme has no solution, because nothing fits."""
        self._solver.SetTimeLimit(int(1000 * seconds))
        status, objective = self._solver.Solve(), self._solver.Objective()
        if self._is_linear:  # the bound of a linear programme is its optimum
            return float(objective.Value()) if status == self._solver.OPTIMAL else 0.0
        return float(objective.BestBound()) if status in (self._solver.OPTIMAL, self._solver.FEASIBLE) else 0.0
