"""Floor 2 does without torch."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torchckpt.planning

PROGRAM = """
import importlib, sys
for name in {names}:
    importlib.import_module("torchckpt.planning." + name)
print([name for name in ("torch", "numpy") if name in sys.modules])
"""


def test_importing_all_of_the_model_does_not_import_torch():
    home = Path(torchckpt.planning.__file__).parent
    paths = (path.relative_to(home).with_suffix("") for path in home.rglob("*.py") if path.stem != "__init__")
    names = sorted(".".join(path.parts) for path in paths)
    assert "plan.search.candidates" in names
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(names=names)],
        cwd=Path(torchckpt.__file__).parent.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"
