"""The examples of the docstrings."""
from __future__ import annotations

import doctest
import importlib

import pytest

import torchckpt.model as model
import torchckpt.model.plan as plan

NAMES = {name: getattr(found, name) for found in (model, plan) for name in found.__all__}


@pytest.mark.parametrize("name", ["", ".pipeline", ".stage.stage", ".stage.holding", ".stage.limit"])
def test_examples(name):
    module = importlib.import_module(f"torchckpt.model.plan{name}")
    results = doctest.testmod(module, extraglobs=NAMES)
    assert results.attempted > 0
    assert results.failed == 0
