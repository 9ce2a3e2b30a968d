"""The examples of the docstrings run, and print what they say."""
from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import torchckpt.planning as model
from torchckpt.planning.step import table

NAMES = {**{name: getattr(model, name) for name in model.__all__}, "report": table.report}
ROOT = Path(model.__file__).parent
MODULES = sorted(
    ".".join(("torchckpt.planning", *file.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    for file in ROOT.rglob("*.py")
    if ">>> " in file.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    results = doctest.testmod(module, globs={**NAMES, **vars(module)})
    assert results.attempted > 0
    assert results.failed == 0
