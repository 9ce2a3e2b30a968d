"""What tests of the graph level share."""
from __future__ import annotations

import pytest

from torchckpt.graph.private.trace import Differentiable


@pytest.fixture
def traces(monkeypatch):
    """One entry for each call that is traced."""
    found = []

    before = Differentiable.trace

    def counting(self, *tensors):
        found.append(1)
        before(self, *tensors)

    monkeypatch.setattr(Differentiable, "trace", counting)
    return found
