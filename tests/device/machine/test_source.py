"""The C++: includes go one way, and files are short."""
from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.device.build import SOURCE

MAY_INCLUDE = {"machine": {"machine"}}  # all others: machine and operators
FILES = sorted(path for path in SOURCE.rglob("*") if path.suffix in (".h", ".cpp"))


def floor(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file(path):
    lines = path.read_text().splitlines()
    included = re.findall(r'^#include "(\w+)/', "\n".join(lines), re.MULTILINE)
    assert set(included) <= MAY_INCLUDE.get(floor(path), {"machine", "operators"})
    assert len(lines) <= 400
    assert max(map(len, lines)) <= 120
    assert lines[0].startswith(("// ", '#include "', "#include <"))
