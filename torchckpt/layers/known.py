"""Known: the steps of one model that were counted, by their calls, and the plan of each."""
from __future__ import annotations

import math
import warnings
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch

from torchckpt.errors import BudgetInfeasible, Fault, called, raise_fault
from torchckpt.layers.count import Counter
from torchckpt.layers.plan import LayersPlan, frontier
from torchckpt.layers.took import Key, Took, of_another_size
from torchckpt.planning.budget import Budget, budget_bytes, enough, whole
from torchckpt.regions.live import allocator_of

__all__ = ["KnownStep", "KnownSteps", "Limit", "has_run_out", "measured", "ran_out"]

_CALLER = "checkpoint_layers"
_MOST = 64
"""At most so many steps are remembered."""
_LESS = 0.9
"""After the device was out of memory, the share of its budget that a plan may use."""
_NEAR = 1.01


@dataclass(frozen=True)
class Limit:
    """What a step may take: ``budget``, or what is left of the whole ``device_memory``."""

    budget: Budget | None
    device_memory: Budget | None

    def before_bytes(self, device: torch.device) -> float:
        """What is allocated on the ``device``, if that is taken off."""
        if self.device_memory is None:
            return 0.0
        allocator = allocator_of(device)
        if allocator is None:
            rule = "device_memory is given for a device that does not count what is allocated"
            with called(_CALLER):
                raise_fault(Fault(rule, str(device), 'budget="60GiB"'))
        return float(allocator.memory_allocated(device))

    def bytes(self, took: Took, before_bytes: float) -> float:
        """The bytes that the step may take."""
        if self.device_memory is not None:
            return budget_bytes(self.device_memory, 0) - before_bytes
        return budget_bytes(self.budget or "", math.ceil(took.peak_bytes(range(len(took.calls)))))

    def too_small(self, plan: LayersPlan) -> BudgetInfeasible:
        """The error for a limit that is below what ``plan`` takes, which recomputes everything."""
        least, name = plan.peak_bytes, "budget" if self.device_memory is None else "device_memory"
        given = plan.budget_bytes if self.device_memory is None else budget_bytes(self.device_memory, 0)
        error = BudgetInfeasible(
            f"the budget is too small: a step takes {enough(least)} bytes even if it recomputes every chosen layer\n"
            f"  received: {whole(max(plan.budget_bytes, 0.0))} bytes for it\n"
            f"  works:    {name}={enough(least + given - plan.budget_bytes)} or more, more layers, or smaller batches",
            least,
            plan,
        )
        error.caller = _CALLER
        return error


@dataclass
class KnownStep:
    """A step that is known, by its calls."""

    key: Key
    took: Took
    unfit: str = ""
    """Why no call may be kept, if none may be."""
    has_gradients: bool = False
    """Whether there were gradients before it when it was counted. A step that makes them takes more."""
    is_foretold: bool = False
    """Whether it was calculated from steps of two other sizes."""
    plan: LayersPlan | None = None
    before_bytes: float = 0.0
    """With a limit for the whole device, what was there when the plan was made."""
    ooms: int = 0
    """How often the device had been out of memory then."""
    share: float = 1.0
    """The share of the budget that a plan may use."""
    steps: int = 0
    """How many steps have followed the plan."""


