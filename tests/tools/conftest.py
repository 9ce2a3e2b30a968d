"""Fixtures of the tools: this process as a group of one."""
from __future__ import annotations

from tests.distributed.conftest import alone

__all__ = ["alone"]
