"""An extension of Griffe: docstrings of the package, which are written for ``help()``, as Markdown."""
from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`~?([^`]+)`")
_LITERAL = re.compile(r"::\n\n((?:    .*\n|\n)+)")


def markdown(text: str) -> str:
    """``text`` with roles as code, and examples and drawings as blocks of code.

    >>> print(markdown("See :func:`mark`.\\n\\n>>> mark(h)\\n\\nMore."))
    See `mark`.
    <BLANKLINE>
    ```pycon
    >>> mark(h)
    ```
    <BLANKLINE>
    More.
    """
    text = _ROLE.sub(r"`\1`", text)
    text = _LITERAL.sub(lambda found: f":\n\n```text\n{_dedented(found[1])}\n```\n\n", text + "\n").rstrip("\n")
    lines: list[str] = []
    indent: str | None = None  # of the example that is being copied
    for line in [*text.split("\n"), ""]:
        if indent is None and line.lstrip().startswith(">>> "):
            indent = line[: len(line) - len(line.lstrip())]
            if lines and lines[-1].strip():
                lines.append("")
            lines.append(f"{indent}```pycon")
        elif indent is not None and not line.strip():
            lines.append(f"{indent}```")
            indent = None
        lines.append(line)
    return "\n".join(lines[:-1])


def _dedented(text: str) -> str:
    return "\n".join(line[4:] for line in text.rstrip("\n").split("\n"))


class Markdown(griffe.Extension):
    """Rewrites each docstring when it is read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
