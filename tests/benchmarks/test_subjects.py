"""The models of the benchmarks on a device."""
from __future__ import annotations

import pytest

from benchmarks.graph import exactness
from benchmarks.graph.short import SIZES


@pytest.mark.accelerator
@pytest.mark.slow
def test_a_peak_does_not_miss_the_gradients_of_the_step_before(accelerator):
    found = exactness.count("mlp24", accelerator.type, SIZES["mlp24"], budgets=(0.75,))["rows"]["75%"]
    assert found["bit-equal"]
    assert 0.95 * found["planned"] <= found["measured"] <= found["planned"]
