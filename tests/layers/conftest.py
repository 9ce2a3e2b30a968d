"""What a counted step enters is left again."""
from __future__ import annotations

import gc

import pytest

from torchckpt.regions.private import dispatch_modes_are_active


@pytest.fixture(autouse=True)
def no_mode_is_left():
    yield
    gc.collect()
    assert dispatch_modes_are_active() == 0
