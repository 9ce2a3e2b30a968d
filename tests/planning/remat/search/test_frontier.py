from __future__ import annotations

from itertools import pairwise

import pytest

from tests.planning.remat.flows import chain, mlp, transformer
from tests.slow import few
from torchckpt.planning.remat.search import planner
from torchckpt.planning.remat.search.planner import frontier, least, solution


@pytest.fixture(autouse=True)
def little_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "_SEARCH_WORK", 100_000)


@few(1)
@pytest.mark.parametrize("flow", [chain(10), mlp(5), transformer(1)], ids=["chain", "mlp", "transformer"])
def test_less_memory_takes_more_time_from_eager_to_the_least(flow) -> None:
    solutions = frontier(flow, points=8)
    assert 3 <= len(solutions) <= 8
    assert all(a.peak_bytes > b.peak_bytes and a.seconds < b.seconds for a, b in pairwise(solutions))
    assert solutions[0].seconds == pytest.approx(flow.seconds)
    assert solutions[0].peak_bytes <= solution(flow, flow.eager).peak_bytes
    assert solutions[-1].peak_bytes <= least(flow).peak_bytes


def test_two_points_are_the_ends() -> None:
    flow = mlp(4)
    assert len(frontier(flow, points=2)) == 2


def test_nothing_recoverable_is_a_point() -> None:
    flow = chain(4)
    solutions = frontier(flow, points=5, pinned=frozenset(flow.writer))
    assert all(point.seconds == pytest.approx(flow.seconds) for point in solutions)
    assert len(solutions) == 1
