"""Fixtures of the pipelines: this process as a group of one."""
from __future__ import annotations

import logging

import pytest

from tests.distributed.ranks import one_rank
from tests.distributed.stages import events


@pytest.fixture
def alone():
    """This process is the only rank of a gloo group."""
    events.clear()
    with one_rank():
        yield


@pytest.fixture
def quiet():
    """torch prints the schedule where a step fails."""
    logger = logging.getLogger("torch.distributed.pipelining")
    logger.disabled = True
    yield
    logger.disabled = False


@pytest.fixture(autouse=True)
def plans(quick_search):
    """Here as on other ranks."""
