"""The clock against its picture, and against what a pipeline needs."""
from __future__ import annotations

import pytest

from torchckpt.pipe.run.pipeline import clock_cycles


def test_three_micro_batches_through_two_stages() -> None:
    assert list(clock_cycles(m=3, p=2)) == [
        [(0, 0)],
        [(1, 0), (0, 1)],
        [(2, 0), (1, 1)],
        [(2, 1)],
    ]


@pytest.mark.parametrize("m", [1, 2, 5])
@pytest.mark.parametrize("p", [1, 3, 4])
def test_every_pair_once_after_what_it_depends_on(m: int, p: int) -> None:
    ticks = {pair: tick for tick, pairs in enumerate(clock_cycles(m, p)) for pair in pairs}
    assert set(ticks) == {(i, j) for i in range(m) for j in range(p)}
    assert all(ticks[i, j] > ticks[i, j - 1] for i, j in ticks if j)
    assert all(ticks[i, j] > ticks[i - 1, j] for i, j in ticks if i)
    assert max(ticks.values()) == m + p - 2
