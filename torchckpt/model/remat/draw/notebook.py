"""Notebook: a picture and a table as a page of HTML shows them."""
from __future__ import annotations

from base64 import b64encode
from html import escape

__all__ = ["page"]


def page(picture: str, title: str, table: str) -> str:
    """The SVG as an image, since its styles would be those of the whole page; under it the table, folded."""
    data = b64encode(picture.encode()).decode()
    image = f'<img src="data:image/svg+xml;base64,{data}" alt="{escape(title)}" style="max-width: 100%"/>'
    return f"{image}\n<details><summary>{escape(title)}</summary><pre>{escape(table)}</pre></details>"
