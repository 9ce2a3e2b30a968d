"""Scripts: examples and benchmarks, each run in a process of its own."""
from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["HOME", "ROOT", "printed_by", "run"]

ROOT = Path(__file__).parents[1]
HOME = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
"""An environment in which Python finds the package of this tree, installed or not."""


def run(*arguments: str, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python with ``arguments``, in ``HOME``."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, env={**HOME, **environment}, capture_output=True, text=True, timeout=timeout)


def printed_by(benchmark: str, *arguments: str, timeout: float = 300) -> Any:
    """The JSON that a benchmark prints: from a folder elsewhere and without ``PYTHONPATH``, as users may run it."""
    command = [sys.executable, str(ROOT / "benchmarks" / benchmark), *arguments]
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, env=bare, cwd=folder, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
