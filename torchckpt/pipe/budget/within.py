"""Within: the steps of one pipe that are known, by their shapes, and the plan of each.

[1] A step that is not known recomputes every block, and is counted. [2] When the next one of its shape begins the plan
is made, which is followed from then on. [3] The second step of a plan is counted, too. If it takes more than its
budget, the next one is as in [1], for a plan with less. [4] A count that something else disturbs before its step has
ended, such as another forward or the backward of one, is thrown away, and the next step of its shape is counted.
"""
from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from operator import gt
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchckpt.errors import BudgetInfeasible, CheckpointError, Fault, check, without_generators
from torchckpt.measuring.live import Watch
from torchckpt.measuring.remembered import LESS, NEAR, SHOWN, Discarded, Followed, ModelSettings, Remembered, shapes_of
from torchckpt.modules import faults_of_lazy
from torchckpt.pipe.budget.count import Count, Counted
from torchckpt.pipe.budget.plan import fit, graph_order, parts_of, placement_of, step_order, whole_bytes
from torchckpt.pipe.microbatch import MicroBatch
from torchckpt.pipe.partition import ChangedInputs, Stage
from torchckpt.pipe.run.step import Order, with_replays
from torchckpt.pipe.run.visit import Part, Regions, Replay
from torchckpt.planning import Action, Choice, Kind, Schedule, State
from torchckpt.planning.budget import Bytes, bytes_per_rank
from torchckpt.planning.plan import PipelinePlan
from torchckpt.planning.plan.run.fit_measured import Fitted, PlannedStep, with_levels
from torchckpt.planning.step.measured import measured_timeline
from torchckpt.regions.core.frame import Frame
from torchckpt.regions.core.options import Options
from torchckpt.regions.flags import is_checkpointing, is_recomputing
from torchckpt.regions.live import ooms_of
from torchckpt.regions.private import after_backward, keep_from_dynamo

__all__ = ["Following", "Within"]

_TRIES = 3
"""So many steps that could not be counted are no reason to worry."""
_NOT_COUNTED = (
    "a backward does not reach all micro-batches, or has that of another forward in it, so its step cannot be counted, "
    "and has no plan"
)


@dataclass(kw_only=True)
class _Known(Followed[Fitted]):
    """What is known of a step, by its shapes."""

    order: Schedule
    """Its order, without recomputes."""
    counted: Counted | None = None
    tries: int = 0
    """How many backwards one after the other were no whole step."""
    shown: tuple[Fitted, Counted] | None = None
    """The last plan of which a step was counted, and that step."""
    discarded: Discarded = field(default_factory=Discarded)
    _whole: tuple[Counted | None, float] | None = None

    @property
    def whole_bytes(self) -> float:
        """What the device that takes most takes if everything is kept; 0 if that is not known."""
        if self._whole is None or self._whole[0] is not self.counted:
            self._whole = self.counted, 0.0 if self.counted is None else whole_bytes(self.order, self.counted)
        return self._whole[1]

    def begins(self, limits: Sequence[float], lookahead: int | None) -> bool:
        """Make the plan if there is none for as much as these bytes of each rank. Returns whether the step is
        counted."""
        if self.counted is None:
            return True
        if self.plan is not None and any(map(gt, limits, (NEAR * limit for limit in self.plan.budget_bytes))):
            self.plan = None
        if self.plan is None:
            self.follow(_fitted(self.counted, limits, self.share, self.order, lookahead))
        self.steps += 1
        is_shown = self.shown is not None and self.shown[0] is self.plan
        return not is_shown and self.steps >= SHOWN

    def learn(self, counted: Counted | None) -> None:
        """Take in a step that was counted. None: it could not be."""
        if counted is None:
            self.tries += self.counted is None
            return
        self.tries = 0
        if self.discarded.discards((), counted.peak_bytes, counted.lost_bytes):
            return  # and the next one is counted
        if counted.blocks:
            self.counted = counted
        elif self.plan is not None:
            fitted = self.plan
            self.shown = fitted, counted
            if fitted.plan.recomputed_share < 1.0:
                self.took_bytes(counted.peak_bytes, fitted.budget_bytes)
                if self.plan is None:  # it took more, so the count does not show what steps take
                    self.counted = None


