"""The code of the documentation runs: the Python blocks of a page, in order, in one namespace."""
from __future__ import annotations

import os
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist

from tests.distributed.ranks import one_rank
from torchckpt.features import release_of

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))

BLOCK = re.compile(
    r"(?:^[ \t]*<!-- not run: (?P<reason>[^\n]*?) -->[ \t]*\n)?"
    r"(?P<indent>^[ \t]*)```python[^\n]*\n(?P<code>.*?)^[ \t]*```[ \t]*$",
    re.DOTALL | re.MULTILINE,
)
NEEDS = re.compile(r"<!-- needs: (.*?) -->")


class Block(NamedTuple):
    """Python of a page, where it stands, and why it is not run, if it is not."""

    code: str
    line: int
    reason: str | None


def blocks(text: str) -> list[Block]:
    found = []
    for match in BLOCK.finditer(text):
        indent, line = match["indent"], text.count("\n", 0, match.start("code")) + 1
        code = "".join(row.removeprefix(indent) for row in match["code"].splitlines(keepends=True))
        found.append(Block(code, line, match["reason"]))
    return found


def run(path: Path, text: str) -> list[Block]:
    """Run what is to be run; errors point to the line of the page."""
    done, scope = [block for block in blocks(text) if block.reason is None], {"__name__": path.stem}
    for block in done:
        exec(compile("\n" * (block.line - 1) + block.code, str(path), "exec", dont_inherit=True), scope)
    return done


def skip_without(need: str) -> None:
    """Skip where a page cannot run: ``gloo``, for a process group of one, or a package, such as ``lightning>=2.5``."""
    if need == "gloo":
        if not dist.is_available() or not dist.is_gloo_available():
            pytest.skip("no gloo")
        return
    package, _, release = need.partition(">=")
    module = pytest.importorskip(package, reason=f"{package} is not installed")
    if release and release_of(module.__version__) < release_of(release):
        pytest.skip(f"{package} before {release}")


@pytest.fixture
def there(tmp_path, monkeypatch):
    """A folder of its own, in which a page may write, and no hub to ask."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(sys, "argv", ["python"])


@pytest.mark.filterwarnings(
    "ignore::FutureWarning",
    "ignore::DeprecationWarning",
    "ignore:.*does not have many workers",
    "ignore:GPU available but not used",
    r"ignore:The \.grad attribute of a Tensor that is not a leaf",  # of torch, where it compiles
)
@pytest.mark.parametrize("path", PAGES, ids=[str(path.relative_to(DOCS)) for path in PAGES])
def test_page(request, there, path):
    text = path.read_text()
    needs = NEEDS.findall(text)
    for need in needs:
        skip_without(need)
    if ".compile(" in text:
        request.getfixturevalue("fresh_dynamo")
    with one_rank() if "gloo" in needs else nullcontext():
        run(path, text)
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
    x += 1
    assert x == 2
    ```
"""


def test_blocks_of_a_page_share_one_namespace_and_some_are_not_run():
    assert [(block.line, block.reason) for block in blocks(PAGE)] == [(3, None), (8, "needs two hosts"), (18, None)]
    assert len(run(Path("page.md"), PAGE)) == 2


def test_an_error_points_to_the_line_of_the_page():
    with pytest.raises(NameError) as caught:
        run(Path("page.md"), PAGE.replace("needs two hosts", "x").replace("not run: x", "run"))
    assert caught.traceback[-1].lineno + 1 == 8
    assert os.path.basename(str(caught.traceback[-1].path)) == "page.md"
