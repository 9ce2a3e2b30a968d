from __future__ import annotations

import pytest

from tests.planning.remat.brute_force import fastest
from tests.planning.remat.flows import chain, mlp, random_chain, random_dag, random_step, resnet, transformer, unet
from tests.planning.remat.random_flows import random_flow
from tests.slow import few, rarely, slow
from torchckpt.planning.remat.flow.dataflow import Dataflow, Operation
from torchckpt.planning.remat.flow.memory import lower_bound_bytes, simulate
from torchckpt.planning.remat.search import planner
from torchckpt.planning.remat.search.planner import Solution, fit, least, solution

FLOWS = {
    "chain": chain(12),
    "random_chain": random_chain(8, seed=3),
    "mlp": mlp(6),
    "transformer": transformer(1, dropout=True),
    "resnet": resnet(2, workspace_bytes=30_000),
    "unet": unet(1),
    "random_step": random_step(12, seed=4),
    "random_dag": random_dag(24, seed=1),
}
WITH_A_STEP, WITH_A_DAG = (rarely(["unet", "random_chain", other], FLOWS) for other in ("random_dag", "random_step"))
"""A ResNet skips, too, and is quicker than a U-Net; a random chain is like the two chains."""


@pytest.fixture(autouse=True)
def little_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search is as good as the work that it may do; what must hold holds with little."""
    monkeypatch.setattr(planner, "_SEARCH_WORK", 400_000)


def eager_peak_bytes(flow: Dataflow) -> int:
    return simulate(flow, flow.eager).peak_bytes


def repeats(plan: Solution) -> set[int]:
    return {index for index in plan.schedule if plan.schedule.count(index) > 1}


@few(1)
@pytest.mark.parametrize("name", WITH_A_STEP)
def test_the_budget_is_met_and_tighter_budgets_are_never_faster_than_no_budget(name: str) -> None:
    flow = FLOWS[name]
    smallest = least(flow)
    assert lower_bound_bytes(flow) <= smallest.peak_bytes <= eager_peak_bytes(flow)
    for share in (0.9, 0.7, 0.5):
        budget = max(smallest.peak_bytes, int(share * eager_peak_bytes(flow)))
        best = fit(flow, budget)
        assert best.peak_bytes <= budget
        assert best.peak_bytes == simulate(flow, best.schedule).peak_bytes
        assert best.seconds >= flow.seconds * (1 - 1e-9)


@pytest.mark.parametrize("name", FLOWS)
def test_with_room_for_everything_nothing_is_repeated(name: str) -> None:
    flow = FLOWS[name]
    assert fit(flow, eager_peak_bytes(flow)).schedule == tuple(flow.eager)


@few(1)
@pytest.mark.parametrize("name", ["mlp", "random_step", "random_dag"])
def test_the_same_schedule_every_time(name: str) -> None:
    flow = FLOWS[name]
    budget = int(0.6 * eager_peak_bytes(flow))
    assert fit(flow, budget).schedule == fit(flow, budget).schedule


@few(3)
@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
@pytest.mark.parametrize("seed", [*range(5), *slow(range(5, 20))])
def test_of_a_dozen_operations_no_schedule_is_faster(seed: int, share: float) -> None:
    for flow in (random_flow(seed, 10), random_dag(8, seed)):
        budget = int(share * eager_peak_bytes(flow))
        best, plan = fastest(flow, budget), fit(flow, budget)
        if best is None:
            assert plan.peak_bytes > budget
        else:
            assert plan.peak_bytes <= budget
            assert plan.seconds == pytest.approx(best[0])


def test_within_one_percent_without_the_exact_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "_TINY", 0)
    flow = chain(5)
    for share in (0.8, 0.65, 0.5):
        budget = int(share * eager_peak_bytes(flow))
        best = fastest(flow, budget)
        assert best is not None
        assert fit(flow, budget).seconds <= 1.01 * best[0]


@few(1)
@pytest.mark.parametrize("name", WITH_A_DAG)
def test_what_cannot_fit_comes_as_small_as_found(name: str) -> None:
    flow = FLOWS[name]
    budget = lower_bound_bytes(flow) - 1
    best = fit(flow, budget)
    assert best.peak_bytes > budget
    assert best.peak_bytes < eager_peak_bytes(flow)
    assert fit(flow, best.peak_bytes).peak_bytes <= best.peak_bytes


@few(1)
@pytest.mark.parametrize("name", WITH_A_STEP)
def test_an_operation_that_writes_what_is_pinned_runs_once(name: str) -> None:
    flow = FLOWS[name]
    budget = int(0.7 * eager_peak_bytes(flow))
    pinned = frozenset(s for index in repeats(fit(flow, budget)) for s in flow.operations[index].writes[:1])
    pinned = frozenset(sorted(pinned)[::2])
    for best in (fit(flow, budget, pinned), least(flow, pinned)):
        assert not {flow.writer[storage] for storage in pinned} & repeats(best)


def test_all_pinned_leaves_the_order_only() -> None:
    flow = FLOWS["mlp"]
    assert not repeats(least(flow, frozenset(flow.writer)))


def test_a_dropout_keeps_its_mask_for_the_repeat() -> None:
    flow = transformer(1, dropout=True)
    dropouts = [index for index, operation in enumerate(flow.operations) if operation.name == "dropout"]
    best = least(flow)
    assert repeats(best)
    assert all(flow.operations[index].repeatable for index in dropouts)


def test_a_repeat_is_timed_as_what_runs_in_its_place() -> None:
    substitute = Operation("again", (0,), (1,), 0.5)
    first = Operation("first", (0,), (1,), 2.0, substitute=substitute)
    flow = Dataflow((first, Operation("use", (1,), (2,), 1.0)), (1, 1, 1), 2, frozenset({0}), frozenset({2}))
    assert solution(flow, (0, 0, 1)).seconds == 3.5


def test_room_for_a_workspace_is_made_in_the_forward() -> None:
    """A value waits out an operation that needs the whole budget for itself, and comes back behind it."""
    flow = Dataflow(
        (
            Operation("early", (0,), (1,), 1.0),
            Operation("hungry", (0,), (2,), 5.0, workspace_bytes=90),
            Operation("join", (1, 2), (3,), 1.0),
        ),
        (0, 20, 5, 5), 3, frozenset({0}), frozenset({3}),
    )
    assert simulate(flow, (0, 1, 2)).peak_bytes == 115
    best = fit(flow, 100)
    assert best.peak_bytes <= 100
    assert best.schedule in ((1, 0, 2), (0, 1, 0, 2))


def test_new_values_of_buffers_outlive_the_forward() -> None:
    flow = resnet(3)
    assert flow.forward_results
    best = least(flow)
    assert best.peak_bytes < eager_peak_bytes(flow)
    assert best.peak_bytes == simulate(flow, best.schedule).peak_bytes


def test_a_chain_of_tanh_needs_about_the_square_root() -> None:
    flow = chain(36)
    assert fit(flow, 14_000_004).seconds <= 1.5 * flow.seconds


def test_a_weight_gradient_runs_before_that_of_the_input_if_that_makes_room() -> None:
    """Then the saved value is gone when the gradient of the input is allocated, and nothing is repeated."""
    g, x, dx, dw, loss = 10, 20, 15, 1, 1
    flow = Dataflow(
        (
            Operation("layer", (0,), (1,), 5.0),
            Operation("loss", (1,), (2, 3), 1.0),
            Operation("dx", (3,), (4,), 5.0),
            Operation("dw", (1, 3), (5,), 5.0),
            Operation("next", (4,), (6,), 1.0),
        ),
        (0, x, loss, g, dx, dw, 1), 2, frozenset({0}), frozenset({2, 5, 6}),
    )
    assert simulate(flow, flow.eager).peak_bytes == g + x + dx + dw + loss
    best = fit(flow, g + x + dw + loss)
    assert best.schedule == (0, 1, 3, 2, 4)


def test_nothing_is_repeated_before_the_gradients_arrive():
    """They are there when the backward begins: a repeat that makes room for itself before them has none."""
    operations = (
        Operation("f", (0,), (1,), 1.0, workspace_bytes=10),
        Operation("g", (1,), (2,), 1.0),
        Operation("h", (2,), (3,), 1.0, workspace_bytes=13),
        Operation("tangents", (), (4,), 0.0, repeatable=False),
        Operation("f_backward", (1, 3, 4), (5,), 1.0),
    )
    flow = Dataflow(operations, (1, 4, 1, 1, 8, 1), 3, given=frozenset({0}), results=frozenset({3, 5}))
    assert fit(flow, 18) == solution(flow, flow.eager)
    assert simulate(flow, (0, 1, 2, 0, 3, 4)).peak_bytes == 15
