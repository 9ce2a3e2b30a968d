"""Known: the steps of one model that were counted, by their calls, and the plan of each."""
from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import combinations
from operator import attrgetter
from typing import NamedTuple, TypeAlias

import torch

from torchckpt.errors import BudgetInfeasible, Fault, raise_fault
from torchckpt.layers.away import best_away
from torchckpt.layers.count import Counter
from torchckpt.layers.plan import LayersPlan, Wish, chosen, kept_within
from torchckpt.layers.took import Key, Took, most_of, of_another_size
from torchckpt.measuring.link import MeasuredLink, measured_link
from torchckpt.measuring.remembered import LESS, NEAR, Followed, ModelSettings, Remembered, Shapes, digest
from torchckpt.planning.budget import Budget, budget_bytes, enough, whole
from torchckpt.regions.live import allocator_of
from torchckpt.regions.moved.copies import copies_of, goes_from
from torchckpt.regions.saved import bytes_of

__all__ = ["CALLER", "Foreseen", "KnownStep", "KnownSteps", "Limit", "Order", "measured"]

Order: TypeAlias = tuple[tuple[int, int], ...]
"""The order in which backwards reach calls: each time, how many calls there had been, and which of them is reached."""

CALLER = "checkpoint_layers"
_MOST_ORDERS = 8
"""So many orders of the backwards of one step are told apart."""
_NOTHING_GOES = "there is nothing to send to a host: what the layers save is there already"
_NOT_AGREED = "ranks communicate inside of the chosen layers, so nothing is sent to a host"


@dataclass(frozen=True)
class Limit:
    """What a step may take: ``budget``, or what is left of the whole ``device_memory``."""

    budget: Budget | None
    device_memory: Budget | None
    host: Budget | None = None
    """What may be on the host of the device."""

    def before_bytes(self, device: torch.device, settings: ModelSettings) -> float:
        """What was allocated on the ``device`` before the step that begins, if that is taken off."""
        if self.device_memory is None:
            return 0.0
        allocator = allocator_of(device)
        if allocator is None:
            rule = "device_memory is given for a device that does not count what is allocated"
            raise_fault(Fault(rule, str(device), 'budget="60GiB"'), CALLER)
        return float(allocator.memory_allocated(device) - bytes_of(settings.gathered))

    def bytes(self, most_bytes: float, before_bytes: float) -> float:
        """The bytes that a step may take, of which the largest takes ``most_bytes`` if everything is kept."""
        if self.device_memory is not None:
            return budget_bytes(self.device_memory, 0) - before_bytes
        return budget_bytes(self.budget or "", math.ceil(most_bytes))

    def too_small(self, plan: LayersPlan, rank: int | None = None, needed_bytes: float = 0.0) -> BudgetInfeasible:
        """The error for a limit that is below what ``plan`` takes, which recomputes everything.

        Args:
            needed_bytes: what other steps need.
        """
        least, name = plan.peak_bytes, "budget" if self.device_memory is None else "device_memory"
        given = plan.budget_bytes if self.device_memory is None else budget_bytes(self.device_memory, 0)
        where = "" if rank is None else f" on rank {rank}"
        rule = (
            f"the budget is too small: a step takes {enough(least)} bytes{where} even if it recomputes every chosen "
            "layer"
        )
        needed = enough(max(least, needed_bytes) + given - plan.budget_bytes)
        works = f"{name}={needed} or more, more layers, or smaller batches"
        fault = Fault(rule, f"{whole(max(plan.budget_bytes, 0.0))} bytes for it", works)
        error = BudgetInfeasible(str(fault), least, plan, rank)
        error.caller = CALLER
        return error


class Foreseen(NamedTuple):
    """A call that comes if the step is the one that is known."""

    layer: int
    shape: tuple[int, ...] | None
    """That of its first tensor."""
    is_kept: bool


