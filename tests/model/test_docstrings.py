"""The examples of the docstrings."""
from __future__ import annotations

import doctest
import importlib

import pytest

import torchckpt.model as model

NAMES = {name: getattr(model, name) for name in model.__all__}


MODULES = [
    "",
    ".place.bound",
    ".device",
    ".schedule.free_to_keep",
    ".schedule.named",
    ".place.partition",
    ".place.placement",
    ".schedule.schedules",
    ".simulation.simulator",
    ".schedule.csv_format",
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(f"torchckpt.model{name}")
    results = doctest.testmod(module, extraglobs=NAMES)
    assert results.attempted > 0
    assert results.failed == 0
