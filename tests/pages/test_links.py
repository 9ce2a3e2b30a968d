"""Every link of every page leads to a file of a checkout, and to a heading of it. ``test_site`` looks at the site."""
from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "docs", "examples", "tests", "website")
PAGES = sorted([*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))])
HOME = runpy.run_path(str(ROOT / "setup.py"))["home"]()

CODE = re.compile(r"^[ \t]*(```|~~~).*?^[ \t]*\1[^\n]*$|`[^`\n]+`(?!\])", flags=re.MULTILINE | re.DOTALL)
FORMS = (r"\]\(([^)\s]+)[^)]*\)", r"^\[[^\]]+\]:[ \t]*(\S+)", r"\b(?:href|src)=\"([^\"]*)\"", r"<(https?:[^>]*)>")
LINK = re.compile("|".join(FORMS), flags=re.MULTILINE)


def links(text: str) -> list[str]:
    """Of all forms that Markdown has; not those in code."""
    return ["".join(found.groups("")) for found in LINK.finditer(CODE.sub("", text))]


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors that hosts of repositories give to headings."""
    made: list[str] = []
    text = re.sub(r"^(```|~~~).*?^\1", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#{1,6} +(.*?) *$", text, flags=re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        made.append(f"{anchor}-{made.count(anchor)}" if anchor in made else anchor)
    return frozenset(made)


def broken(page: Path, text: str) -> Iterator[str]:
    for link in links(text):
        target, _, anchor = link.partition("#")
        if "://" in target or target.startswith("mailto:"):
            if target.startswith(HOME):
                yield f"{link}: it begins with the address of this repository; link to the file"
            continue
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or not path.is_relative_to(ROOT):
            yield f"{link}: there is no such file"
        elif anchor and anchor not in anchors(path):
            yield f"{link}: no heading there has this anchor"


@pytest.mark.parametrize("page", PAGES, ids=[path.relative_to(ROOT).as_posix() for path in PAGES])
def test_every_link_leads_somewhere_in_a_checkout(page: Path) -> None:
    assert list(broken(page, page.read_text())) == []


def test_readme_begins_with_a_picture_that_is_there() -> None:
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    assert pictures[0].endswith(".svg")
    assert (ROOT / pictures[0]).is_file()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[a](docs/limits.md#keep) `[b](c)` [`d`](docs/)", []),
        ("```\n[a](b)\n```\n", []),
        ("[a](measured/pipe.md)", ["measured/pipe.md: there is no such file"]),
        ("![a](../cost.svg)", ["../cost.svg: there is no such file"]),
        ("[a](docs/limits.md#no)", ["docs/limits.md#no: no heading there has this anchor"]),
        ("[a](#no)", ["#no: no heading there has this anchor"]),
        ("[a]: b.md", ["b.md: there is no such file"]),
        ('<img src="b.svg">', ["b.svg: there is no such file"]),
        (f"[a]({HOME}/issues)", [f"{HOME}/issues: it begins with the address of this repository; link to the file"]),
    ],
)
def test_what_is_broken_is_found(text: str, said: list[str]) -> None:
    assert list(broken(ROOT / "README.md", text)) == said


# The one address ------------------------------------------------------------------------------------------------------


def test_long_description_has_addresses_and_leaves_code_alone() -> None:
    described = runpy.run_path(str(ROOT / "setup.py"))["described"]
    text = "[a](docs/a.md#b) ![c](docs/c.svg) [d](examples/) [e](https://a.org) [f](#g)\n```python\nh[0](x)\n```\n"
    assert described(text, "https://host/p") == (
        "[a](https://host/p/blob/main/docs/a.md#b) ![c](https://host/p/raw/main/docs/c.svg) "
        "[d](https://host/p/tree/main/examples/) [e](https://a.org) [f](#g)\n```python\nh[0](x)\n```\n"
    )


def test_the_address_of_the_repository_stands_in_two_files() -> None:
    assert f"repository-code: {HOME}\n" in (ROOT / "CITATION.cff").read_text()
    owner = HOME.rsplit("/", 2)[1]
    files = [path for path in ROOT.iterdir() if path.is_file()]
    files += [path for folder in (*FOLDERS, "torchckpt") for path in (ROOT / folder).rglob("*.*") if path.is_file()]
    texts = {path.name: path.read_text(errors="ignore") for path in files if path.suffix != ".pyc"}
    found = {name for name, text in texts.items() if HOME in text or f"{owner}.github.io" in text}
    assert found == {"CITATION.cff", "pyproject.toml"}
