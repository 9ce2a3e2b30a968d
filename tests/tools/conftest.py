"""Fixtures of the tools: this process as a group of one, and an environment with no hub, which is put back."""
from __future__ import annotations

import os

import pytest

from tests.distributed.conftest import alone

__all__ = ["alone"]


@pytest.fixture(autouse=True, scope="package")
def environment():
    """Tools tell themselves things by the environment."""
    before = dict(os.environ)
    os.environ["HF_HUB_OFFLINE"] = "1"
    yield
    os.environ.clear()
    os.environ.update(before)
