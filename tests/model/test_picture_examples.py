"""The examples in the docstrings run, and print what they say."""
from __future__ import annotations

import doctest
from types import ModuleType

import pytest

from torchckpt.model import axis, gantt, placement, report, schedules, simulator, svg, trace, units


@pytest.mark.parametrize("module", [axis, gantt, report, svg, trace, units], ids=lambda module: module.__name__)
def test_examples(module: ModuleType) -> None:
    names = {**vars(placement), **vars(schedules), **vars(simulator), **vars(module)}
    result = doctest.testmod(module, globs=names)
    assert result.attempted > 0
    assert result.failed == 0
