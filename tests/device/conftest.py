"""The device is made before the first test: autograd makes its threads at the first backward of a process."""
from __future__ import annotations

import pytest
import torch

from tests.device import load, why_not

if why_not() is None:
    load()


@pytest.fixture
def streams(sim):
    """Two new streams of sim:0."""
    return torch.Stream("sim:0"), torch.Stream("sim:0")