class Within:
    """The budget of one pipe.

    Args:
        budget: bytes of each rank.
    """

    def __init__(self, budget: Bytes) -> None:
        self.budget = budget
        self._known: Remembered[Any, _Known] = Remembered()
        self._followed: _Known | None = None
        self._in_place: dict[tuple[int, int], ChangedInputs] = {}
        self._waiting: weakref.ref[_Mark] | None = None
        self._is_in_step = False
        self._ooms: int | None = None
        """How often the devices had been out of memory when the step of a graph began; None: its backward has ended."""
        self._count: Count | None = None
        """That of the step that has begun last."""
        self._settings: ModelSettings | None = None
        self._watch = Watch()
        weakref.finalize(self, self._watch.stop)
        self._warned: set[str] = set()

    @classmethod
    def of(cls, budget: Bytes, stages: Sequence[Stage]) -> Within:
        """The budget of a pipe of ``stages``. Raises ArgumentError if it is no budget for their devices, or if a
        parameter has no shape yet."""
        layers = (layer for stage in stages for layer in stage.layers)
        parameters = ((f"{at}.{name}", x) for at, layer in layers for name, x in layer.named_parameters())
        check(faults_of_lazy(parameters, "module(*inputs), once, before Pipe(..., budget=...)"))
        bytes_per_rank(budget, len(set(placement_of(stages))), 1.0)
        return cls(budget)

    def __reduce__(self) -> Any:
        return Within, (self.budget,)

    @property
    def plan(self) -> PipelinePlan | None:
        return None if self._followed is None or self._followed.plan is None else self._followed.plan.plan

    def report(self) -> PlannedStep:
        known = self._followed
        if known is None or known.shown is None:
            rule = "Pipe: no step of a plan was counted yet: that is the third step of a shape"
            works = "print(pipe.report()) after three steps"
            raise CheckpointError(str(Fault(rule, "report() or draw() before that", works)))
        (fitted, shown), peaks = known.shown, None
        timeline = measured_timeline(fitted.plan.step, shown.spans(fitted.plan.step.program.actions), in_bytes=True)
        if all(shown.levels):
            timeline, peaks = with_levels(timeline, shown.shown), tuple(shown.peak_bytes)
        return PlannedStep(
            fitted.plan, timeline, (timeline.step_seconds,), fitted.budget_bytes, fitted.peak_bytes, peaks
        )

    # steps ----------------------------------------------------------------------------------------------------------

    def regions(
        self,
        pipe: nn.Module,
        stages: Sequence[Stage],
        batches: Sequence[MicroBatch],
        lookahead: int | None,
        options: Options,
    ) -> Following:
        """The regions of a step on these micro-batches.

        Args:
            lookahead: that of the graph of ``loss.backward()``; None: the step is a ``Pipe.step``.
        """
        placement, in_graph = placement_of(stages), lookahead is not None
        order = (graph_order if in_graph else step_order)(placement, len(batches))
        blocks, plan, count = [parts_of(stage, self._in_place) for stage in stages], None, None
        waiting = None if self._waiting is None else self._waiting()
        self._look_back(stages)
        is_second = self._is_in_step or (waiting is not None and not waiting.is_reached)
        self._is_in_step |= not in_graph
        is_inside = is_checkpointing() or is_recomputing()  # a plan might come between a forward and its replay
        if is_second or is_inside:
            what = "is inside of a region" if is_inside else "begins while another waits for its backward"
            self._warn(f"a forward {what}: it recomputes all, beyond the budget")
            return Following(order, in_graph, blocks, plan, count, options)
        self._ooms = _ooms_of(stages) if in_graph else None
        key = lookahead, shapes_of(batches), self._now(pipe, stages)
        known = self._followed = self._known.setdefault(key, _Known(order=order.schedule))
        self._known.move_to_end(key)
        ranks = len(order.schedule.ranks)
        try:
            is_counted = known.begins(self._limits(ranks, lookahead), lookahead)
        except BudgetInfeasible as error:
            raise self._largest(error, ranks) from None
        if known.plan is not None:
            plan = known.plan.plan
            order = Order(plan.schedule, with_replays(order.launched, plan.schedule))
        if known.tries >= _TRIES:
            self._warn(_NOT_COUNTED)
        if is_counted:
            given = self._watch, order.schedule, stages, list(batches), plan is None, in_graph
            count = self._count = Count(*given, known.learn)
        return Following(order, in_graph, blocks, plan, count, options)

    def _limits(self, ranks: int, lookahead: int | None) -> tuple[float, ...]:
        """The bytes of each rank. A share is one of the largest step that is known of those with this ``lookahead``."""
        alike = (known for (of, *_), known in self._known.items() if of == lookahead)
        return bytes_per_rank(self.budget, ranks, max((known.whole_bytes for known in alike), default=0.0))

    def _largest(self, error: BudgetInfeasible, ranks: int) -> BudgetInfeasible:
        """Of the errors of all steps that are known, the one with the most bytes: a budget of so many is enough."""
        for (lookahead, *_), known in self._known.items():
            if known.counted is not None and known.plan is None:
                try:
                    fit(known.order, known.counted, self._limits(ranks, lookahead), lookahead)
                except BudgetInfeasible as other:
                    error = max(error, other, key=lambda one: one.least_bytes)
        return error

    def _look_back(self, stages: Sequence[Stage]) -> None:
        """If the step of a graph has failed as a device was out of memory, have its next plan take less."""
        known = self._followed
        if self._ooms is None or _ooms_of(stages) <= self._ooms:
            return
        self._ooms = None
        if known is not None and known.plan is not None:
            known.plan_less(LESS)
            text = f"a device was out of memory in a planned step, so the next plan takes {LESS:.0%} of its budget"
            warnings.warn(f"Pipe: {text}", stacklevel=5)

    def ended(self) -> None:
        """Note that the backward of a graph has ended."""
        self._ooms = None

    def returned(self, outputs: Any) -> None:
        """Note that a graph waits for its backward."""
        nodes = [leaf.grad_fn for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
        mark = _Mark(self, self._count)
        for node in dict.fromkeys(node for node in nodes if node is not None):
            node.register_prehook(mark)
            self._waiting = weakref.ref(mark)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """A context around a step or a forward: if a device is out of memory, the error says what to do, and the next
        plan takes less."""
        self._stop()  # also of a step that has ended: from inside of a backward the watch cannot be left
        try:
            yield
        except BaseException as error:
            self._stop()
            self._ooms = None
            if not isinstance(error, torch.OutOfMemoryError):
                raise
            known, steps = self._followed, "the first step of a shape, which recomputes everything, takes"
            if known is not None and known.plan is not None:
                known.plan_less(LESS)
                steps = f"the next plan takes {LESS:.0%} of its budget, as a step of this one takes"
            raise torch.OutOfMemoryError(
                f"{error}\nPipe: {steps} more than a device has left\n"
                f"  works:    less than budget={self.budget!r}, or smaller micro-batches"
            ) from without_generators(error)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A context around a ``Pipe.step``, inside of all other contexts: after it nothing is watched."""
        try:
            yield
        finally:
            self._stop()
            self._is_in_step, self._waiting = False, None

    def reached(self, count: Count | None) -> None:
        """Note that a backward begins: that of the forward that ``count`` counts."""
        if torch.is_grad_enabled():  # what a replay saves is held as long as the graph of its gradients
            self._warn("a backward makes a graph (create_graph=True): what that holds is beyond the budget")
        if self._count is not None and self._count is not count:
            self._count.disturbed()  # [4]

    def _stop(self) -> None:
        """Count no further, and watch nothing."""
        count, self._count = self._count, None
        if count is not None:
            count.cut()  # [4]
        self._watch.stop()

    def _now(self, pipe: nn.Module, stages: Sequence[Stage]) -> Any:
        """What else the bytes of a step depend on."""
        if self._settings is None:
            self._settings = ModelSettings(pipe)
        kinds = sorted({stage.device.type for stage in stages})
        return self._settings.now(*kinds), *((stage.device, len(stage.layers)) for stage in stages)

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(f"Pipe: {text}", stacklevel=5)


class _Mark:
    """What a forward leaves at its outputs, until their backward."""

    def __init__(self, within: Within, count: Count | None) -> None:
        self._within, self._count, self.is_reached = within, count, False

    def __call__(self, _: object) -> None:
        self.is_reached = True
        self._within.reached(self._count)
        if not torch.compiler.is_dynamo_compiling():  # for compiled autograd
            after_backward(self._within.ended)


keep_from_dynamo(_Mark.__call__, Within.ended)


def _ooms_of(stages: Sequence[Stage]) -> int:
    return sum(map(ooms_of, {stage.device for stage in stages}))


def _fitted(counted: Counted, limits: Sequence[float], share: float, order: Schedule, lookahead: int | None) -> Fitted:
    whole = fit(order, counted, limits, lookahead)
    if share == 1.0:
        return whole
    less = [limit * share for limit in whole.budget_bytes]
    while True:
        try:
            return replace(fit(order, counted, less, lookahead), budget_bytes=whole.budget_bytes)
        except BudgetInfeasible as error:  # then that rank recomputes everything
            less[error.rank or 0] = error.least_bytes


# one step -------------------------------------------------------------------------------------------------------------


class Following(Regions):
    """The regions of one step.

    Args:
        order: what ``Pipe.step`` runs; the graph of ``loss.backward()`` has its own.
        in_graph: whether recomputes are nodes of the graph.
        blocks: of each stage, each as a stage of its own.
        plan: None: every block is recomputed in its backward.
        count: what counts the step; None: nothing does.
    """

    def __init__(
        self,
        order: Order,
        in_graph: bool,
        blocks: Sequence[Sequence[Stage]],
        plan: PipelinePlan | None,
        count: Count | None,
        options: Options,
    ) -> None:
        super().__init__(lambda j, i: True, options)
        self.order, self.count = order, count
        self._in_graph, self._blocks, self._plan = in_graph, blocks, plan

    def parts(self, stage: Stage, i: int) -> tuple[list[Part], Replay | None]:
        blocks, visit = self._blocks[stage.number], (stage.number, i)
        choice = Choice.all(State.LATE, len(blocks)) if self._plan is None else self._plan.step.choice(visit)
        frames = [self._frame(stage.number, i, n) if n in choice.recomputed else None for n in range(len(blocks))]
        early = [frame for n, frame in enumerate(frames) if frame is not None and n in choice.early]
        action = Action(stage.number, Kind.RECOMPUTE, i)
        around = partial(self.acting, action) if self._in_graph else nullcontext
        return list(map(Part, blocks, frames)), _Early(early, around) if early else None

    def acting(self, action: Action) -> AbstractContextManager[None]:
        return nullcontext() if self.count is None else self.count.acting(action)

    def forwarded(self, j: int, i: int, arrived: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        if self.count is not None:
            self.count.forwarded((j, i), arrived, outputs)

    def finish(self) -> None:
        if self.count is not None:
            self.count.finish()

    def _frame(self, j: int, i: int, block: int) -> Frame:
        return Frame(self._options) if self.count is None else self.count.frame((j, i), block, self._options)


class _Early:
    """The regions of a visit that an R replays, the last one first."""

    def __init__(self, frames: list[Frame], around: Callable[[], AbstractContextManager[None]]) -> None:
        self._frames, self._around = frames, around

    def recompute(self) -> None:
        with self._around():
            while self._frames:
                self._frames.pop().recompute()
