"""The code of README and docs runs as pasted: a page from its top, and each snippet that is complete by itself alone.
Those that are alone are slow, as they are part of their pages.

Each runs in a fresh process, with nothing made ready, and without the packages that only tests need, unless it says so.
torch alone is imported before, once for all: that takes seconds. So is its compiler for pages that import it anyway.
"""
from __future__ import annotations

import builtins
import re
import symtable
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.distributed.ranks import script_on_ranks
from tests.scripts import ROOT, run
from torchckpt.features import release_of

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]

BLOCK = re.compile(
    r"(?:^[ \t]*<!-- not run: (?P<reason>[^\n]*?) -->[ \t]*\n)?"
    r"(?P<indent>^[ \t]*)```python[^\n]*\n(?P<code>.*?)^[ \t]*```[ \t]*$",
    re.DOTALL | re.MULTILINE,
)
NEEDS = re.compile(r"<!-- needs: (.*?) -->")
COMPILER = re.compile(
    r"\bgraph\b|\boptim\b|\bcompile\(|^(?:import|from) (?:accelerate|lightning|peft|transformers)", re.MULTILINE
)
"""Of code that imports torch's compiler: an optimizer does, and what others make of torch."""
EXTRA = re.compile(r"^test = \[\n(.*?)^\]", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """Python of a page, where it stands, why it is not run, if it is not, and the packages that are named above it."""

    code: str
    line: int
    reason: str | None
    needs: tuple[str, ...] = ()


def blocks(text: str) -> list[Block]:
    found = []
    for match in BLOCK.finditer(text):
        indent, line = match["indent"], text.count("\n", 0, match.start("code")) + 1
        code = "".join(row.removeprefix(indent) for row in match["code"].splitlines(keepends=True))
        needs = tuple(NEEDS.findall(text, 0, match.start("code")))
        found.append(Block(code, line, match["reason"], needs))
    return found


def undefined(code: str) -> set[str]:
    """The names that ``code`` reads and does not define: it goes on from what stands above it."""
    top = symtable.symtable(code, "page", "exec")
    tables = [top]
    for table in tables:
        tables += table.get_children()
    defined = {name.get_name() for name in top.get_symbols() if name.is_assigned() or name.is_imported()}
    read = {
        name.get_name()
        for table in tables
        for name in table.get_symbols()
        if name.is_referenced() and (table is top or name.is_global())
    }
    return read - defined - set(dir(builtins))


def programs(text: str) -> Iterator[Sequence[Block]]:
    """What a reader may paste: all of a page, and what is complete without the rest."""
    page = [block for block in blocks(text) if block.reason is None]
    if page:
        yield page
    for block in page:
        if not undefined(block.code) and [block] != page and not (block is page[0] and block.needs == page[-1].needs):
            yield [block]


PROGRAMS = [
    pytest.param(
        program,
        id=f"{path.relative_to(ROOT)}:{program[0].line}{'-' * (len(program) > 1)}",
        marks=pytest.mark.slow if number else (),  # a part of a page that is run
    )
    for path in PAGES
    for number, program in enumerate(programs(path.read_text()))
]


ENDING = """
import os, sys, torch

torch.distributed.destroy_process_group()
sys.stdout.flush()
os._exit(0)
"""
"""Threads of gloo outlive the group. One that lets go of a tensor while the interpreter ends aborts the process."""


def pasted(program: Sequence[Block], folder: Path) -> Path:
    """A file with ``program``, each block at its line of the page."""
    text = ""
    for block in program:
        text += "\n" * (block.line - 1 - text.count("\n")) + block.code
    if "init_process_group" in text or "init_distributed" in text:
        text += ENDING
    path = folder / "pasted.py"
    path.write_text(text)
    return path


def only_for_tests() -> list[str]:
    (extra,) = EXTRA.findall((ROOT / "pyproject.toml").read_text())
    return re.findall(r'^ +"([a-z]+)', extra, re.MULTILINE)


def skip_without(need: str) -> None:
    """Skip where a package, such as ``lightning>=2.5``, is not there."""
    package, _, release = need.partition(">=")
    module = pytest.importorskip(package, reason=f"{package} is not installed")
    if release and release_of(module.__version__) < release_of(release):
        pytest.skip(f"{package} before {release}")


@pytest.mark.parametrize("program", PROGRAMS)
def test_it_runs_as_pasted(program, tmp_path):
    needs = program[-1].needs
    for need in needs:
        skip_without(need)
    hidden = [] if needs else only_for_tests()  # packages of others need more than is said here
    compiler = any(COMPILER.search(block.code) for block in program)
    done = run(pasted(program, tmp_path).name, cwd=tmp_path, without=hidden, compiler=compiler, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr[-4000:]


GUIDES = [DOCS / "guides" / name for name in ("recompute-ahead.md", "budget-pipeline.md")]
ALONE = ", store=dist.HashStore(), rank=0, world_size=1"


@pytest.mark.parametrize("guide", GUIDES, ids=[guide.stem for guide in GUIDES])
def test_the_pipelines_run_under_torchrun_with_the_line_that_they_give(guide, tmp_path):
    text = guide.read_text()
    assert 'Under torchrun: dist.init_process_group("gloo")' in text
    path = pasted(blocks(text), tmp_path)
    path.write_text(path.read_text().replace(ALONE, ""))
    printed = script_on_ranks(str(path), folder=tmp_path)
    assert printed.count("stage ") == 2  # a report of each rank


@pytest.mark.parametrize("path", PAGES, ids=[str(path.relative_to(ROOT)) for path in PAGES])
def test_no_python_of_a_page_is_overlooked(path):
    text = path.read_text()
    assert len(re.findall(r"^[ \t]*```python", text, re.MULTILINE)) == len(blocks(text))


def test_no_page_leaves_a_mark_that_is_misspelt():
    marks = [mark for path in PAGES for mark in re.findall(r"<!-- ?not.*?-->", path.read_text())]
    assert [mark for mark in marks if not re.fullmatch(r"<!-- not run: \S.*? -->", mark)] == []


# what is run ----------------------------------------------------------------------------------------------------------

PAGE = """
```python
x = 1
```

<!-- not run: needs two hosts -->
```python
x = no_such_name
```

```sh
exit 1
```

1. In a list

    ```python
    y = x + 1
    assert y == 2
    ```
"""


def test_blocks_of_a_page_share_one_namespace_and_some_are_not_run():
    assert [(block.line, block.reason) for block in blocks(PAGE)] == [(3, None), (8, "needs two hosts"), (18, None)]
    assert [[block.line for block in program] for program in programs(PAGE)] == [[3, 18]]


def test_what_is_complete_runs_alone_too():
    page = "```python\nx = 1\n```\n```python\nimport os\n\ndef f(y):\n    return [os, y]\n```\n```python\nf(x)\n```\n"
    assert [undefined(block.code) for block in blocks(page)] == [set(), set(), {"f", "x"}]
    assert [[block.line for block in program] for program in programs(page)] == [[2, 5, 11], [5]]


def test_packages_that_a_page_names_are_there_from_that_place_on():
    page = "```python\nx = 1\n```\n<!-- needs: pytest>=7 -->\n```python\nimport pytest\n```\n"
    assert [block.needs for block in blocks(page)] == [(), ("pytest>=7",)]
    assert [[block.line for block in program] for program in programs(page)] == [[2, 6], [2], [6]]


def test_an_error_points_to_the_line_of_the_page(tmp_path):
    page = PAGE.replace("needs two hosts", "x").replace("not run: x", "run")
    done = run(str(pasted(blocks(page), tmp_path)))
    assert done.returncode == 1
    assert re.search(r'pasted.py", line 8, .*NameError', done.stderr, re.DOTALL)


def test_packages_that_only_tests_need_are_not_there():
    names = only_for_tests()
    assert {"pytest", "numpy", "ortools"} <= set(names)
    assert "no numpy here" in run("-c", "import numpy", without=names).stderr
