"""Schedules here: any within the budget."""
from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def schedules(quick_planner):
    """To search for the fastest one takes most of a test's time."""
