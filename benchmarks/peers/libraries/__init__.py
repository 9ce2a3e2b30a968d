"""The libraries whose models are trained: of each its families, and a small model of one."""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from benchmarks.peers.case import Case

__all__ = ["LIBRARIES", "Library"]


class Library(NamedTuple):
    """One library, imported."""

    name: str
    version: str
    families: Callable[[], list[str]]
    case: Callable[[str], Case]
    """The case of a family; it raises where there is no small one."""


def _transformers() -> Library:
    from benchmarks.peers.libraries.transformers_models import library

    return library()


def _timm() -> Library:
    from benchmarks.peers.libraries.timm_models import library

    return library()


def _diffusers() -> Library:
    from benchmarks.peers.libraries.diffusers_models import library

    return library()


def _litgpt() -> Library:
    from benchmarks.peers.libraries.litgpt_models import library

    return library()


LIBRARIES = {
    "transformers": _transformers,
    "diffusers": _diffusers,
    "litgpt": _litgpt,
    "timm": _timm,
}
"""Each by its name; a call imports it. timm is last: diffusers takes the stub of torchvision for torchvision."""
