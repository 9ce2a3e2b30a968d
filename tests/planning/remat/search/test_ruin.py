from __future__ import annotations

import pytest

from tests.planning.remat.flows import mlp, random_step, resnet
from torchckpt.planning.remat.flow.dataflow import Tables
from torchckpt.planning.remat.flow.incremental import Draft
from torchckpt.planning.remat.flow.memory import simulate
from torchckpt.planning.remat.search.eviction import Eviction, EvictionScore
from torchckpt.planning.remat.search.improve import RuinAndRecreate

FLOWS = {"mlp": mlp(8), "resnet": resnet(3), "random_step": random_step(15, seed=2)}
PLAIN = EvictionScore()


def evicted(name: str, share: float, scoring: EvictionScore = PLAIN) -> tuple[Draft, int]:
    flow = FLOWS[name]
    draft = Draft(Tables(flow))
    budget = int(share * draft.peak_bytes)
    Eviction(draft, budget, scoring).run()
    return draft, budget


@pytest.mark.parametrize("name", FLOWS)
@pytest.mark.parametrize(
    "scoring", [EvictionScore(), EvictionScore(0.5, 0.0, put_off=50.0), EvictionScore(1.0, 1.0, gradients=False)]
)
def test_an_eviction_fits(name: str, scoring: EvictionScore) -> None:
    draft, budget = evicted(name, 0.7, scoring)
    assert simulate(FLOWS[name], draft.schedule()).peak_bytes == draft.peak_bytes <= budget


def test_without_gradients_nothing_of_the_backward_repeats() -> None:
    draft, _ = evicted("resnet", 0.4, EvictionScore(gradients=False))
    assert all(position < FLOWS["resnet"].forward for repeats in draft.repeats for position in repeats)


def test_what_is_kept_is_not_dropped() -> None:
    flow = FLOWS["mlp"]
    draft = Draft(Tables(flow))
    assert not Eviction(draft, draft.peak_bytes // 2, EvictionScore(), kept=frozenset(flow.writer)).run()
    assert not any(draft.repeats)


@pytest.mark.parametrize("name", FLOWS)
def test_the_search_is_never_slower_never_over_the_budget_and_always_the_same(name: str) -> None:
    costs = set()
    for _ in range(2):
        draft, budget = evicted(name, 0.6)
        cost = draft.cost
        RuinAndRecreate(draft, budget).run(4000)
        assert draft.cost <= cost
        assert draft.peak_bytes <= budget
        costs.add(draft.schedule())
    assert len(costs) == 1


def test_from_what_does_not_fit_the_peak_falls() -> None:
    draft, _ = evicted("resnet", 0.9)
    peak = draft.peak_bytes
    RuinAndRecreate(draft, int(0.8 * peak)).run(20_000)
    assert draft.peak_bytes < peak
