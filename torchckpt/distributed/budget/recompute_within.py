"""``RecomputeWithin``: a schedule of torch whose steps stay within so many bytes on each rank.

What to keep where is a plan on paper, and a plan needs costs. So the first steps recompute everything, each region
inside its backward, and are measured::

    step 0: warm-up   1: bytes   2, 3: seconds   [1] the plan is made, once, by rank 0, and is the same on all ranks
    step 4, 5, ...: [2] each forward is told which of its regions are kept, and which ones R recomputes; the backward
                    recomputes the others. Weight gradients are done where the plan has them.

A plan may do a split backward as a whole one, and what either takes cannot be told from the other. So a schedule with
split backwards does whole ones in steps 0 and 1, and its own in steps 2 and 3, with R; bytes are counted in 1 and 2.

In steps that count bytes, and in the second one that follows a plan, operators are looked at.
"""
from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchckpt.distributed.ahead import SAME, RecomputeAhead
from torchckpt.distributed.budget.arguments import budget_key
from torchckpt.distributed.budget.live_bytes import LiveBytes
from torchckpt.distributed.budget.make_plan import Costs, digest_of, made
from torchckpt.distributed.budget.stage_parts import CountingScope, Parts, Seconds
from torchckpt.distributed.frames import Frames, RegionOptions
from torchckpt.distributed.meeting import all_gather, check_the_same
from torchckpt.distributed.plain_regions import has_compiled_regions, raise_without_regions
from torchckpt.distributed.private import Live
from torchckpt.distributed.record import Gathered, Record, Size, gather
from torchckpt.errors import CheckpointError, ScheduleError
from torchckpt.modules import is_compiled
from torchckpt.planning import Action, Kind, Schedule, State, Timeline, with_recompute
from torchckpt.planning.budget import Bytes
from torchckpt.planning.order.orders import Visit
from torchckpt.planning.plan import PipelinePlan
from torchckpt.planning.plan.figures import WholeStep
from torchckpt.planning.plan.run.fit_measured import Fitted
from torchckpt.planning.plan.run.gradient_sums import done_whole, summed_as_given
from torchckpt.planning.plan.run.measured import PlannedStep, with_levels
from torchckpt.planning.step.measured import Span, measured_timeline
from torchckpt.planning.step.memory import Level
from torchckpt.regions.core.frame import SavedTensors
from torchckpt.regions.core.scope import Scope
from torchckpt.regions.wrap.mixin import COMPILED
from torchckpt.tensors import tensors_in

__all__ = ["FIRST_STEPS", "RecomputeWithin"]

FIRST_STEPS = 4
"""With a budget: the steps that are measured before the plan is made."""

