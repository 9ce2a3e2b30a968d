from __future__ import annotations

import pytest

from torchckpt.planning.draw.canvas import Axis


def test_values_lie_between_start_and_end() -> None:
    axis = Axis(10.0, 100.0, 0.0)
    assert [axis(value) for value in (0.0, 5.0, 10.0)] == [100.0, 50.0, 0.0]


@pytest.mark.parametrize(
    ("extent", "ticks"),
    [
        (33.0, [0, 10, 20, 30]),
        (4.0, [0, 1, 2, 3, 4]),
        (0.3, [0, 0.1, 0.2, 0.3]),
        (7e9, [0, 2e9, 4e9, 6e9]),
        (0.0, [0]),
    ],
)
def test_ticks_are_round(extent: float, ticks: list[float]) -> None:
    assert Axis(extent, 0, 1).ticks(4) == pytest.approx(ticks)


def test_ticks_are_round_in_units() -> None:
    assert Axis(2.5 * 2**30, 0, 1).ticks(4, unit=2**30) == [0, 2**30, 2 * 2**30]


@pytest.mark.parametrize("extent", [1e-12, 0.37, 1.0, 9.99, 10.0, 123456.0, 1e15])
@pytest.mark.parametrize("most", [1, 3, 5, 10])
def test_ticks_are_never_more_than_asked_for(extent: float, most: int) -> None:
    ticks = Axis(extent, 0, 1).ticks(most)
    assert 1 <= len(ticks) <= most + 1
    assert ticks[-1] <= extent * (1 + 1e-6)


def test_of_an_empty_axis_every_value_is_at_the_start() -> None:
    assert Axis(0.0, 7.0, 9.0)(3.0) == 7.0