@dataclass(kw_only=True)
class KnownStep(Followed[LayersPlan]):
    """A step that is known, by its calls."""

    key: Key
    tooks: dict[Order, Took]
    """What it took, by the order of its backwards."""
    unfit: str = ""
    """Why no call may be kept, if none may be."""
    has_gradients: bool = False
    """Whether there were gradients before it when it was counted. A step that makes them takes more."""
    is_foretold: bool = False
    """Whether it was calculated from steps of two other sizes."""
    limit_bytes: float = 0.0
    """What a plan may take."""
    exceeds: bool = False
    """Whether its plan takes more, although it recomputes what it can."""
    is_marked: bool = False
    """Whether each of its calls leaves a mark: a step was taken for ended before its last call."""

    @cached_property
    def took(self) -> Took:
        """The most that it took in any order of its backwards."""
        tooks = [*self.tooks.values()]
        return tooks[0] if len(tooks) == 1 else most_of(tooks, [1.0] * len(tooks))

    @cached_property
    def most_bytes(self) -> float:
        """What it takes if everything is kept."""
        return self.took.peak_bytes(range(len(self.took.calls)))

    @cached_property
    def least_bytes(self) -> float:
        """What it takes if everything is recomputed."""
        return self.took.peak_bytes(())

    @property
    def takes_more(self) -> bool:
        """Whether its plan takes more than it must, so that another one may take less."""
        plan = self.plan
        return plan is not None and bool(plan.not_recomputed) and plan.budget_bytes > self.least_bytes

    @cached_property
    def digest(self) -> str:
        """A short text that other steps do not have."""
        return digest((self.key, sorted(self.tooks)))

    def is_otherwise(self, calls: int, order: Order) -> bool:
        """Whether a step with so many calls, whose backwards came in this ``order``, takes what is not known."""
        is_known = not order or calls != len(self.key) or len(self.tooks) >= _MOST_ORDERS
        return not is_known and self.at_edges(order) not in self.tooks

    def turns_at(self, calls: int) -> bool:
        """Whether its first backward may come after so many calls."""
        return any(order[0][0] == calls for order in self.tooks if order)

    @cached_property
    def edges(self) -> set[int]:
        """The first and the last call of each call of the model: a backward reaches a mark there in every step."""
        starts = [bool(model) for model, *_ in self.key]
        return {place for place, edges in enumerate(zip(starts, [*starts[1:], True])) if any(edges)}

    def at_edges(self, order: Order) -> Order:
        """The part of ``order`` that is known of every step."""
        return tuple((calls, call) for calls, call in order if call in self.edges)

    @cached_property
    def script(self) -> list[Foreseen | None]:
        """What is foreseen of each call; None for the first and the last one of each call of the model, and for those
        that go to the host, or where others leave or come back."""
        kept = frozenset() if self.plan is None else self.plan.kept
        looked_at = self.edges.union(*(() if self.plan is None else self.plan.away))
        script: list[Foreseen | None] = []
        if self.is_marked:
            return script
        for place, (_, layer, _, shapes) in enumerate(self.key):
            shape = next((shape[:-3] for shape in shapes if isinstance(shape, tuple)), None)
            script.append(None if place in looked_at else Foreseen(layer, shape, place in kept))
        return script

    def follow(self, plan: LayersPlan) -> None:
        super().follow(plan)
        self.__dict__.pop("script", None)

    def ended_early(self, calls: int) -> bool:
        """Note that no mark waited any more after so many calls, of which no backward has reached one. Returns whether
        that is new."""
        is_new = calls < len(self.key) and not self.is_marked
        if is_new:
            self.is_marked = True
            self.__dict__.pop("script", None)
        return is_new


