"""Whose the bytes are: every part by hand, and all of them together the simulated peak."""
from __future__ import annotations

import pytest

from tests.planning.remat.random_flows import random_flow
from tests.slow import few, slow
from torchckpt.planning.remat.flow.dataflow import Dataflow, Operation
from torchckpt.planning.remat.flow.memory import Breakdown, at_end, at_peak, simulate
from torchckpt.planning.remat.search.planner import least


def small() -> Dataflow:
    """x -> a -> loss; then the gradients of a weight (5 bytes) and of x (7)."""
    forward = Operation("a", (0,), (1,), 1.0), Operation("loss", (1,), (2,), 1.0)
    backward = Operation("da", (1,), (3,), 1.0), Operation("dw", (0, 3), (4,), 1.0, workspace_bytes=2), Operation(
        "dx", (3,), (5,), 1.0)
    return Dataflow((*forward, *backward), (9, 4, 1, 6, 5, 7), 2, frozenset({0}), frozenset({2, 4, 5}))


def total(peak: Breakdown) -> int:
    return sum(peak.results_bytes.values()) + peak.touched_bytes + peak.workspace_bytes + peak.kept_bytes


def test_parts_by_hand():
    flow, kinds = small(), {4: "weights", 5: "inputs"}
    assert at_end(flow, kinds) == {"outputs": 1, "weights": 5, "inputs": 7}
    breakdown = at_peak(flow, flow.eager, kinds)
    assert breakdown == Breakdown(4, "dx", {"inputs": 7, "weights": 5, "outputs": 1}, 6, 0, 0)
    assert total(breakdown) == simulate(flow, flow.eager).peak_bytes == 19


def test_workspace_and_what_is_kept_are_told_apart():
    flow = Dataflow(
        (Operation("a", (0,), (1,), 1.0), Operation("b", (0,), (2,), 1.0, workspace_bytes=30),
         Operation("c", (1, 2), (3,), 1.0)), (9, 4, 5, 1), 2, frozenset({0}), frozenset({3}))
    assert at_peak(flow, flow.eager, {}) == Breakdown(1, "b", {}, 5, 30, 4)


@few(1)
@pytest.mark.parametrize("seed", [*range(4), *slow(range(4, 12))])
def test_parts_add_up_to_the_peak(seed):
    flow = random_flow(seed)
    for schedule in (flow.eager, least(flow).schedule):
        memory = simulate(flow, schedule)
        assert total(at_peak(flow, schedule, {})) == memory.peak_bytes
    assert sum(at_end(flow, {}).values()) == sum(flow.sizes_bytes[s] for s in flow.results if s in flow.writer)