class KnownSteps:
    """The steps of one model."""

    def __init__(self, names: tuple[str, ...], limit: Limit) -> None:
        self._names, self._limit = names, limit
        self._steps: OrderedDict[Key, KnownStep] = OrderedDict()
        self._warned: set[str] = set()

    def beginning(self, first: tuple[Any, ...], device: torch.device, has_gradients: bool) -> list[KnownStep]:
        """The steps whose first call begins with ``first``, each with a plan; no steps that take less because they had
        gradients that this one has not."""
        before_bytes = self._limit.before_bytes(device)
        fit = [step for step in self._steps.values() if has_gradients or not step.has_gradients]
        found = [step for step in fit if step.key[0][: len(first)] == first] or self._foretold(fit, first)
        for step in found:
            self._steps.move_to_end(step.key)
            if step.plan is None or before_bytes > _NEAR * step.before_bytes:
                step.before_bytes, step.ooms, step.steps = before_bytes, _ooms(device), 0
                step.plan = self._plan(step)
            step.steps += 1
        return found

    def learn(self, key: Key, counter: Counter, unfit: str, has_gradients: bool) -> bool:
        """Remember a step in which everything was recomputed. Returns whether it was not known."""
        is_new = key not in self._steps
        self._remember(KnownStep(key, counter.took(key), unfit, has_gradients))
        return is_new

    def _remember(self, step: KnownStep) -> None:
        self._steps[step.key] = step
        while len(self._steps) > _MOST:
            self._steps.popitem(last=False)

    def _foretold(self, steps: Iterable[KnownStep], first: tuple[Any, ...]) -> list[KnownStep]:
        """The step of a size of which two others were counted, if bytes are linear in it."""
        counted = [step for step in steps if not step.is_foretold]
        for one, two in combinations(reversed(counted), 2):
            is_alike = one.has_gradients == two.has_gradients
            found = of_another_size((one.key, one.took), (two.key, two.took), first) if is_alike else None
            if found:
                step = KnownStep(*found, one.unfit, one.has_gradients, is_foretold=True)
                for used in (one, two):
                    self._steps.move_to_end(used.key)
                self._remember(step)
                return [step]
        return []

    def _plan(self, step: KnownStep) -> LayersPlan:
        limit = self._limit.bytes(step.took, step.before_bytes) * step.share
        options = frontier(step.took)
        fitting = [option for option in options if option[0] <= limit]
        if step.unfit:
            fitting = fitting[:1]
            self._warn(step.unfit)
        kept = (fitting or options)[-1 if fitting else 0][2]
        plan = LayersPlan(step.took, self._names, limit, frozenset(at for at in range(len(step.key)) if kept >> at & 1))
        if not fitting and step.share == 1.0:
            raise self._limit.too_small(plan)
        return plan

    def _warn(self, unfit: str) -> None:
        if unfit not in self._warned:
            warnings.warn(f"{_CALLER}: {unfit}", stacklevel=2)
        self._warned.add(unfit)


def measured(step: KnownStep, peak_bytes: float) -> None:
    """Note the peak of a step of the plan. A plan that has exceeded its budget will be made again."""
    if step.plan is None:
        return
    step.plan = replace(step.plan, measured_peak_bytes=peak_bytes)
    if peak_bytes > _NEAR * step.plan.budget_bytes and step.plan.kept:
        step.share, step.plan = step.share * step.plan.budget_bytes / peak_bytes, None


def ran_out(steps: Iterable[KnownStep]) -> str:
    """After the device was out of memory in a step that is one of these: have their next plans take less.

    Returns:
        What to say of it.
    """
    planned = [step for step in steps if step.plan is not None and step.plan.kept]
    if not planned:
        return "the step recomputes every chosen layer\n  works:    smaller batches, or more layers"
    least = min(step.plan.budget_bytes for step in planned if step.plan)
    for step in planned:
        step.share, step.plan = step.share * _LESS, None
    warnings.warn(
        f"{_CALLER}: the device was out of memory in a planned step, so the next plan takes {_LESS:.0%} of its budget",
        stacklevel=2,
    )
    return f"a planned step takes more than the device has left\n  works:    budget={whole(least * _LESS)} or less"


def has_run_out(steps: Iterable[KnownStep], device: torch.device) -> bool:
    """Whether the device was out of memory since the plans of these were made."""
    return any(_ooms(device) > step.ooms for step in steps)


def _ooms(device: torch.device) -> int:
    """How often the device was out of memory, if it counts that."""
    allocator = allocator_of(device)
    return int(allocator.memory_stats(device).get("num_ooms", 0)) if hasattr(allocator, "memory_stats") else 0
