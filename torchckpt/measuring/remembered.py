"""Remembered: the steps that were counted, and what becomes of a plan whose steps take more than they may."""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Generic, TypeVar

__all__ = ["LESS", "NEAR", "SHOWN", "Discarded", "Followed", "Remembered", "digest"]

LESS = 0.9
"""After the device was out of memory, the share of its budget that a plan may use."""
NEAR = 1.01
"""A plan may exceed its budget by this factor before it is made again."""
SHOWN = 2
"""The step of a plan whose bytes are counted."""
_MOST = 64
"""At most so many steps are remembered."""

Key = TypeVar("Key")
Plan = TypeVar("Plan")
Value = TypeVar("Value")


class Remembered(OrderedDict[Key, Value]):
    """The last values that were set or used."""

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        while len(self) > _MOST:
            self.popitem(last=False)


class Discarded(Remembered[Any, float]):
    """By step, the bytes from before it that it had freed, as the graph of an old loss, when a count of it was thrown
    away: where others like it free none, they take more."""

    def discards(self, key: Any, peak_bytes: Sequence[float], lost_bytes: Sequence[float]) -> bool:
        """Whether to throw away a count, with these bytes of each rank; not if its step frees as much each time."""
        is_much = any(lost > 0.01 * abs(peak) for peak, lost in zip(peak_bytes, lost_bytes))
        if not is_much or sum(lost_bytes) >= self.get(key, float("inf")) / 2:
            return False
        self[key] = sum(lost_bytes)
        return True


@dataclass
class Followed(Generic[Plan]):
    """A plan of steps that have one key, and how much of the budget the next one may use."""

    plan: Plan | None = None
    share: float = 1.0
    """The share of the budget that a plan may use."""
    steps: int = 0
    """How many steps have followed the plan."""

    def follow(self, plan: Plan) -> None:
        """From now on follow ``plan``."""
        self.plan, self.steps = plan, 0

    def plan_less(self, share: float) -> None:
        """Have the next plan take less than this one."""
        self.share, self.plan = self.share * share, None

    def took_bytes(self, peak_bytes: Sequence[float], budget_bytes: Sequence[float]) -> None:
        """Note what a step of the plan took on each rank: a plan that exceeds its budget will be made again."""
        excess = max(peak / limit for peak, limit in zip(peak_bytes, budget_bytes))
        if excess > NEAR:
            self.plan_less(1 / excess)


def digest(value: object) -> str:
    """A short text that is equal for equal values, in all processes, and that others do not have."""
    return sha256(repr(value).encode()).hexdigest()[:16]
