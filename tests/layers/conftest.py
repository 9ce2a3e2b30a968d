"""A model and its input; and what a counted step enters is left again."""
from __future__ import annotations

import gc

import pytest
import torch

from tests.layers.models import Model, Wide
from torchckpt.regions.private import dispatch_modes_are_active


@pytest.fixture(autouse=True)
def no_mode_is_left():
    yield
    gc.collect()
    assert dispatch_modes_are_active() == 0


@pytest.fixture
def model():
    return Model([Wide(16, 16 * (1 + at % 4)) for at in range(6)])


@pytest.fixture
def x():
    return torch.randn(8, 32, 16)
