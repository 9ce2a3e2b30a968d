from __future__ import annotations

import pytest

from tests.planning.remat.flows import chain, mlp, random_step, resnet, transformer
from torchckpt.planning.remat.flow.dataflow import Dataflow
from torchckpt.planning.remat.flow.late import late
from torchckpt.planning.remat.flow.memory import simulate
from torchckpt.planning.remat.search.improve import draft_of, remove_repeats
from torchckpt.planning.remat.search.planner import solution

FLOWS = {
    "chain": chain(16),
    "mlp": mlp(8),
    "transformer": transformer(2, dropout=True),
    "resnet": resnet(4),
    "random_step": random_step(15, seed=1),
}


def peak_bytes(flow: Dataflow, schedule: object) -> int:
    return simulate(flow, schedule).peak_bytes  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FLOWS)
def test_with_room_for_everything_all_repeats_are_dropped(name: str) -> None:
    flow = FLOWS[name]
    everything = late(flow, frozenset())
    budget = max(peak_bytes(flow, flow.eager), peak_bytes(flow, everything))
    assert tuple(remove_repeats(flow, everything, budget)) == tuple(flow.eager)


@pytest.mark.parametrize("name", FLOWS)
def test_the_budget_holds_and_no_single_repeat_more_can_be_spared(name: str) -> None:
    flow = FLOWS[name]
    start = late(flow, frozenset())
    for share in (0.0, 0.3, 0.6):
        low, high = peak_bytes(flow, start), peak_bytes(flow, flow.eager)
        budget = int(low + share * max(0, high - low))
        pruned = remove_repeats(flow, start, budget)
        assert peak_bytes(flow, pruned) <= budget
        assert solution(flow, pruned).seconds <= solution(flow, start).seconds
        assert tuple(remove_repeats(flow, pruned, budget)) == tuple(pruned)


def test_over_the_budget_it_stays_as_it_is() -> None:
    flow = FLOWS["mlp"]
    start = late(flow, frozenset())
    assert remove_repeats(flow, start, 1) is start


def test_a_schedule_survives_the_way_through_stages() -> None:
    for flow in FLOWS.values():
        schedule = tuple(late(flow, frozenset()))
        assert draft_of(flow, schedule).schedule() == schedule
        backwards = (0, *schedule)
        if flow.operations[0].repeatable:
            assert draft_of(flow, backwards).repeats[1] == [0]


def test_the_order_of_first_runs_is_kept() -> None:
    flow = FLOWS["mlp"]
    order = list(flow.eager)
    names = [operation.name for operation in flow.operations]
    place = names.index("matmul_dx")
    order[place], order[place + 1] = order[place + 1], order[place]
    assert draft_of(flow, order).schedule() == tuple(order)
