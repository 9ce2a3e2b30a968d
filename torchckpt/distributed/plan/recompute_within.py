"""``RecomputeWithin``: a schedule of torch whose steps stay within so many bytes on each rank.

What to keep where is a plan on paper, and a plan needs costs. So the first steps recompute everything, each region
inside its backward, and are measured::

    step 0: warm-up   1: bytes   2, 3: seconds   [1] the plan is made, once, by rank 0, and is the same on all ranks
    step 4, 5, ...: [2] each forward is told which of its regions are kept, and which ones R recomputes; the backward
                    recomputes the others. Weight gradients are done where the plan has them.

In step 1, and in the second one that follows a plan, operators are looked at, to count what is alive at once.
"""
from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchckpt.distributed.ahead import RecomputeAhead
from torchckpt.distributed.frames import Frames
from torchckpt.distributed.plan.agreement import all_gather, check_the_same, digest_of
from torchckpt.distributed.plan.live_bytes import LiveBytes
from torchckpt.distributed.plan.make_plan import Costs, made
from torchckpt.distributed.plan.stage_parts import CountingScope, Seconds
from torchckpt.distributed.private import Live
from torchckpt.distributed.record import Gathered, Record, gather
from torchckpt.distributed.region_options import RegionOptions
from torchckpt.distributed.sizes import Size
from torchckpt.errors import CheckpointError, ScheduleError
from torchckpt.kernel.module.mixin import COMPILED
from torchckpt.kernel.region.frame import SavedTensors
from torchckpt.kernel.region.scope import Scope
from torchckpt.model import Action, Kind, Link, Schedule, Timeline, arrival, with_recompute
from torchckpt.model.plan import PipelinePlan
from torchckpt.model.plan.run.fit_measured import Fitted
from torchckpt.model.plan.run.gradient_sums import summed_as_given
from torchckpt.model.plan.run.measured import PlannedStep, with_memory_of
from torchckpt.model.plan.search.replay import Level
from torchckpt.model.plan.stage.limit import Bytes
from torchckpt.model.schedule.orders import Visit
from torchckpt.model.simulation.measured import Span, measured_timeline
from torchckpt.modules import is_compiled
from torchckpt.tensors import tensors_in

__all__ = ["FIRST_STEPS", "RecomputeWithin"]

FIRST_STEPS = 4
"""With a budget: the steps that are measured before the plan is made."""

_COUNTED = 1
"""The step in which bytes are counted, and, from where a plan is followed, the step in which they are again."""

_ALL = range(sys.maxsize)
_REMEDY = "if its shapes have changed, recompute_ahead(schedule, budget=...) anew, as a plan is for one shape"


