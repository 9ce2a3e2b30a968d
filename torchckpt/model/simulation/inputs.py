"""Inputs: check the caller's costs and links, and expand them to one per stage and one per pair of stages."""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from torchckpt.errors import Fault
from torchckpt.model.schedule.costs import Link, StageCosts

__all__ = ["per_boundary", "per_stage"]


def per_stage(costs: StageCosts | Sequence[StageCosts], stages: int) -> tuple[list[StageCosts], list[Fault]]:
    """The costs of every stage, and their faults."""
    rule = f"one StageCosts, or one for each of {stages} stages"
    listed, faults = _spread("costs", StageCosts, costs, stages, rule, f"StageCosts(), or a list of {stages}")
    for place, one in enumerate(listed):
        where = "costs" if isinstance(costs, StageCosts) else f"costs[{place}]"
        for name in (field.name for field in fields(StageCosts)):
            faults.extend(_amount(where, name, getattr(one, name)))
        if isinstance(costs, StageCosts):
            break
    return listed, faults


def per_boundary(link: Link | Sequence[Link], stages: int) -> tuple[list[Link], list[Fault]]:
    """The link of every pair of neighbouring stages, and their faults."""
    rule = f"one Link, or one for each of {stages - 1} pairs of neighbouring stages"
    listed, faults = _spread("link", Link, link, stages - 1, rule, f"Link(), or a list of {stages - 1}")
    for place, one in enumerate(listed):
        where = "link" if isinstance(link, Link) else f"link[{place}]"
        faults.extend(_amount(where, "latency_seconds", one.latency_seconds))
        if not (_is_number(one.bandwidth) and one.bandwidth > 0):
            rule = "a bandwidth is a number of bytes per second, above 0"
            faults.append(Fault(rule, f"{where}.bandwidth={one.bandwidth!r}", "bandwidth=float('inf')"))
        if isinstance(link, Link):
            break
    return listed, faults


def _spread(name: str, kind: type, given: Any, count: int, rule: str, works: str) -> tuple[list[Any], list[Fault]]:
    if isinstance(given, kind):
        return [given] * count, []
    if not isinstance(given, Sequence) or isinstance(given, str):
        return [], [Fault(rule, f"{name}={given!r}", works)]
    wrong = [place for place, one in enumerate(given) if not isinstance(one, kind)]
    faults = [Fault(rule, f"{name}[{place}]={given[place]!r}", works) for place in wrong]
    if len(given) != count:
        faults.append(Fault(rule, f"{len(given)} of {count}", works))
    return ([] if faults else list(given)), faults


def _amount(where: str, name: str, value: object) -> Iterator[Fault]:
    if not (_is_number(value) and 0 <= value < math.inf):  # type: ignore[operator]  # narrowed by _is_number
        yield Fault("seconds and bytes are finite numbers >= 0", f"{where}.{name}={value!r}", f"{name}=1.0")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
