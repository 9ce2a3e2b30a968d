"""The package's long description: README, whose relative links become addresses below ``Source`` of pyproject.toml."""
from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
_CODE = re.compile(r"(^```.*?^```$)", flags=re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)")


def described(text: str, home: str) -> str:
    """``text`` with links for a page on another host. Code is left as it is."""

    def absolute(found: re.Match[str]) -> str:
        picture, words, target = found.groups()
        kind = "raw" if picture else "tree" if target.endswith("/") else "blob"
        return f"{picture}[{words}]({home}/{kind}/main/{target})"

    parts = _CODE.split(text)
    return "".join(part if part.startswith("```") else _LINK.sub(absolute, part) for part in parts)


def home() -> str:
    """The address of the repository, which stands in pyproject.toml alone."""
    found = re.search(r'^Source = "(.*)"$', (HERE / "pyproject.toml").read_text(encoding="utf-8"), flags=re.MULTILINE)
    if found is None:
        raise ValueError('pyproject.toml has no line such as Source = "https://host/project" in [project.urls]')
    return found[1].rstrip("/")


if __name__ == "__main__":
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    setup(long_description=described(readme, home()), long_description_content_type="text/markdown")
