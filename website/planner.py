"""A hook of MkDocs: the planner as a page, which runs the package's own wheel in Pyodide, from the site's own files.

Pyodide comes from its npm package. Where that cannot be had, the build says so, and the page cannot start.
"""
from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import typing_extensions

from torchckpt.jobs import MACHINES, MODELS
from torchckpt.jobs.layout import RECOMPUTES, STATES
from torchckpt.planning import NAMES

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig

ROOT = Path(__file__).parent.parent
PAGE = Path(__file__).parent / "planner"
CACHE = ROOT / "build" / "pyodide"
VERSION = "314.0.7"
_FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
_LOG = logging.getLogger("mkdocs.planner")


def on_post_build(config: MkDocsConfig) -> None:
    """Put ``planner.html`` and all that it reads into the site."""
    site = Path(config.site_dir)
    build(site)
    if pyodide():
        add_python(site / "planner")
    else:
        _LOG.info("planner.html cannot start: npm has no package pyodide@%s here, or there is no npm", VERSION)


def pyodide() -> bool:
    """Whether Pyodide is there, if need be from npm."""
    if all((CACHE / name).exists() for name in _FILES):
        return True
    npm = shutil.which("npm")
    if npm is None:
        return False
    CACHE.mkdir(parents=True, exist_ok=True)
    command = [npm, "pack", "--silent", f"pyodide@{VERSION}"]
    done = subprocess.run(command, cwd=CACHE, capture_output=True, text=True, check=False)
    if done.returncode:
        return False
    with tarfile.open(CACHE / done.stdout.split()[-1]) as packed:
        for name in _FILES:
            member = packed.extractfile(f"package/{name}")
            assert member is not None
            (CACHE / name).write_bytes(member.read())
    return True


def build(site: Path) -> None:
    """Write the page into ``site``."""
    folder = site / "planner"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(PAGE, folder)
    (folder / "planner.html").replace(site / "planner.html")
    (folder / "choices.json").write_text(json.dumps(choices()))


def add_python(folder: Path) -> None:
    """Write what the page runs into its ``folder``: Pyodide, the wheel of the package, and what that imports."""
    (folder / "pyodide").mkdir()
    for name in _FILES:
        shutil.copy(CACHE / name, folder / "pyodide" / name)
    wheel = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*wheel, "-w", str(folder), str(ROOT)], check=True)
    shutil.copy(Path(typing_extensions.__file__), folder / "typing_extensions.py")
    (made,) = folder.glob("*.whl")
    (folder / "files.json").write_text(json.dumps({"wheel": made.name}))


def choices() -> dict[str, list[str]]:
    """What the fields of the page offer; an empty one is the command's default."""
    return {
        "model": sorted(MODELS),
        "device": sorted(MACHINES),
        "schedule": ["", *NAMES],
        "policy": ["", *RECOMPUTES],
        "sharding": ["", *STATES],
    }
