"""Slow: cases that ``make slow`` alone runs."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Any
from zlib import crc32

import pytest

__all__ = ["few", "leave_out", "rarely", "selected", "slow", "slow_but"]

few = pytest.mark.few
"""``@few(2)``: two cases of the test are quick."""


def slow(values: Iterable[Any]) -> list[Any]:
    """Parameters with the mark, one for each of ``values``."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def rarely(rare: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Parameters, of which those in ``rare`` have the mark."""
    return [pytest.param(value, marks=pytest.mark.slow if value in rare else ()) for value in values]


def slow_but(quick: Collection[tuple[Any, ...]], cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Cases of several parameters, of which those that are not ``quick`` have the mark."""
    return [pytest.param(*case, marks=() if case in quick else pytest.mark.slow) for case in cases]


def selected(request: pytest.FixtureRequest, parameter: str) -> list[Any]:
    """The values of a parameter in the tests of the module that this run has: a set-up of all of them needs no more."""
    items = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    calls = [item.callspec.params for item in items if hasattr(item, "callspec")]
    return list(dict.fromkeys(params[parameter] for params in calls if parameter in params))


def leave_out(items: Iterable[pytest.Item]) -> None:
    """The cases of a test with ``few`` that are too many have the mark. Those that stay are evenly spread, and begin
    elsewhere in each test, so that tests with the same parameters have others of their values."""
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for name, those in cases.items():
        count, first = those[0].get_closest_marker("few").args[0], crc32(name.encode())
        quick = {(first + k * len(those) // count) % len(those) for k in range(count)}
        for k, item in enumerate(those):
            if k not in quick:
                item.add_marker(pytest.mark.slow)
