"""Little: plans of pipelines that are searched for a tenth as long. They are within their budgets as ever."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchckpt.planning.plan.away import search
from torchckpt.planning.plan.search import candidates

__all__ = ["search_little"]


def search_little(sets: Callable[[Any, str, Any], None] = setattr) -> None:
    """From now on, for tests in which any plan will do.

    Args:
        sets: sets a name of a module to a value.
    """
    sets(candidates, "_WORK", 30_000)
    sets(candidates, "_FEWEST", 15)
    sets(search, "_EFFORT", 190_000)
    sets(search, "_STEPS_PLAYED", (6, 400))
