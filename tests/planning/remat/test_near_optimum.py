"""How near the planner's schedules are to the fastest ones: of tiny steps by brute force, of larger ones by proof."""
from __future__ import annotations

import pytest

from tests.planning.remat.brute_force import fastest
from tests.planning.remat.flows import budget_of, chain, mlp, random_chain, random_step
from tests.planning.remat.random_flows import random_flow
from tests.slow import few, slow
from torchckpt.planning.remat.flow.dataflow import Dataflow
from torchckpt.planning.remat.search.exact import optimum
from torchckpt.planning.remat.search.planner import fit

ALLOWED = {0.4: 1.015, 0.5: 1.01, 0.65: 1.01, 0.8: 1.01}
"""Of a budget, as a part of the eager peak: how many times the seconds of the fastest schedule."""


def copies_buffers(flow: Dataflow) -> bool:
    """Whether a repeat writes a new value of a buffer again. The planner spares that in the forward."""
    return any(flow.forward_results & set(operation.repeat.writes) for operation in flow.operations)


@few(4)
@pytest.mark.parametrize("seed", [*range(25), 165, *slow(range(25, 100))])
def test_tiny_steps_beside_brute_force(seed):
    flow = random_flow(seed)
    for share, allowed in ALLOWED.items():
        budget_bytes = budget_of(flow, share)
        best = fastest(flow, budget_bytes)
        if best is None or copies_buffers(flow):
            continue
        solution = fit(flow, budget_bytes)
        assert solution.peak_bytes <= budget_bytes
        assert best[0] <= solution.seconds <= allowed * best[0]


STEPS = {"chain": chain(24), "mlp": mlp(10), "random chain": random_chain(14, 3), "random step": random_step(25, 1)}


@pytest.mark.slow
@pytest.mark.parametrize("flow", STEPS.values(), ids=STEPS)
def test_steps_of_dozens_of_operations_beside_what_is_proven(flow):
    """In the planner's order of first runs."""
    pytest.importorskip("ortools")
    budget_bytes = budget_of(flow, 0.75)
    solution = fit(flow, budget_bytes)
    assert solution.peak_bytes <= budget_bytes
    assert solution.seconds <= 1.01 * optimum(flow, budget_bytes, hint=solution.schedule).bound_seconds
