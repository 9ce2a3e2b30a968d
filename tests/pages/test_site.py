"""The site: it builds without a warning, has every public name, and asks no other host for anything."""
from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import torchckpt
from website.docstrings import markdown
from website.pages import linked, public

ROOT = Path(__file__).parents[2]
MODULES = [
    "torchckpt",
    *(f"torchckpt.{name}" for name in ("distributed", "errors", "graph", "model", "model.plan", "pipe", "pipe.skip")),
    *(f"torchckpt.{name}" for name in ("plan", "testing", "typing")),
]
ON_API = {
    module: home
    for path in sorted((ROOT / "docs" / "api").glob("*.md"))
    for found in re.findall(r"^::: ([\w.]+)\.\*$", path.read_text(), flags=re.MULTILINE)
    for module, home in public(found).items()
}


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_on_an_api_page(module: str) -> None:
    public_module = importlib.import_module(module)
    names = [name for name in public_module.__all__ if name != "__version__"]
    values = {name: getattr(public_module, name) for name in names}
    homes = {ON_API.get(f"{module}.{name}") for name in names} | set(ON_API.values())
    missing = [
        name
        for name, value in values.items()
        if not isinstance(value, ModuleType)
        and f"{module}.{name}" not in ON_API
        and f"{value.__module__}.{value.__qualname__}" not in homes
    ]
    assert missing == []


def test_a_docstring_becomes_markdown() -> None:
    assert markdown("See :func:`mark`.\n\n>>> mark(h)\nh\n\nMore::\n\n    a -> b\n\nEnd.") == (
        "See `mark`.\n\n```pycon\n>>> mark(h)\nh\n```\n\nMore:\n\n```text\na -> b\n```\n\nEnd."
    )


def test_links_to_files_become_addresses() -> None:
    text = "[code](gpu.py) ![picture](frontier.svg) [out](https://example.org) [data](../results/cpu.json)"
    assert linked(text, "benchmarks/pipe/README.md", "https://host/p/") == (
        "[code](https://host/p/blob/main/benchmarks/pipe/gpu.py) ![picture](frontier.svg) [out](https://example.org) "
        "[data](https://host/p/blob/main/benchmarks/results/cpu.json)"
    )


@pytest.mark.slow
def test_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    settings = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    made = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stderr[-3000:]
    pages = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*.html")}
    loaded = re.compile(r'<(?:script|img|link rel="(?:stylesheet|preconnect)")[^>]*(?:src|href)="https?://')
    assert [name for name, text in pages.items() if loaded.search(text)] == []
    anchors = {anchor for text in pages.values() for anchor in re.findall(r'id="(torchckpt\.[\w.]+)"', text)}
    assert sorted(set(ON_API.values()) - anchors) == []
    assert torchckpt.__version__ in pages["changelog.html"]
