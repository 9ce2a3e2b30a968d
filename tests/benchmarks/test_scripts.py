"""Scripts of ``benchmarks/`` run from any folder, without ``PYTHONPATH``."""
from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.scripts import ROOT

PATH_FIRST = "sys.path.insert(0, str(Path(__file__).parents[2]))"
OURS = ("benchmarks", "examples", "tests", "torchckpt")
FILES = {str(path.relative_to(ROOT)): path for path in sorted((ROOT / "benchmarks").rglob("*.py"))}
SCRIPTS = [name for name, path in FILES.items() if 'if __name__ == "__main__":' in path.read_text()]


def imported(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_finds_the_repository_before_it_imports_from_it(name):
    body = ast.parse(FILES[name].read_text()).body
    ours = [place for place, node in enumerate(body) if any(one.split(".")[0] in OURS for one in imported(node))]
    first = [place for place, node in enumerate(body) if ast.unparse(node) == PATH_FIRST]
    assert len(first) == 1 if ours else first == []
    assert first < ours or not ours


@pytest.mark.parametrize("name", FILES)
def test_a_neighbour_is_imported_by_its_full_name(name):
    stems = {Path(other).stem for other in FILES} | {"gpt", "simulation"}
    nodes = ast.walk(ast.parse(FILES[name].read_text()))
    assert [one for node in nodes for one in imported(node) if one.split(".")[0] in stems] == []


def test_no_text_asks_for_a_path():
    texts = [*FILES.values(), *(ROOT / "benchmarks").rglob("*.md"), ROOT / "Makefile"]
    assert [path.name for path in texts if "PYTHONPATH" in path.read_text()] == []


def test_folders_are_small():
    folders = [folder for folder in (ROOT / "benchmarks").rglob("*") if folder.is_dir()]
    assert {folder.name for folder in folders if sum(file.is_file() for file in folder.iterdir()) > 13} == set()
