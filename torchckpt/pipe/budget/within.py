"""Within: the steps of one pipe that are known, by their shapes, and the plan of each.

[1] A step that is not known recomputes every block, and its bytes are counted. [2] So does the second one, whose times
are noted. [3] When the third begins the plan is made, which is followed from then on. [4] Of its first step the times
are noted, of its second the bytes. If it takes more than its budget, it is made again.
"""
from __future__ import annotations

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchckpt.errors import BudgetInfeasible, CheckpointError
from torchckpt.pipe.budget.blocks import Blocks
from torchckpt.pipe.budget.count import Count, Watch
from torchckpt.pipe.budget.following import Following
from torchckpt.pipe.budget.plan import fit, graph_order, placement_of, planned_order, step_order
from torchckpt.pipe.microbatch import MicroBatch
from torchckpt.pipe.partition import ChangedInputs, Stage
from torchckpt.pipe.run.step import Order
from torchckpt.planning import Action, Link, Schedule
from torchckpt.planning import Stage as Work
from torchckpt.planning.budget import Bytes, bytes_per_rank
from torchckpt.planning.plan import PipelinePlan
from torchckpt.planning.plan.run.fit_measured import Fitted, PlannedStep, with_levels
from torchckpt.planning.step.measured import Spans, measured_timeline
from torchckpt.planning.step.memory import Level
from torchckpt.planning.step.simulated import Step
from torchckpt.planning.work.choice import arrival
from torchckpt.regions.core.options import Options

__all__ = ["Within"]

_MOST = 64
"""At most so many steps are remembered."""
_NEAR = 1.01
"""A plan may exceed its budget by this factor before it is made again."""
_LESS = 0.9
"""After a device was out of memory, the share of its budget that a plan may use."""
_TRIES = 4
"""After so many steps that could not be counted, a warning says so."""


@dataclass
class _Known:
    """What is known of a step, by its shapes."""

    tries: int = 0
    saved: tuple[Work, ...] | None = None
    levels: Mapping[Action, Level] | None = None
    timed: tuple[Work, ...] = ()
    spans: Spans = ()
    share: float = 1.0
    """The share of the budget that a plan may use."""
    fitted: Fitted | None = None
    planned_spans: Spans | None = None
    """The times of a step of the plan."""
    planned_levels: Mapping[Action, Level] | None = None


