"""Jobs are planned without torch."""
from __future__ import annotations

import doctest
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import torchckpt.jobs

HOME = Path(torchckpt.jobs.__file__).parent
MODULES = sorted(path.stem for path in HOME.glob("*.py") if path.stem != "__init__")


def test_importing_all_of_it_does_not_import_torch():
    names = [f"torchckpt.jobs.{name}" for name in MODULES]
    program = f"import sys, {', '.join(names)}; print('torch' in sys.modules)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=HOME.parent.parent, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("name", [name for name in MODULES if ">>> " in (HOME / f"{name}.py").read_text()])
def test_examples_of_docstrings(name):
    results = doctest.testmod(importlib.import_module(f"torchckpt.jobs.{name}"))
    assert results.attempted > 0
    assert results.failed == 0
