"""The commands, a file each: ``add`` tells the parser of it, ``run`` does it. None imports torch before it runs."""
from __future__ import annotations

__all__: list[str] = []