class Within:
    """The budget of one pipe.

    Args:
        budget: bytes of each rank.
    """

    def __init__(self, budget: Bytes) -> None:
        self.budget = budget
        self._known: OrderedDict[Any, _Known] = OrderedDict()
        self._followed: _Known | None = None
        self._in_place: dict[tuple[int, int], ChangedInputs] = {}
        self._count: weakref.ref[Count] | None = None
        self._waiting: weakref.ref[_Mark] | None = None
        self._watch = Watch()
        weakref.finalize(self, self._watch.stop)
        self._warned: set[str] = set()

    @classmethod
    def of(cls, budget: Bytes, stages: Sequence[Stage]) -> Within:
        """The budget of a pipe of ``stages``. Raises ArgumentError if it is no budget for their devices."""
        bytes_per_rank(budget, len(set(placement_of(stages))), 1.0)
        return cls(budget)

    def __reduce__(self) -> Any:
        return Within, (self.budget,)

    @property
    def plan(self) -> PipelinePlan | None:
        return None if self._followed is None or self._followed.fitted is None else self._followed.fitted.plan

    def report(self) -> PlannedStep:
        known = self._followed
        if known is None or known.fitted is None or known.planned_spans is None or known.planned_levels is None:
            raise CheckpointError(
                "Pipe: no step has followed a plan and was counted: that is the fourth step of a shape\n"
                "  received: report() or draw() before that\n  works:    print(pipe.report()) after four steps"
            )
        fitted, spans = known.fitted, known.planned_spans
        timeline = measured_timeline(fitted.plan.step, spans, in_bytes=True)
        levels, peaks = known.planned_levels, None
        if levels:
            orders = fitted.plan.schedule.ranks
            by_rank = [{one: levels[one] for one in order if one in levels} for order in orders]
            timeline = with_levels(timeline, by_rank)
            peaks = timeline.peak_bytes
        seconds = (timeline.step_seconds,)
        return PlannedStep(fitted.plan, timeline, seconds, fitted.budget_bytes, fitted.peak_bytes, peaks)

    # steps ----------------------------------------------------------------------------------------------------------

    def step(
        self, pipe: nn.Module, stages: Sequence[Stage], batches: Sequence[MicroBatch], options: Options
    ) -> Following:
        """The regions of a ``Pipe.step``."""
        return self._begin(pipe, stages, batches, None, options)

    def stepped(self) -> None:
        """A ``Pipe.step`` has ended."""
        count = None if self._count is None else self._count()
        if count is not None:
            count.finish()

    def graph(
        self,
        pipe: nn.Module,
        stages: Sequence[Stage],
        batches: Sequence[MicroBatch],
        lookahead: int,
        options: Options,
    ) -> Following:
        """The regions of a forward for ``loss.backward()``."""
        waiting = None if self._waiting is None else self._waiting()
        if waiting is not None and not waiting.is_reached:
            self._warn("a forward begins while another waits for its backward: it recomputes all, beyond the budget")
            order = graph_order(placement_of(stages), len(batches))
            return Following(order, True, self._blocks(stages), None, None, options)
        return self._begin(pipe, stages, batches, lookahead, options)

    def returned(self, outputs: Any) -> None:
        """Note that a graph waits for its backward."""
        nodes = [leaf.grad_fn for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
        mark = _Mark()
        for node in dict.fromkeys(node for node in nodes if node is not None):
            node.register_prehook(mark)
            self._waiting = weakref.ref(mark)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """A context around a step or a forward: if a device is out of memory, the error says what to do, and the next
        plan takes less."""
        try:
            yield
        except BaseException as error:
            self._watch.stop()
            if not isinstance(error, torch.OutOfMemoryError):
                raise
            known, text = self._followed, "the first steps, which recompute everything, take"
            if known is not None and known.fitted is not None:
                known.share, known.fitted = known.share * _LESS, None
                text = f"the next plan takes {_LESS:.0%} of its budget, for a step of this one takes"
            raise torch.OutOfMemoryError(
                f"{error}\nPipe: {text} more than a device has left\n"
                f"  works:    a smaller budget than {self.budget!r}, or smaller micro-batches"
            ) from error

    def _begin(
        self,
        pipe: nn.Module,
        stages: Sequence[Stage],
        batches: Sequence[MicroBatch],
        lookahead: int | None,
        options: Options,
    ) -> Following:
        self._watch.stop()
        known = self._look_up((lookahead, _shapes(batches), _settings(pipe, stages)))
        placement, m = placement_of(stages), len(batches)
        order = step_order(placement, m) if lookahead is None else graph_order(placement, m)
        if known.fitted is None and known.saved is not None and known.spans:
            known.fitted = self._fitted(known, order, lookahead)  # [3]
        self._followed = known
        plan = None if known.fitted is None else known.fitted.plan
        order = order if plan is None else planned_order(order, plan)
        count = self._counting(known, order, stages)
        self._count = None if count is None else weakref.ref(count)
        return Following(order, lookahead is not None, self._blocks(stages), plan, count, options)

    def _blocks(self, stages: Sequence[Stage]) -> list[Blocks]:
        return [Blocks(stage, self._in_place) for stage in stages]

    def _look_up(self, key: Any) -> _Known:
        known = self._known.setdefault(key, _Known())
        self._known.move_to_end(key)
        while len(self._known) > _MOST:
            self._known.popitem(last=False)
        return known

    def _fitted(self, known: _Known, order: Order, lookahead: int | None) -> Fitted:
        assert known.saved is not None
        counted = order.schedule, known.timed, known.spans, known.levels or {}
        try:
            found = fit(*counted, self.budget, lookahead)
        except BudgetInfeasible as error:
            error.caller = "Pipe"
            raise
        if known.share == 1.0:
            return found
        less = [limit * known.share for limit in found.budget_bytes]
        while True:
            try:
                return replace(fit(*counted, less, lookahead), budget_bytes=found.budget_bytes)
            except BudgetInfeasible as error:  # then that rank recomputes everything
                less[error.rank or 0] = error.least_bytes

    def _counting(self, known: _Known, order: Order, stages: Sequence[Stage]) -> Count | None:
        """What counts a step, if it is one that is counted."""
        is_planned = known.fitted is not None
        if known.planned_levels is not None:
            return None
        counts_bytes = known.planned_spans is not None if is_planned else known.saved is None
        known.tries += 1
        if known.tries > _TRIES:
            self._warn("a backward does not reach all micro-batches, so its step cannot be counted, and has no plan")
        count = Count(self._watch, order.schedule, stages, counts_bytes, counts_blocks=counts_bytes and not is_planned)
        count.ended = partial(_learn, known, order.schedule)
        return count

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(f"Pipe: {text}", stacklevel=4)


class _Mark:
    """What a forward leaves at its outputs, until their backward."""

    is_reached = False

    def __call__(self, _: object) -> None:
        self.is_reached = True


def _learn(known: _Known, order: Schedule, count: Count) -> None:
    """Note what was counted of a step."""
    known.tries = 0
    if known.fitted is None:
        if known.saved is None:  # [1]
            known.saved, known.levels = count.saved, count.levels
        else:  # [2]
            known.timed = count.timed(known.saved)
            links = (Link(),) * (len(known.saved) - 1)
            known.spans = count.spans(Step(order, known.saved, links, arrival(order)))
        return
    if known.planned_spans is None:  # [4]
        known.planned_spans = count.spans(known.fitted.plan.step)
        return
    known.planned_levels = count.levels
    limits, peaks = known.fitted.budget_bytes, [0.0] * len(order.ranks)
    for action, level in count.levels.items():
        rank = order.placement[action.stage]
        peaks[rank] = max(peaks[rank], level.highest)
    excess = max(peak / limit for peak, limit in zip(peaks, limits))
    keeps = any(choice.kept or choice.early for choice in map(known.fitted.plan.step.choice, known.fitted.plan.choices))
    if excess > _NEAR and keeps:
        known.share, known.fitted = known.share / excess, None
        known.planned_spans = known.planned_levels = None


def _shapes(tree: Any) -> Any:
    """What the bytes of a step depend on, of its arguments."""
    return tuple(
        (*leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad) if isinstance(leaf, Tensor) else type(leaf)
        for leaf in pytree.tree_leaves(tree)
    )


def _settings(pipe: nn.Module, stages: Sequence[Stage]) -> Any:
    """What else they depend on: what is trained, the modes of all modules, autocast."""
    flags = hash((*(one.training for one in pipe.modules()), *(one.requires_grad for one in pipe.parameters())))
    kinds = sorted({stage.device.type for stage in stages})
    enabled = [kind for kind in kinds if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)]
    return flags, *((kind, torch.get_autocast_dtype(kind)) for kind in enabled)
