"""Fixtures of the pipelines: this process as a group of one."""
from __future__ import annotations

import pytest

from tests.distributed.ranks import one_rank
from tests.distributed.stages import events


@pytest.fixture
def alone():
    """This process is the only rank of a gloo group."""
    events.clear()
    with one_rank():
        yield
