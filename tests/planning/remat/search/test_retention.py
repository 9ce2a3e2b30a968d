"""Retention: a schedule of its class is a solution of it; the inequalities that make it provable exclude none."""
from __future__ import annotations

import pytest

from tests.planning.remat.flows import mlp, resnet, transformer
from tests.planning.remat.random_flows import random_flow
from tests.slow import few
from torchckpt.planning.remat.flow.dataflow import Dataflow, Schedule, Tables
from torchckpt.planning.remat.flow.late import late
from torchckpt.planning.remat.flow.memory import simulate
from torchckpt.planning.remat.search.exact import Retention, optimum

cp_model = pytest.importorskip("ortools.sat.python.cp_model")


def programme(flow: Dataflow, budget_bytes: int, schedule: Schedule | None) -> Retention:
    return Retention(cp_model.CpModel(), Tables(flow), budget_bytes, schedule)


def solved(retention: Retention):
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    return solver, solver.solve(retention.model)


def fixed(flow: Dataflow, budget_bytes: int, schedule: Schedule) -> tuple[bool, Schedule | None]:
    """Whether the values that ``schedule`` gives to all variables hold to all constraints; the schedule read back."""
    retention = programme(flow, budget_bytes, schedule)
    for index, value in retention.hinted.items():
        retention.model.add(retention.model.get_bool_var_from_proto_index(index) == value)
    assert len(retention.hinted) == len(retention.model.proto.variables)
    solver, status = solved(retention)
    return (True, retention.schedule(solver)) if status == cp_model.OPTIMAL else (False, None)


FLOWS = {"mlp": mlp(5), "transformer": transformer(1, dropout=True), "resnet": resnet(2)}


@few(1)
@pytest.mark.parametrize("flow", FLOWS.values(), ids=FLOWS)
@pytest.mark.parametrize("every", [2, 5])
def test_a_schedule_is_a_solution_at_its_peak_and_not_below(flow, every):
    forward = sorted(storage for storage, writer in flow.writer.items() if writer < flow.forward)
    schedule = late(flow, frozenset(forward[::every]))
    peak_bytes = simulate(flow, schedule).peak_bytes
    assert fixed(flow, peak_bytes, schedule) == (True, tuple(schedule))
    assert not fixed(flow, peak_bytes - 1, schedule)[0]


@few(7)
@pytest.mark.parametrize("seed", range(30))
def test_the_eager_schedule_is_a_solution_at_its_peak_and_not_below(seed):
    flow = random_flow(seed)
    peak_bytes = simulate(flow, flow.eager).peak_bytes
    assert fixed(flow, peak_bytes, flow.eager) == (True, tuple(flow.eager))
    assert not fixed(flow, peak_bytes - 1, flow.eager)[0]


@few(1)
@pytest.mark.parametrize("flow", [mlp(4), transformer(1)], ids=["mlp", "transformer"])
def test_the_cuts_exclude_no_optimum(flow, monkeypatch):
    budget_bytes = simulate(flow, flow.eager).peak_bytes * 3 // 4
    exact = optimum(flow, budget_bytes, workers=1)
    monkeypatch.setattr(Retention, "_cut", lambda _: None)
    assert optimum(flow, budget_bytes, workers=1).seconds == pytest.approx(exact.seconds)


def test_nothing_is_hinted_without_a_schedule():
    flow = mlp(2)
    retention = programme(flow, 10**9, None)
    assert retention.hinted is None
    assert len(retention.model.proto.solution_hint.vars) == 0
