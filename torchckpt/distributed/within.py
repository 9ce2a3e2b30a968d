"""``RecomputeWithin``: a schedule of torch whose steps stay within so many bytes on each rank.

What to keep where is a plan on paper, and a plan needs costs. So the first steps recompute everything, each region
inside its backward, and are measured. Steps have two phases (:mod:`torchckpt.distributed.phases`)::

    measuring   0: warm-up   1: bytes   2, 3: seconds   [1] rank 0 makes the plan, once, and all ranks follow the same
    following   4, 5, ...: [2] a plan says which regions of a forward are kept, and which ones R recomputes; the
                backward recomputes the others. Weight gradients are done where the plan has them.

A plan may do a split backward as a whole one, and what either takes cannot be told from the other. So a schedule with
split backwards does whole ones in step 1, and its own in the others, with R; bytes are counted in 1 and 2.

Operators are watched in the steps that count bytes: these, and the second one of the plan.
"""
from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from torchckpt.distributed.ahead import SAME, RecomputeAhead
from torchckpt.distributed.faults import raise_without_regions, warn_of_whole
from torchckpt.distributed.meeting import Gathered, all_gather, check_the_same, none_failed, together
from torchckpt.distributed.moving import AllMoved, Boundaries, Going
from torchckpt.distributed.phases import FIRST_STEPS, Following, Measuring
from torchckpt.distributed.private import Live, drop_handed, hooked_once
from torchckpt.errors import CheckpointError, Fault, ScheduleError, without_traceback
from torchckpt.measuring.link import MeasuredLink, measured_link
from torchckpt.measuring.live import LiveBytes
from torchckpt.measuring.record import with_seconds
from torchckpt.measuring.remembered import Settings, Shapes, Signature, shapes_of
from torchckpt.modules import is_compiled
from torchckpt.planning import Action, Choice, Kind, Schedule, State, Timeline
from torchckpt.planning.budget import Bytes
from torchckpt.planning.order.schedule import Visit
from torchckpt.planning.plan import PipelinePlan
from torchckpt.planning.plan.run.fit_measured import PlannedStep, with_levels
from torchckpt.planning.step.measured import Spans, measured_timeline
from torchckpt.regions.core.frame import Frame
from torchckpt.regions.core.scope import Scope
from torchckpt.regions.moved.copies import copies_of, goes_from
from torchckpt.regions.wrap.mixin import are_compiled
from torchckpt.tensors import gradient_bytes, tensors_in

__all__ = ["RecomputeWithin"]


