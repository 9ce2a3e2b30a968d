"""The site: it builds without a warning, has every public name, and asks no other host for anything."""
from __future__ import annotations

import html
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from posixpath import normpath
from types import ModuleType
from urllib.parse import unquote

import pytest

import torchckpt
from website.docstrings import markdown
from website.pages import directives, linked, places, public

ROOT = Path(__file__).parents[2]
MODULES = [
    "torchckpt",
    *(f"torchckpt.{name}" for name in ("costs", "distributed", "errors", "graph", "planning", "planning.plan")),
    *(f"torchckpt.{name}" for name in ("pipe", "pipe.skip", "testing", "typing")),
]
ON_API = {
    module: home
    for path in sorted((ROOT / "docs" / "api").glob("*.md"))
    for found in re.findall(r"^::: ([\w.]+)\.\*", path.read_text(), flags=re.MULTILINE)
    for module, home in public(found).items()
}


@pytest.mark.parametrize(
    ("page", "first"),
    {
        "index": "checkpoint",
        "graph": "rematerialize",
        "pipe": "Pipe",
        "distributed": "recompute_ahead",
        "planning-plan": "plan_pipeline",
        "costs": "pipeline_costs",
        "testing": "assert_transparent",
    }.items(),
)
def test_an_api_page_begins_with_what_is_called_first(page: str, first: str) -> None:
    found = re.search(r"^::: ([\w.]+)\.\*(.*)$", (ROOT / "docs" / "api" / f"{page}.md").read_text(), flags=re.MULTILINE)
    assert found is not None
    headings = re.findall(r"heading: (\S+)", directives(found[1], found[2].split()))
    assert headings[0] == f"{found[1]}.{first}"
    assert sorted(headings) == sorted(public(found[1]))


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


def test_links_to_files_become_links_to_their_pages() -> None:
    text = "[a](../../torchckpt/pipe/skip.py) [b](../../benchmarks/pipe/README.md#x) [c](https://a.org) [d](paper.md)"
    assert linked(text, "docs/guides/pipe.md") == (
        "[a](../source/torchckpt/pipe/skip.py.md) [b](../measured/pipe.md#x) [c](https://a.org) [d](paper.md)"
    )


def test_what_a_page_links_to_is_in_the_site_and_what_that_page_links_to() -> None:
    assert places()["docs/limits.md"] == "limits.md"
    assert places()["tests/device/README.md"] == "source/tests/device/README.md"
    assert places()["benchmarks/graph/frontier.svg"] == "source/benchmarks/graph/frontier.svg"
    assert "torchckpt/pipe/__init__.py" not in places()


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
    assert dead(tmp_path, pages) == []


PICTURES = sorted([*(ROOT / "docs").glob("*.svg"), *(ROOT / "benchmarks").rglob("*.svg")])


@pytest.mark.parametrize("path", PICTURES, ids=[path.name for path in PICTURES])
def test_letters_of_a_picture_can_be_read_on_a_telephone(path: Path) -> None:
    """``site.css`` shows pictures 760 pixels wide there, which scroll; the first one in the 358 that a page has."""
    text = path.read_text()
    width = re.findall(r'<svg [^>]*?width="(\d+)"', text)[0]  # charts may stand inside
    if path.name == "cost.svg":
        shown, letters = 358, re.findall(r"^text{font-size:([\d.]+)px", text, flags=re.MULTILINE)
    else:
        shown, letters = 760, re.findall(r"\bfont(?:-size)?:([\d.]+)px", text)
    assert min(map(float, letters)) * shown / int(width) > 8


def test_the_drawing_of_how_it_works_is_no_wider_than_a_telephone() -> None:
    (drawing,) = re.findall(r"```text\n(.*?)```", (ROOT / "docs" / "how-it-works.md").read_text(), flags=re.DOTALL)
    assert max(map(len, drawing.splitlines())) <= 43


def dead(folder: Path, pages: dict[str, str]) -> list[str]:
    """Links of the built pages that lead to no file, or to no place in it. The page of errors begins at the host."""
    ids = {name: set(re.findall(r'\b(?:id|name)="([^"]+)"', text)) for name, text in pages.items()}
    found = []
    for name in sorted(set(pages) - {"404.html"}):
        for link in re.findall(r'\b(?:href|src)="([^"]*)"', pages[name]):
            path, _, anchor = html.unescape(link).partition("#")
            place = normpath(f"{Path(name).parent}/{unquote(path)}") if path else name
            if "://" in path or path.startswith(("data:", "mailto:")):
                continue
            if not (folder / place).exists() or (anchor and place in ids and anchor not in ids[place] | {"__"}):
                found.append(f"{name}: {link}")
    return found
