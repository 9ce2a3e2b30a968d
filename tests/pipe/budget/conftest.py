"""Plans of pipelines here: any within the budget."""
from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def plans(quick_search):
    """To search for the shortest step takes most of a test's time."""
