from __future__ import annotations

import doctest
import random
from itertools import pairwise

import pytest

from torchckpt.planning.remat.draw import curve
from torchckpt.planning.remat.draw.curve import Label, beside, spread


def test_examples() -> None:
    result = doctest.testmod(curve)
    assert result.attempted > 0
    assert result.failed == 0


def test_of_two_that_touch_the_heavier_stays() -> None:
    light, heavy, far = Label("light", 10, 8, 1), Label("heavy", 15, 8, 2), Label("far", 30, 8, 1)
    assert beside([light, heavy, far], 0, 100) == [heavy, far]


def test_labels_move_into_the_frame() -> None:
    found = beside([Label("a", 1, 10, 1), Label("b", 99, 10, 1)], 0, 100)
    assert [label.place for label in found] == [5, 95]


@pytest.mark.parametrize("seed", range(20))
def test_places_keep_their_distance_and_move_as_little_as_they_can(seed: int) -> None:
    rng = random.Random(seed)
    places = sorted(rng.uniform(0, 60) for _ in range(rng.randint(1, 5)))
    found = spread(places, 10, 100)
    assert all(one + 10 <= other + 1e-9 for one, other in pairwise(found))
    moved = sum((one - other) ** 2 for one, other in zip(places, found))
    for _ in range(200):  # no other places that keep the distance move less
        tried = sorted(place + rng.uniform(-15, 15) for place in places)
        if all(one + 10 <= other for one, other in pairwise(tried)):
            assert sum((one - other) ** 2 for one, other in zip(places, tried)) >= moved - 1e-9


def test_no_place_is_beyond_the_end() -> None:
    assert spread([95, 99, 100], 10, 100) == [80, 90, 100]
