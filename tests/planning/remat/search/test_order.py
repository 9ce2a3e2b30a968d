from __future__ import annotations

import pytest

from tests.planning.remat.flows import Tape, mlp, random_dag, random_step, resnet, unet
from torchckpt.planning.remat.flow.dataflow import Tables
from torchckpt.planning.remat.flow.late import late
from torchckpt.planning.remat.flow.memory import simulate
from torchckpt.planning.remat.search.improve import draft_of, hoisted, moved, transplanted

FLOWS = {
    "mlp": mlp(4), "resnet": resnet(3), "unet": unet(2), "step": random_step(12, 1), "dag": random_dag(20, 2),
}


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("name", FLOWS)
def test_an_order_runs(name: str, sink: bool) -> None:
    flow = FLOWS[name]
    order = hoisted(flow, sink)
    assert sorted(order) == list(flow.eager)
    simulate(flow, order)


def test_gradients_of_weights_come_first() -> None:
    tape = Tape()
    flow = tape.flow(tape.matmul(tape.matmul(tape.input(100), 100, weight_bytes=10), 100, weight_bytes=10))
    orders = (range(3, 7), hoisted(flow)[3:])
    eager, hoisted_names = ([flow.operations[index].name for index in order] for order in orders)
    assert eager == ["loss_dx", "matmul_dx", "matmul_dw", "matmul_dw"]
    assert hoisted_names == ["loss_dx", "matmul_dw", "matmul_dx", "matmul_dw"]


@pytest.mark.parametrize("name", FLOWS)
def test_every_move_is_an_order_that_runs(name: str) -> None:
    flow = FLOWS[name]
    orders = list(moved(flow, list(flow.eager)))
    assert orders
    for order in orders:
        assert sorted(order) == list(flow.eager)
        simulate(flow, order)


@pytest.mark.parametrize("name", FLOWS)
def test_repeats_stay_before_the_first_runs_that_they_were_for(name: str) -> None:
    flow = FLOWS[name]
    draft = draft_of(flow, late(flow, frozenset()))
    same = transplanted(draft, Tables(flow))
    assert same.schedule() == draft.schedule()
    order = hoisted(flow)
    other = transplanted(draft, Tables(flow, order=order))
    assert simulate(flow, other.schedule()).peak_bytes == other.peak_bytes
