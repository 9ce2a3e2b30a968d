"""The examples in the docstrings run, and print what they say."""
from __future__ import annotations

import doctest
from types import ModuleType

import pytest

from torchckpt.model.draw import axis, gantt, svg, trace, units
from torchckpt.model.place import placement
from torchckpt.model.report import report
from torchckpt.model.schedule import schedules
from torchckpt.model.simulation import simulator, timeline

MODULES = [axis, gantt, report, svg, timeline, trace, units]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_examples(module: ModuleType) -> None:
    names = {**vars(placement), **vars(schedules), **vars(simulator), **vars(module)}
    result = doctest.testmod(module, globs=names)
    assert result.attempted > 0
    assert result.failed == 0