class RecomputeWithin(RecomputeAhead):
    """A schedule of torch that follows a plan. Made by :func:`recompute_ahead` with ``budget`` or ``plan``.

    Args:
        budget: None if there is a plan.
    """

    def __init__(self, live: Live, schedule: Schedule, budget: Bytes | None, plan: PipelinePlan | None) -> None:
        self._budget = budget
        kinds = [action for order in schedule.ranks for action in order]
        self._split = frozenset((stage, i) for stage, kind, i in kinds if kind is Kind.INPUT_GRAD)
        self._fitted: Fitted | None = None
        self._steps = 0  # since the beginning, or since the plan is followed
        self._live_bytes: LiveBytes | None = None
        self._counted: dict[int, tuple[Visit, CountingScope]] = {}  # by stage
        self._costs = Costs({}, {}, {})
        self._seconds = Seconds()
        self._gradient_bytes = 0.0
        self._shapes: dict[int, tuple[Any, ...]] = {}  # by stage, of a forward
        self._peak_bytes: float | None = None
        self._input_shapes: tuple[Any, ...] = ()  # shapes of what the forward of a stage was called with
        self._refusal: CheckpointError | None = None
        super().__init__(live, schedule, 0, frozenset(), None, Link())
        self._frames = Frames(None)
        if plan is not None:
            plan = summed_as_given(plan)
            limits = plan.problem.budget_bytes
            self._follow_plan(Fitted(plan, limits, plan.peak_bytes))

    @property
    def plan(self) -> PipelinePlan | None:
        """What is followed; None before it was made. Its ``to_json()`` is what ``plan=`` takes in another run."""
        return None if self._fitted is None else self._fitted.plan

    def timeline(self) -> Timeline:
        if self._fitted is None:
            return super().timeline()
        return _planned_timeline(self._fitted.plan, self._measured("timeline()"))

    def report(self) -> PlannedStep:  # type: ignore[override]  # which says what a plan is worth
        """The plan beside its steps: how long they take, and how many bytes of each rank; ``print()`` shows a table.

        Collective: every rank of the pipeline calls it, and gets the same.

        Raises:
            ScheduleError: no step has followed a plan yet; or a rank does not call it, within half of the timeout of
                the group.
        """
        if self._fitted is None:
            raise ScheduleError(
                f"a plan is made of the first {FIRST_STEPS} steps, and reported on after the next\n"
                f"  received: report() after {self._steps}\n  works:    print(schedule.report()) after step "
                f"{FIRST_STEPS + 1}"
            )
        measured = self._measured("report()")
        with self._record.device_current():
            peaks = dict(all_gather((self.rank, self._peak_bytes), self._group))
        found = [peaks.get(rank) for rank in range(self.pp_group_size)]
        counted = tuple(peak for peak in found if peak is not None)
        fitted, steps = self._fitted, tuple(_seconds_of(step) for step in measured.steps)
        is_counted = len(counted) == len(found)
        timeline = _planned_timeline(fitted.plan, measured)
        return PlannedStep(
            fitted.plan, timeline, steps, fitted.budget_bytes, fitted.peak_bytes, counted if is_counted else None
        )

    # what the runtime calls -----------------------------------------------------------------------------------------

    @contextmanager
    def running(self) -> Iterator[None]:
        self._live_bytes = None
        if self._refusal is not None:
            raise self._refusal
        if self.is_training and not self._steps:
            self._agree()
        if self.is_training and self._steps == _COUNTED:
            self._live_bytes = LiveBytes(self._record.device, looks=not self._is_compiled())
            self._gradient_bytes = self._bytes_of_gradients()
        timed, is_made = len(self._seconds), False
        try:
            with self._live_bytes.entered() if self._live_bytes else nullcontext(), super().running():
                yield
            is_made = True
        except (torch.OutOfMemoryError, ScheduleError) as error:
            if isinstance(_first_cause(error), torch.OutOfMemoryError):  # torch wraps what a forward raises
                raise torch.OutOfMemoryError(self._out_of_memory(error)) from error
            raise
        finally:
            if not is_made:  # it may be made again
                self._counted.clear()
                self._seconds.forget(timed)
        if self.is_training:
            self._end_step()

    @contextmanager
    def computing(self, action: Action, outputs: list[object]) -> Iterator[None]:
        if self._live_bytes:
            self._live_bytes.reaches(action)
        with super().computing(action, outputs):
            yield

    def recompute(self, action: Action) -> None:
        if self._live_bytes:
            self._live_bytes.reaches(action)
        super().recompute(action)

    # what each forward is told --------------------------------------------------------------------------------------

    def _region_options(self, visit: Visit) -> RegionOptions:
        if self._fitted is None:
            return RegionOptions(False, _ALL if visit in self._split else ())
        choice = self._fitted.plan.choices[visit]
        return RegionOptions(frozenset(choice.kept), frozenset(choice.early))  # [2]

    def _scope(self, visit: Visit, options: RegionOptions) -> Scope:
        if self._fitted is not None:
            return Scope(options.keep)
        if self._live_bytes is None or visit[0] in self._counted:
            return super()._scope(visit, options)
        module = self._stage_by_index[visit[0]].submod
        scope = CountingScope(module, self._live_bytes.__contains__, partial(self._replaying, visit))
        self._counted[visit[0]] = visit, scope
        return scope

    @contextmanager
    def _counting(self, visit: Visit, options: RegionOptions, scope: Scope) -> Iterator[None]:
        self._sizes.found.setdefault(visit[0], Size())
        module, self._input_shapes = self._stage_by_index[visit[0]].submod, ()
        hook = None if is_compiled(module) else module.register_forward_pre_hook(self._note_inputs, with_kwargs=True)
        try:
            with scope.counting() if isinstance(scope, CountingScope) else nullcontext():
                yield
        finally:
            if hook is not None:
                hook.remove()

    def _note_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._input_shapes = tuple(map(_shape_of, pytree.tree_leaves((args, kwargs))))

    def _forwarded(self, visit: Visit, options: RegionOptions, scope: Scope, outputs: list[object]) -> None:
        stage, i = visit
        leaves = tensors_in(outputs)
        seen = scope.regions, self._input_shapes, *map(_shape_of, leaves)
        expected = self._shapes.setdefault(stage, seen)
        if self._fitted is not None:
            expected = len(self._fitted.plan.problem.stages[stage].blocks), *expected[1:]
        if seen != expected:
            raise ScheduleError(
                "all micro-batches of a stage have the shapes and the regions that its plan is for\n"
                f"  received: micro-batch {i} of stage {stage}: {_shown(seen)}; planned: {_shown(expected)}\n"
                "  works:    the same shapes in every step; for others, a schedule of their own: "
                "recompute_ahead(schedule, budget=...)"
            )

    @contextmanager
    def _replaying(self, visit: Visit, region: int, recomputed: deque[SavedTensors]) -> Iterator[None]:
        start = self._record.now()
        if self._live_bytes is not None:
            self._live_bytes.replays()
        with self._record.replaying(visit) if visit not in self._split else nullcontext():
            yield
        if self._live_bytes is None:
            self._seconds.add(visit[0], region, start, self._record.now())
        counted = self._counted.get(visit[0])
        if counted is not None and counted[0] == visit and self._live_bytes is not None:
            counted[1].replayed(region, recomputed)

    # how ------------------------------------------------------------------------------------------------------------

    def _placed(self, *_: Any) -> Schedule:
        """Of the first steps. What a split backward recomputes stays until its end, so it may as well be early."""
        placed = with_recompute(self._plain_schedule, arrival())
        return replace(placed, late=placed.late - self._split)

    def _stepped(self) -> None:
        if self._live_bytes is None:
            self._record.end()

    def _end_step(self) -> None:
        """A step was made."""
        if self._live_bytes is not None:
            taken = self._live_bytes.levels
            if self._fitted is None:
                parts = {stage: scope.parts for stage, (_, scope) in self._counted.items()}
                more = self._gradient_bytes  # a step that begins without gradients makes them
                taken = {action: Level(one.highest + more, one.left + more, one.entered + more)
                         for action, one in taken.items()}
                self._costs = Costs(parts, {}, taken, self._is_tied())
            else:
                self._peak_bytes = max((level.highest for level in taken.values()), default=None)
            self._live_bytes = None
        self._steps += 1
        if self._fitted is None and self._steps == FIRST_STEPS:
            assert self._budget is not None
            costs = replace(self._costs, seconds=self._seconds.medians(self._record.reader()))
            measured = gather(self.schedule, self.rank, self._record, self._sizes.found, None)
            try:
                with self._record.device_current():
                    self._follow_plan(made(self._plain_schedule, self._budget, measured, costs))  # [1]
            except CheckpointError as error:
                self._refusal = error
                raise

    def _follow_plan(self, fitted: Fitted) -> None:
        self._fitted, self._steps = fitted, 0
        planned = fitted.plan.schedule
        if _forwards_and_backwards(planned) != _forwards_and_backwards(self._plain_schedule):
            self.reorder(planned)
        self.schedule = self.follow(planned)
        self._record = Record(self._record.device)
        self._counted.clear()

    def _agree(self) -> None:
        """Collective, before the first step, and before the first one of a plan."""
        digest = f"budget={self._budget!r}" if self._fitted is None else f"plan {digest_of(self._fitted.plan)}"
        with self._record.device_current():
            said = all_gather((digest, self._is_tied()))
        check_the_same("budget or plan", [text for text, _ in said])
        if self._budget is None and self._fitted is not None and any(tied for _, tied in said):
            self._follow_plan(replace(self._fitted, plan=summed_as_given(self._fitted.plan, tied=True)))

    def _is_tied(self) -> bool:
        """Whether stages of this rank share parameters."""
        each = [set(stage.submod.parameters()) for stage in self._stage_by_index.values()]
        return sum(map(len, each)) > len(set().union(*each))

    def _bytes_of_gradients(self) -> float:
        """Of those that are there."""
        parameters = {parameter for stage in self._stage_by_index.values() for parameter in stage.submod.parameters()}
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return float(sum(gradient.numel() * gradient.element_size() for gradient in gradients))

    def _is_compiled(self) -> bool:
        modules = [module for stage in self._stage_by_index.values() for module in stage.submod.modules()]
        return any(is_compiled(module) or COMPILED in module.__dict__ for module in modules)

    def _failure(self, error: Exception) -> str:
        return f"{super()._failure(error)}; {_REMEDY}"

    def _out_of_memory(self, error: BaseException) -> str:
        said = "the first steps, which recompute everything, take"
        works = "fewer micro-batches in flight, or smaller ones"
        if self._fitted is not None:
            said = f"a step of the plan, which has {max(self._fitted.peak_bytes):.0f} bytes on a rank, takes"
            works = f"budget={0.9 * min(self._fitted.budget_bytes):.0f} or less, or {works}"
        return f"{error}\nrecompute_ahead: {said} more than the device has left\n  works:    {works}"


def _planned_timeline(plan: PipelinePlan, measured: Gathered) -> Timeline:
    schedule, steps, _, links, _ = measured
    costs = [stage.costs() for stage in plan.problem.stages]
    return with_memory_of(plan, measured_timeline(schedule, steps[-1], costs, links, in_bytes=True))


def _forwards_and_backwards(schedule: Schedule) -> list[list[Action]]:
    return [[action for action in order if action.kind is not Kind.RECOMPUTE] for order in schedule.ranks]


def _first_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _seconds_of(step: Sequence[Sequence[Span]]) -> float:
    """From the begin of the first action to the end of the last, of all ranks."""
    spans = [span for own in step for span in own]
    return max(span.end_seconds for span in spans) - min(span.start_seconds for span in spans)


def _shape_of(value: object) -> Any:
    return (value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else type(value)


def _shown(seen: tuple[Any, ...]) -> str:
    regions, given, *outputs = seen
    shapes = ", ".join(f"{str(dtype).removeprefix('torch.')} {list(shape)}" for dtype, shape in outputs)
    inputs = ", ".join(f"{list(one[1])}" for one in given if isinstance(one, tuple))
    return f"{regions} regions, input {inputs or 'unknown'}, output {shapes or 'unknown'}"