_COUNTED, _COUNTED_SPLIT = 1, 2
"""The steps in which bytes are counted: of whole backwards, and of split ones. Of the steps of a plan, the first of the
two."""

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
        self._is_whole = False  # split backwards are done as whole ones now
        self._fitted: Fitted | None = None
        self._steps = 0  # since the beginning, or since the plan is followed
        self._live_bytes: LiveBytes | None = None
        self._counted: dict[int, tuple[Visit, CountingScope]] = {}  # by stage
        self._parts: dict[int, Parts] = {}
        self._taken: list[tuple[Schedule, Mapping[Action, Level]]] = []  # of each counted step
        self._any_tied = False
        self._seconds = Seconds()
        self._gradient_bytes = 0.0
        self._shapes: dict[int, tuple[Any, ...]] = {}  # by stage, of a forward
        self._planned_levels: Mapping[Action, Level] = {}  # of a step of the plan, if it was counted
        self._input_shapes: tuple[Any, ...] = ()  # shapes of what the forward of a stage was called with
        self._refusal: CheckpointError | None = None
        super().__init__(live, schedule, 0, frozenset(), None, 0.0)
        self._frames = Frames(None)
        if plan is not None:
            summed = summed_as_given(plan)
            whole = plan.whole_step or WholeStep(plan.problem.budget_bytes, summed.peak_bytes)
            self._follow_plan(Fitted(summed, *whole))

    @property
    def plan(self) -> PipelinePlan | None:
        """What is followed; None before it was made. Its ``to_json()`` is what ``plan=`` takes in another run."""
        return None if self._fitted is None else self._fitted.plan

    def timeline(self) -> Timeline:
        if self._fitted is None:
            return super().timeline()
        return self._planned_timeline(self._fitted.plan, self._measured("timeline()"))[0]

    def report(self) -> PlannedStep:  # type: ignore[override]  # which says what a plan is worth
        """The plan beside its steps: how long they take, and how many bytes of each rank; ``print()`` shows a table.

        Collective: every rank of the pipeline calls it, and gets the same.

        Raises:
            ScheduleError: no step has followed a plan yet; or a rank does not call it, within half of the timeout of
                the group.
        """
        if self._fitted is None:
            raise ScheduleError(
                f"no step has followed a plan yet: it is made of the first {FIRST_STEPS}\n"
                f"  received: report() after {self._steps}\n  works:    print(schedule.report()) after step "
                f"{FIRST_STEPS + 1}"
            )
        measured = self._measured("report()")
        fitted, steps = self._fitted, tuple(map(_seconds_of, measured.spans))
        timeline, is_counted = self._planned_timeline(fitted.plan, measured)
        peaks = timeline.peak_bytes if is_counted else None
        return PlannedStep(fitted.plan, timeline, steps, fitted.budget_bytes, fitted.peak_bytes, peaks)

    def _planned_timeline(self, plan: PipelinePlan, measured: Gathered) -> tuple[Timeline, bool]:
        """The last step, and whether its memory is what a step was measured to take. Collective."""
        with self._record.device_current():
            by_rank = dict(all_gather((self.rank, self._planned_levels), self._group))
        taken = [by_rank.get(rank, {}) for rank in range(self.pp_group_size)]
        is_counted = all(taken)
        step = replace(plan.step, links=measured.step.links)
        timeline = measured_timeline(step, measured.spans[-1], in_bytes=True)
        return with_levels(timeline, taken) if is_counted else timeline, is_counted

    # what the runtime calls -----------------------------------------------------------------------------------------

    @contextmanager
    def running(self) -> Iterator[None]:
        self._live_bytes = None
        if self._refusal is not None:
            raise self._refusal
        if self.is_training:
            self._agree_in_pipeline()  # then with other pipelines of the job
            self._begin_step()
        if self.is_training and self._is_counted:
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
            return RegionOptions(False, _ALL if visit in self._early else ())
        choice = self._fitted.plan.step.choice(visit)
        return RegionOptions(frozenset(choice.kept), frozenset(choice.early))  # [2]

    def _scope(self, visit: Visit, options: RegionOptions) -> Scope:
        if self._fitted is not None:
            return Scope(options.keep, partial(self._replaying_planned, visit))
        if self._live_bytes is None or self._parts or visit[0] in self._counted:
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
        if not scope.regions and has_compiled_regions(module := self._stage_by_index[stage].submod):
            raise_without_regions(stage, module, outputs)
        leaves = tensors_in(outputs)
        seen = scope.regions, self._input_shapes, *map(_shape_of, leaves)
        expected = self._shapes.setdefault(stage, seen)
        if self._fitted is not None:
            expected = len(self._fitted.plan.problem.stages[stage].blocks), *expected[1:]
        if seen != expected:
            raise ScheduleError(
                "a micro-batch has other shapes or regions than those that the plan is for\n"
                f"  received: micro-batch {i} of stage {stage}: {_shown(seen)}; planned: {_shown(expected)}\n"
                "  works:    the same shapes in every step; for others, a schedule of their own: "
                "recompute_ahead(schedule, budget=...)"
            )

    @contextmanager
    def _replaying(self, visit: Visit, region: int, recomputed: deque[SavedTensors]) -> Iterator[None]:
        start = self._record.now()
        if self._live_bytes is not None:
            self._live_bytes.replays()
        with self._record.replaying(visit):
            yield
        if self._live_bytes is None:
            self._seconds.add(visit[0], region, start, self._record.now())
        counted = self._counted.get(visit[0])
        if counted is not None and counted[0] == visit and self._live_bytes is not None:
            counted[1].replayed(region, recomputed)

    def _replaying_planned(self, visit: Visit, region: int, recomputed: object) -> AbstractContextManager[None]:
        return self._record.replaying(visit)

    # how ------------------------------------------------------------------------------------------------------------

    @property
    def _early(self) -> frozenset[Visit]:
        """What ``R`` recomputes in the first steps: what a split backward recomputes stays until its end anyway."""
        return frozenset() if self._is_whole else self._split

    @property
    def _is_counted(self) -> bool:
        has_both = self._fitted is None and bool(self._split)
        return _COUNTED <= self._steps <= (_COUNTED_SPLIT if has_both else _COUNTED)

    def _placed(self, *_: Any) -> Schedule:
        """Of the first steps."""
        plain = self._plain_schedule
        order = done_whole(plain, self._any_tied) if self._is_whole else plain
        return with_recompute(order, dict.fromkeys(self._early, State.EARLY))

    def _begin_step(self) -> None:
        if not self._steps:
            self._agree()
        is_whole = bool(self._split) and self._steps < _COUNTED_SPLIT
        if self._fitted is None and self._is_whole != is_whole:
            self._is_whole = is_whole
            placed = self._placed()
            self.reorder(placed if is_whole else None)
            self.schedule = self.follow(placed)
            self._record.clear()
            self._seconds.forget(0)

    def _stepped(self) -> None:
        if self._live_bytes is None or not self._record.steps:  # the first on record is warm-up
            self._record.end()

    def _end_step(self) -> None:
        """A step was made."""
        if self._live_bytes is not None:
            taken = self._live_bytes.levels
            if self._fitted is None:
                self._parts |= {stage: scope.parts for stage, (_, scope) in self._counted.items()}
                self._counted.clear()
                more = self._gradient_bytes  # a step that begins without gradients makes them
                taken = {action: Level(one.highest + more, one.left + more, one.entered + more)
                         for action, one in taken.items()}
                self._taken.append((self.schedule, taken))
            else:
                self._planned_levels = taken
            self._live_bytes = None
        self._steps += 1
        if self._fitted is None and self._budget is not None and self._steps == FIRST_STEPS:
            self._plan(self._budget)

    def _plan(self, budget: Bytes) -> None:
        seconds = self._seconds.medians(self._record.reader())
        costs = Costs(self._parts, seconds, [taken for _, taken in self._taken])
        measured = gather(self.schedule, (), self.rank, self._record, self._sizes.found, None)
        orders = [order for order, _ in self._taken]
        try:
            with self._record.device_current():
                found = made(self._plain_schedule, budget, measured, orders, costs, self._any_tied, self.pairs)
                self._follow_plan(found)  # [1]
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

    def _agree(self) -> None:
        """Collective, before the first step, and before the first one of a plan."""
        key, text = self._told()
        with self._record.device_current():
            said = all_gather((key, text, self._is_tied()))
        check_the_same(SAME, *zip(*[(key, text) for key, text, _ in said]))
        self._any_tied = any(tied for *_, tied in said)
        if self._budget is None and self._fitted is not None and self._any_tied:
            self._follow_plan(replace(self._fitted, plan=summed_as_given(self._fitted.plan, tied=True)))

    def _told(self) -> tuple[str, str]:
        if self._fitted is not None:
            return (plan := f"plan {digest_of(self._fitted.plan)}"), plan
        assert self._budget is not None
        return budget_key(self._budget, len(self._plain_schedule.ranks)), f"budget={self._budget!r}"

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