class RecomputeWithin(RecomputeAhead):
    """A schedule of torch that follows a plan. Made by :func:`recompute_ahead` with ``budget`` or ``plan``.

    Args:
        plan: what is known already: the budget, or a plan.
        host: with a budget, the bytes of each rank on its host. Default: none.
    """

    _remedy = "; if its shapes have changed, new stages and their schedule, as a plan is for one shape"

    def __init__(self, live: Live, plain: Schedule, plan: Bytes | PipelinePlan, host: Bytes | None = None) -> None:
        self._phase: Measuring | Following
        self._phase = Following.of(plan) if isinstance(plan, PipelinePlan) else Measuring(plain, plan, host)
        self._steps = 0  # of this phase
        self._any_tied = False
        self._live_bytes: LiveBytes | None = None  # of a step in which bytes are counted
        self._gradient_bytes: dict[int, float] = {}  # by stage, those that were there before it
        self._input_shapes: Shapes = ()  # of what the forward of a stage was called with
        self._signatures: dict[int, Signature] = {}  # by stage
        self._settings = Settings()
        self._refusal: CheckpointError | None = None
        self._boundaries: Boundaries | None = None
        """Those of a step in which something goes to the host."""
        self._going: dict[int, Going] = {}
        """By stage, what its regions can send to the host."""
        super().__init__(live, plain, None, frozenset(), is_measuring=False)
        self._run(self._phase.order(FIRST_STEPS))
        self._is_warned = warn_of_whole(self._stage_by_index.values(), plain, stacklevel=5)

    @property
    def plan(self) -> PipelinePlan | None:
        """The plan in force; None during the measured steps. Its ``to_json()`` is what ``plan=`` takes in another run.
        """
        return self._phase.plan if isinstance(self._phase, Following) else None

    def timeline(self) -> Timeline:
        if isinstance(self._phase, Measuring) or not self._record.steps:
            return super().timeline()
        return self._planned_timeline(self._phase, self._measured("timeline()"))[0]

    def report(self) -> PlannedStep:  # type: ignore[override]  # which says what a plan is worth
        """The plan beside its steps: how long they take, and how many bytes of each rank; ``print()`` shows a table.

        Collective, as :meth:`timeline`.

        Raises:
            ScheduleError: as :meth:`timeline`; or no step has followed a plan yet.
        """
        is_measured = self._before is not None
        if isinstance(self._phase, Measuring) or (is_measured and not self._record.steps):
            rule = f"no step has followed a plan yet: it is made of the first {FIRST_STEPS}"
            received = f"report() after {FIRST_STEPS if is_measured else self._steps}"
            raise ScheduleError(str(Fault(rule, received, f"print(schedule.report()) after step {FIRST_STEPS + 1}")))
        measured = self._measured("report()")
        fitted, steps = self._phase.fitted, tuple(map(_seconds_of, measured.spans))
        timeline, is_counted = self._planned_timeline(self._phase, measured)
        peaks = timeline.peak_bytes if is_counted else None
        copied = self._copied() if fitted.plan.moves else ((), ())
        return PlannedStep(fitted.plan, timeline, steps, fitted.budget_bytes, fitted.peak_bytes, peaks, *copied)

    def _copied(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Of each rank, the seconds that it waited for copies in the last step, and its peak on the host. Collective.
        """
        copies = copies_of(self._record.device)
        with self._record.device_current():
            mine = copies.waited_seconds(), copies.arena.peak_bytes
        waited, peaks = zip(*self._told_by_ranks(mine))
        return waited, peaks

    def _told_by_ranks(self, mine: object) -> list[Any]:
        with self._record.device_current():
            by_rank = dict(all_gather((self.rank, mine), self._group))
        return [by_rank[rank] for rank in range(self.pp_group_size)]

    def _planned_timeline(self, phase: Following, measured: Gathered) -> tuple[Timeline, bool]:
        """The last step, and whether its memory is what a step was measured to take. Collective."""
        levels = self._told_by_ranks(phase.levels)
        step = replace(phase.plan.step, links=measured.step.links)
        timeline = measured_timeline(step, measured.spans[-1], in_bytes=True)
        return (with_levels(timeline, levels), True) if all(levels) else (timeline, False)

    # what the runtime calls -----------------------------------------------------------------------------------------

    @contextmanager
    def running(self) -> Iterator[None]:
        self._live_bytes = self._boundaries = None
        if self._refusal is not None:
            raise without_traceback(self._refusal)
        self._check_ranks()  # of this pipeline; then all of the job agree
        if self.is_training:
            self._begin_step()
        with self._live_bytes.entered() if self._live_bytes else nullcontext(), super().running():
            yield
        if self.is_training:
            self._end_step()

    def reaches(self, action: str) -> None:
        if self._live_bytes is not None and self._last_action is None:
            # After eval(), torch makes the buffers of messages anew, in place of those from before the step.
            drop_handed(self._stage_by_index)
            self._live_bytes.forget()
        super().reaches(action)
        if self._boundaries is not None and (begun := self._boundaries.action(action)) is not None:
            self._begins(begun)

    def _begins(self, action: Action) -> None:
        if self._live_bytes:
            self._live_bytes.reaches(action)
        if self._boundaries is not None:
            self._boundaries.begins(action)

    @contextmanager
    def computing(self, action: Action, outputs: list[object]) -> Iterator[None]:
        self._begins(action)  # if it has not begun: the second of two that torch runs as one
        stage, kind, micro_batch = action
        around: AbstractContextManager[None] = nullcontext()
        if kind is Kind.FORWARD and self.is_training:
            around = self._noting_inputs(stage)
        elif kind is Kind.WEIGHT_GRAD:  # as in a whole backward
            around = hooked_once(self._stage_by_index[stage], micro_batch)
        with around, super().computing(action, outputs):
            yield

    def recompute(self, action: Action) -> None:
        if self._live_bytes:
            self._live_bytes.reaches(action)
        super().recompute(action)

    # what a forward and a replay do otherwise -----------------------------------------------------------------------

    def _told(self) -> tuple[str, str]:
        return self._phase.told()

    def _choice(self, visit: Visit) -> Choice | State:
        return self._phase.choice(visit)  # [2]

    def _scope(self, visit: Visit, choice: Choice | State, module: nn.Module) -> Scope:
        if self._has_host and visit[0] not in self._going:
            return AllMoved()
        if isinstance(choice, Choice) and self._boundaries is not None:
            scope: Scope = self._boundaries.scope(choice, self._going[visit[0]], partial(self._replaying, visit), visit)
        else:
            scope = super()._scope(visit, choice, module)
        if self._live_bytes is not None:
            scope.ended.insert(0, self._forward_ended)  # then what happens at the boundary
        return scope

    def _forward_ended(self, region: int, outputs: object) -> None:
        if self._live_bytes is not None:
            self._live_bytes.passes(region)

    @property
    def _has_host(self) -> bool:
        is_measured = isinstance(self._phase, Measuring) and self._phase.host_bytes is not None
        return is_measured or self._boundaries is not None

    def _counts(self, visit: Visit) -> bool:
        is_counted = isinstance(self._phase, Measuring) and self._live_bytes is not None
        return is_counted and super()._counts(visit)

    def _is_new(self, storage: StorageWeakRef) -> bool:
        return self._live_bytes is None or storage in self._live_bytes

    @contextmanager
    def _noting_inputs(self, stage: int) -> Iterator[None]:
        module, self._input_shapes = self._stage_by_index[stage].submod, ()

        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._input_shapes = shapes_of(*args, **kwargs)

        hook = None if is_compiled(module) else module.register_forward_pre_hook(note, with_kwargs=True)
        with hook or nullcontext():  # a handle's context removes it
            yield

    def _forwarded(self, visit: Visit, scope: Scope, outputs: list[object]) -> None:
        stage, i = visit
        if isinstance(scope, AllMoved):
            self._going[stage] = scope.sent()
        if not scope.regions:
            raise_without_regions(stage, self._stage_by_index[stage].submod, outputs, is_planned=True)
        seen = Signature(scope.regions, self._input_shapes, shapes_of(*tensors_in(outputs)))
        expected = self._signatures.setdefault(stage, seen)
        if self.plan is not None:
            expected = expected._replace(regions=len(self.plan.problem.stages[stage].blocks))
        seen.check(expected, f"micro-batch {i} of stage {stage}", self.plan is not None)

    @contextmanager
    def _replaying(self, visit: Visit, region: int, frame: Frame) -> Iterator[None]:
        measured = frame if isinstance(self._phase, Measuring) else None
        with (
            self._live_bytes.replaying(region, measured) if self._live_bytes else nullcontext(),
            super()._replaying(visit, region, frame),
        ):
            yield

    # steps ----------------------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        if not self._is_warned:  # of a hook that was put since
            self._is_warned = warn_of_whole(self._stage_by_index.values(), self._plain_schedule, stacklevel=7)
        if not self._steps:
            self._agree()
            if self._before is None:  # this step may have other shapes than a first one that has failed
                self._signatures.clear()
                self._going.clear()
        modules = {number: stage.submod for number, stage in self._stage_by_index.items()}
        self._settings.check(modules, self._record.device.type)
        drop_handed(self._stage_by_index)
        order = self._phase.order(self._steps)
        if order is not self._order:
            self._run(order)
        if self.plan is not None and self.plan.moves:
            self._boundaries = Boundaries(self.plan, self.rank)
            copies = copies_of(self._record.device)
            copies.waits = []
            copies.arena.begin_peak()
        if self._phase.counts(self._steps):
            gc.collect()  # what is freed in the middle of the step would count as freed by it
            is_compiled = any(are_compiled(module.modules()) for module in modules.values())
            self._live_bytes = LiveBytes(self._record.device, looks=not is_compiled)
            self._gradient_bytes = gradient_bytes({number: each.parameters() for number, each in modules.items()})

    def _run(self, order: Schedule) -> None:
        self._order, self.schedule = order, self.follow(order)
        self._record.times_early_replays = isinstance(self._phase, Measuring)
        self._record.steps.clear()

    def _stepped(self) -> None:
        if self._live_bytes is None or not self._record.steps:  # the first on record is warm-up
            self._record.end()

    def _end_step(self) -> None:
        self._steps += 1
        if self._live_bytes is not None:
            self._phase.count(self.schedule, self._live_bytes.levels, self._gradient_bytes)
            self._live_bytes = None
            self._settings.counted()
        if isinstance(self._phase, Measuring) and self._steps >= FIRST_STEPS:  # again, where an interrupt has come
            try:
                self._phase, self._steps = self._planned(self._phase), 0  # [1]
            except CheckpointError as error:
                self._refusal = without_traceback(error)
                raise
            self._run(self._phase.order(0))

    def _planned(self, phase: Measuring) -> Following:
        """The phase of the plan for the budget. Collective: all processes of the job make it."""
        replays = self._record.replay_seconds()
        for stage, counted in self._counted.items():
            timed, going = with_seconds(counted, replays.get(stage, {})), self._going.get(stage)
            if going is not None:
                sent = (float(sum(each.values())) for each in going)
                moved = (replace(x, moved_bytes=min(amount, x.saved_bytes)) for x, amount in zip(timed.blocks, sent))
                timed = replace(timed, blocks=tuple(moved))
            self._counted[stage] = timed
        with together("make a plan of the measured steps"), self._record.device_current():
            measured = self._before = self._gathered(None)
            link = None if phase.host_bytes is None else self._measured_link(phase.host_bytes[self.rank])
            return phase.planned(measured, self._any_tied, self.pairs, link)

    def _measured_link(self, host_bytes: float) -> MeasuredLink:
        """The link of this rank to its host, with all ranks copying. Collective."""
        regions = (region for going in self._going.values() for region in going)
        largest = max((sum(region.values()) for region in regions), default=0)
        return measured_link(self._record.device, int(min(largest, host_bytes)), none_failed)

    def _reserve_host(self, plan: PipelinePlan) -> None:
        """Have the host memory of ``plan`` before its first step. Collective, so that no rank waits for one without."""
        failure: CheckpointError | None = None
        try:
            if goes_from(self._record.device):
                copies_of(self._record.device).arena.reserve(int(plan.host_peak_bytes[self.rank]))
        except CheckpointError as error:
            failure = without_traceback(error)
        none_failed(failure)

    def _agree(self) -> None:
        """Before the first step of a phase, all processes compare what they were given. Collective."""
        with together("begin a step"), self._record.device_current():
            processes = all_gather((self._told(), self._is_tied()))
            check_the_same(SAME, [told for told, _ in processes])
            if self.plan is not None and self.plan.moves:
                self._reserve_host(self.plan)
        self._any_tied = any(tied for _, tied in processes)
        self._phase = self._phase.agreed(self._any_tied)

    def _is_tied(self) -> bool:
        """Whether stages of this rank share parameters."""
        each = [set(stage.submod.parameters()) for stage in self._stage_by_index.values()]
        return sum(map(len, each)) > len(set().union(*each))

    def _out_of_memory(self, text: str) -> str:
        steps = "the first steps, which recompute everything, take"
        works = "fewer micro-batches in flight, or smaller ones"
        if isinstance(self._phase, Following):
            fitted = self._phase.fitted
            steps = f"a step of the plan, which has {max(fitted.peak_bytes):.0f} bytes on a rank, takes"
            less = 0.9 * min(*fitted.budget_bytes, max(fitted.peak_bytes))  # between the two: the same plan
            works = f"budget={less:.0f} or less, or {works}" if less > fitted.least_bytes else works
        return f"{text}\nrecompute_ahead: {steps} more than the device has left\n  works:    {works}"


def _seconds_of(step: Spans) -> float:
    """The seconds from the begin of the first action to the end of the last, of all ranks."""
    spans = [span for spans_of_rank in step for span in spans_of_rank]
    return max(span.end_seconds for span in spans) - min(span.start_seconds for span in spans)
