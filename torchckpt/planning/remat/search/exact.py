"""Exact: the fastest schedule under a byte budget for some dozens of operations, proven by a solver."""
from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass

from torchckpt.errors import ArgumentError, CheckpointError, Fault, called
from torchckpt.planning.remat.flow.dataflow import Dataflow, Schedule, Tables, runs
from torchckpt.planning.remat.flow.memory import simulate
from torchckpt.planning.remat.search.retention import Retention

__all__ = ["Exact", "Infeasible", "optimum"]

FINEST = 1_000_000
"""The solver counts in whole numbers. If seconds have no common unit, the unit is the step divided by this."""


class Infeasible(ArgumentError):
    """No schedule fits, or none was found in time."""


@dataclass(frozen=True)
class Exact:
    """The best schedule found, the seconds of all its runs, and a lower bound on the seconds of every schedule.

    If ``proven``, no schedule is faster, except by rounding. If the seconds of operations are multiples of one unit,
    nothing is rounded. Otherwise the solver counts each repeat as up to a millionth of the step less than it takes.
    """

    schedule: Schedule
    seconds: float
    bound_seconds: float
    proven: bool


@called("optimum()")
def optimum(
    flow: Dataflow,
    budget_bytes: int,
    *,
    time_limit_seconds: float = 60.0,
    workers: int = 2,
    hint: Schedule | None = None,
    most_repeats: int | None = None,
    pinned: Set[int] = frozenset(),
) -> Exact:
    """The fastest schedule whose peak, as :func:`simulate` counts it, is at most ``budget_bytes``.

    It is the fastest one with the same order of first runs as ``hint``; the bound holds for these schedules only.
    Between two first runs, an operation is repeated at most once, and repeats come in the order of first runs. An
    operation that writes results of the forward is not repeated in the forward. Another order of first runs may allow
    a faster schedule; the planner tries some. To plan, use the planner; this function tells how good its schedule is.

    OR-tools' CP-SAT solves it as an integer programme: see :mod:`~torchckpt.planning.remat.search.retention`.

    Args:
        time_limit_seconds: the solver stops after that, with the best schedule and bound so far. Default: 60.
        workers: threads of the solver. With one, equal calls return equal schedules, unless time runs out. Default: 2.
        hint: a schedule to start from, such as the planner's, which also gives the order of first runs. If it fits and
            nothing faster is found, it is returned. Default: no schedule, and the eager order.
        most_repeats: the most repeats of one operation. Default: any number.
        pinned: storages that no repeat may write. Default: none.

    Example:
        Three tanh in a row, of one byte each. The backward reads the first one last, so it is repeated for that:

        >>> from torchckpt.planning.remat.flow.dataflow import Dataflow, Operation
        >>> forward = [Operation("tanh", (i,), (i + 1,), 1.0) for i in range(3)]
        >>> backward = [Operation("tanh_dx", (3 - i, i + 3), (i + 4,), 1.0) for i in range(3)]
        >>> backward[0] = Operation("tanh_dx", (3,), (4,), 1.0)
        >>> flow = Dataflow((*forward, *backward), (1,) * 7, 3, given=frozenset({0}), results=frozenset({6}))
        >>> simulate(flow, flow.eager).peak_bytes
        4
        >>> optimum(flow, 3)
        Exact(schedule=(0, 1, 2, 3, 4, 0, 5), seconds=7.0, bound_seconds=7.0, proven=True)

    Raises:
        Infeasible: no schedule fits, or none was found in time and ``hint`` does not fit.
        ArgumentError: OR-tools is not installed.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        fault = Fault("OR-tools is missing, which finds an exact optimum", str(error), "pip install 'torchckpt[exact]'")
        raise ArgumentError(str(fault)) from error
    if simulate(flow, flow.eager).peak_bytes <= budget_bytes:
        return Exact(tuple(flow.eager), flow.seconds, flow.seconds, True)
    hinted = hint if hint is not None and simulate(flow, hint).peak_bytes <= budget_bytes else None
    order = list(flow.eager if hint is None else dict.fromkeys(hint))
    tables = Tables(flow, pinned, order)
    model = cp_model.CpModel()
    programme = Retention(model, tables, budget_bytes, most_repeats, hinted)
    costs = [flow.operations[index].repeat.seconds for index in order]
    unit = _measure(costs, flow.seconds)
    whole = [math.floor(seconds / unit * (1 + 1e-12)) for seconds in costs]
    model.minimize(sum(whole[position] * flag for (_, position), flag in programme.repeats.items()))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_seconds
    solver.parameters.num_workers = workers
    # The bound comes from the linear relaxation: the solver's usual choice for two workers makes little of it.
    solver.parameters.subsolvers.append("max_lp")
    status = solver.solve(model)
    found = [] if hinted is None else [hinted]
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        found.append(_verified(flow, budget_bytes, programme.schedule(solver)))
    if not found:
        raise _nothing(flow, budget_bytes, time_limit_seconds, status == cp_model.INFEASIBLE)
    seconds, best = min(((_seconds(flow, schedule), schedule) for schedule in found), key=lambda timed: timed[0])
    bound = flow.seconds + max(0.0, solver.best_objective_bound * unit)
    return Exact(best, seconds, min(bound, seconds), status == cp_model.OPTIMAL)


def _verified(flow: Dataflow, budget_bytes: int, schedule: Schedule) -> Schedule:
    peak_bytes = simulate(flow, schedule).peak_bytes
    if peak_bytes > budget_bytes:
        rule, received = "the solver does not count memory as simulate() does", f"{peak_bytes} of {budget_bytes} bytes"
        raise CheckpointError(str(Fault(rule, received, "fit(flow, budget_bytes), and a report of this")))
    return schedule


def _nothing(flow: Dataflow, budget_bytes: int, time_limit_seconds: float, proven: bool) -> Infeasible:
    within = "none exists" if proven else f"none found in {time_limit_seconds} s"
    works = f"budget_bytes={simulate(flow, flow.eager).peak_bytes}"
    return Infeasible(str(Fault("no schedule was found within the budget", f"{budget_bytes} bytes: {within}", works)))


def _measure(costs: Sequence[float], step_seconds: float) -> float:
    """The unit of seconds: the least cost divided by 1 to 12 if all costs are multiples of that; else a fine part of
    the step."""
    least = min((seconds for seconds in costs if seconds > 0), default=1.0)
    for parts in range(1, 13):
        unit = least / parts
        if all(abs(seconds / unit - round(seconds / unit)) < 1e-9 * max(1.0, seconds / unit) for seconds in costs):
            return unit
    return max(step_seconds, least) / FINEST


def _seconds(flow: Dataflow, schedule: Schedule) -> float:
    return sum(operation.seconds for operation in runs(flow, schedule))