class KnownSteps:
    """The steps of one model, whose chosen layers have these ``names``."""

    def __init__(self, names: tuple[str, ...], limit: Limit) -> None:
        self.names, self._limit = names, limit
        self._steps: Remembered[Key, KnownStep] = Remembered()
        self._warned: set[str] = set()
        self._link: MeasuredLink | None = None
        self._device = torch.device("cpu")
        """That of the step that began last."""

    @property
    def tells_gradients(self) -> bool:
        """Whether steps that begin with gradients are known apart: they are part of the whole device's memory."""
        return self._limit.device_memory is not None

    def beginning(self, first: Shapes, device: torch.device, settings: ModelSettings) -> list[KnownStep]:
        """The steps whose first call begins with ``first``; no steps that take less because they had gradients that
        this one has not."""
        before_bytes, self._device = self._limit.before_bytes(device, settings), device
        fit = [step for step in self._steps.values() if not step.has_gradients]
        if len(fit) < len(self._steps) and settings.has_gradients:
            fit = [*self._steps.values()]
        steps = [step for step in fit if step.key[0][: len(first)] == first] or self._foretold(fit, first)
        most_bytes = max((step.most_bytes for step in self._steps.values()), default=0.0)
        most = self._limit.bytes(most_bytes, before_bytes)
        for step in steps:
            self._steps.move_to_end(step.key)
            limit_bytes = most if step.share == 1.0 else max(most * step.share, min(most, step.least_bytes))
            near = 1.0 if step.exceeds else math.inf if self._limit.device_memory is not None else NEAR
            has_more = limit_bytes > near * step.limit_bytes
            has_less = step.plan is not None and limit_bytes < min(step.limit_bytes, step.plan.peak_bytes)
            if step.plan is None or has_more or has_less:
                step.limit_bytes, step.plan = limit_bytes, None
        return steps

    def plan(
        self, steps: Sequence[KnownStep], agree: Callable[[Wish | None], frozenset[int]] | None
    ) -> frozenset[int] | None:
        """Have a plan for each of these, of which one begins. What exceeds the budget recomputes everything.

        Args:
            agree: returns the calls that all ranks keep. None: this rank decides alone.

        Returns:
            What ``agree`` has returned.

        Raises:
            BudgetInfeasible: the budget is too small for each of them.
        """
        is_clear = len(steps) == 1 and not steps[0].unfit
        agreed = None if agree is None else agree(_wish(steps[0]) if is_clear else None)
        for step in steps:
            if step.plan is None or (agreed is not None and agreed != step.plan.kept):
                step.follow(self._planned(step, agreed))
        if agreed is None:
            self.check(steps)
        return agreed

    def check(self, steps: Sequence[KnownStep]) -> None:
        """Raise a BudgetInfeasible if none of these fits, of which one is running. Ranks agree before they begin."""
        plans = [step.plan for step in steps if step.plan is not None and step.exceeds]
        if plans and len(plans) == len(steps):
            raise self._limit.too_small(max(plans, key=attrgetter("peak_bytes")), needed_bytes=self._needed_bytes)

    @property
    def _needed_bytes(self) -> float:
        """What all steps need that are known."""
        return max((step.least_bytes for step in self._steps.values()), default=0.0)

    def ran_out(self, steps: Iterable[KnownStep], is_shown: bool = True) -> str:
        """After the device was out of memory in a step that is one of these: have their next plans take less.

        Args:
            is_shown: whether an error shows what is returned.

        Returns:
            What to say of it.
        """
        planned = [step for step in steps if step.takes_more]
        others = "smaller batches, or more layers"
        if not planned:
            text = f"the step recomputes every chosen layer, or takes no more than that\n  works:    {others}"
            if not is_shown:
                self.warn(f"the device was out of memory, though {text}")
            return text
        given, least = min((step.plan.budget_bytes, step.least_bytes) for step in planned if step.plan)
        for step in planned:
            step.plan_less(LESS)
        share, needed = max(LESS, least / given), max(self._needed_bytes, least)
        works = f"budget={whole(LESS * given)} or less, but at least {enough(needed)}"
        if LESS * given < needed:
            works = f"budget={enough(needed)}, {others}" if needed < given else others
        warnings.warn(
            f"{CALLER}: the device was out of memory in a planned step, so the next plan takes {share:.0%} of its "
            f"budget\n  works:    {works}",
            stacklevel=2,
        )
        return f"a planned step takes more than the device has left\n  works:    {works}"

    def too_small(self, rank: int, wish: Wish, kept: frozenset[int]) -> BudgetInfeasible:
        """The error for the budget of ``rank``, which is too small."""
        return self._limit.too_small(LayersPlan(wish.took, self.names, wish.limit_bytes, kept), rank)

    def learn(self, key: Key, order: Order, counter: Counter, unfit: str, has_gradients: bool) -> bool:
        """Remember a step in which everything was recomputed. Returns whether it was not known in this order."""
        known = self._steps.get(key)
        if known is None or known.is_foretold or known.has_gradients > has_gradients:
            known = KnownStep(key=key, tooks={}, has_gradients=has_gradients)
        order = known.at_edges(order)
        tooks = {order: counter.took(key), **known.tooks}
        self._steps[key] = KnownStep(key=key, tooks=tooks, unfit=unfit, has_gradients=known.has_gradients)
        return order not in known.tooks

    def warn(self, unfit: str) -> None:
        """Say why no call is kept, once."""
        if unfit not in self._warned:
            warnings.warn(f"{CALLER}: {unfit}", stacklevel=2)
        self._warned.add(unfit)

    def _foretold(self, steps: Iterable[KnownStep], first: Shapes) -> list[KnownStep]:
        """The step of a size of which two others were counted, if bytes are linear in it."""
        counted = [step for step in steps if not step.is_foretold]
        for one, two in combinations(reversed(counted), 2):
            is_alike = one.has_gradients == two.has_gradients
            orders = one.tooks.keys() & two.tooks.keys() if is_alike else ()
            foretold = of_another_size((one.key, one.took), (two.key, two.took), first) if orders else None
            if foretold:
                key, tooks = foretold[0], dict.fromkeys(orders, foretold[1])
                step = replace(one, key=key, tooks=tooks, is_foretold=True, plan=None, share=1.0)
                for used in (one, two):
                    self._steps.move_to_end(used.key)
                self._steps[key] = step
                return [step]
        return []

    def _planned(self, step: KnownStep, agreed: frozenset[int] | None) -> LayersPlan:
        kept: frozenset[int] = frozenset()
        if step.unfit:
            self.warn(step.unfit)
        elif agreed is not None:
            kept = agreed
        else:
            kept = chosen([_wish(step)])
        plan = LayersPlan(step.took, self.names, step.limit_bytes, kept)
        if self._limit.host is not None and not step.unfit:
            plan = self._with_host(plan, agreed is not None)
        step.exceeds = plan.peak_bytes > step.limit_bytes and step.share == 1.0 and agreed is None
        return plan

    def _with_host(self, plan: LayersPlan, is_agreed: bool) -> LayersPlan:
        """``plan``, or a shorter step that sends calls to the host."""
        if is_agreed or not goes_from(self._device):
            self.warn(_NOT_AGREED if is_agreed else _NOTHING_GOES)
            return plan
        host_bytes = budget_bytes(self._limit.host or "", 0)
        amounts = [call.moved_bytes for call in plan.took.calls if 0 < call.moved_bytes <= host_bytes]
        if not amounts or len(plan.kept) == len(plan.took.calls):
            return plan
        if self._link is None:
            self._link = measured_link(self._device, int(max(amounts)), lambda failure: None)
        best = best_away(plan.took, self._link, host_bytes, partial(kept_within, plan.budget_bytes))
        if best is None:
            return plan
        copies_of(self._device).arena.reserve(int(sum(plan.took.calls[each.call].moved_bytes for each in best[1])))
        return replace(plan, kept=best[0], away=best[1])


def _wish(step: KnownStep) -> Wish:
    return Wish(step.digest, step.took, step.limit_bytes, step.share < 1.0)


def measured(step: KnownStep, peak_bytes: float) -> None:
    """Note the peak of a step of the plan. A plan that has exceeded its budget will be made again."""
    if step.plan is None:
        return
    step.plan = replace(step.plan, measured_peak_bytes=peak_bytes)
    if step.takes_more:
        step.took_bytes([peak_bytes], [step.plan.budget_bytes])
