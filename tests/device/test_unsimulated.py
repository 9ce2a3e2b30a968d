"""The list of what does not run on the simulated device."""
from __future__ import annotations

import ast
from pathlib import Path

from tests.device.unsimulated import UNSIMULATED, why_unsimulated

ROOT = Path(__file__).parents[2]


def test_every_test_of_the_list_is_there_and_has_a_reason():
    for (test, _), reason in UNSIMULATED.items():
        path, _, name = test.partition("::")
        tree = ast.parse((ROOT / path).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test
        assert reason


def test_a_test_is_found_by_its_name_and_its_variant():
    test, part = next(iter(UNSIMULATED))
    assert why_unsimulated(f"{test}[{part}-1]") == UNSIMULATED[test, part]
    assert why_unsimulated(f"{test}[cpu-1]") is None
    assert why_unsimulated(f"{test}_too[{part}-1]") is None
