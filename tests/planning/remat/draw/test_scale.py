from __future__ import annotations

import pytest

from torchckpt.planning.remat.draw.curve import memory_units, prefix


@pytest.mark.parametrize(
    ("largest", "letter"), [(0, ""), (0.5, ""), (999, ""), (1000, "k"), (10**6, "M"), (10**9, "G"), (10**16, "T")]
)
def test_the_prefix_leaves_a_number_of_at_least_one(largest: float, letter: str) -> None:
    assert prefix(largest)[0] == letter


def test_memory_is_written_in_bytes_and_time_as_asked_for() -> None:
    units = memory_units(2_000, "ms", 1e-3)
    assert (units.of_memory(2_500), units.of_time(0.0425)) == ("2.5 kB", "42.5 ms")
