"""``recompute_ahead``: the recompute of a micro-batch as an action of its schedule, before its gradient arrives.

The runtime of torch posts the receive of a gradient long before it waits for it, in the backward. Between the two it
has nothing to do, and the recompute needs nothing that is still to come::

    RECV_B posted -> R: replay the frames of this stage and micro-batch -> wait for RECV_B -> B

[1] A forward runs in a scope of its own, which gathers the frames of its regions, or has them keep what they save.
[2] R replays them, the last one first. [3] The backward finds them replayed; what is not, it replays itself.
"""
from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import record_function

from torchckpt.distributed.counting import CountingScope
from torchckpt.distributed.frames import Frames
from torchckpt.distributed.meeting import agree, meeting
from torchckpt.distributed.plain_regions import plain_regions_refused, raise_without_regions, warn_of_compiled_regions
from torchckpt.distributed.private import Live, LiveStage, Runtime, finds_shapes, stages_of
from torchckpt.distributed.record import Gathered, Record, gather
from torchckpt.errors import RegionError, ScheduleError
from torchckpt.planning import (
    Action,
    Choice,
    Kind,
    Schedule,
    Stage,
    State,
    Timeline,
    ahead,
    exempt,
    quickest,
    with_recompute,
)
from torchckpt.planning.order.schedule import Visit
from torchckpt.planning.step.measured import measured_timeline
from torchckpt.planning.step.quickest import quickest_of
from torchckpt.planning.step.table import Comparison, compare
from torchckpt.planning.work.block import Links, Stages
from torchckpt.regions.core.frame import SavedTensors
from torchckpt.regions.core.scope import Scope

__all__ = ["GIVEN_SHAPES", "MEASURED_STEPS", "SAME", "RecomputeAhead", "first_cause"]

MEASURED_STEPS = 4
"""With ``costs="measured"``: the steps before recomputes move to where the costs put them. The first is warm-up."""

GIVEN_SHAPES = "PipelineStage(module, index, stages, device, input_args=example, output_args=example)"

SAME = "budget or plan"
"""What all ranks must have the same of: with it, they exchange what they measured."""

_LINES, _LINE = 8, 240  # of the reason that a failed step quotes, and of each line of it
_ACTION = re.compile(r"(\d+)([A-Z_]+)(\d*)")
_WORDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward (inputs)",
    "W": "backward (weights)",
    "R": "recompute",
    "SEND_F": "send of the activation",
    "RECV_F": "receive of the activation",
    "SEND_B": "send of the gradient",
    "RECV_B": "receive of the gradient",
    "UNSHARD": "gathering of parameters",
    "RESHARD": "release of gathered parameters",
    "REDUCE_GRAD": "reduction of gradients",
    "WAIT_SEND_F": "wait for the end of the send of the activation",
    "WAIT_SEND_B": "wait for the end of the send of the gradient",
    "WAIT_REDUCE_GRAD": "wait for the end of the reduction of gradients",
}


class RecomputeAhead(Runtime):
    """A schedule of torch that recomputes before gradients arrive. Made by :func:`recompute_ahead`.

    ``step()`` and ``eval()`` are those of ``torch.distributed.pipelining``. All methods are to be called on every rank
    of the pipeline.
    """

    def __init__(
        self,
        live: Live,
        plain: Schedule,
        segments: int | None,
        exempt: frozenset[Visit],
        costs: Stages | str | None,
        link: Links,
    ) -> None:
        self._plain_schedule = plain
        self._segments, self._exempt = segments, exempt
        self._is_measuring = costs == "measured"
        first: LiveStage = stages_of(live)[0]
        self._group: dist.ProcessGroup | None = first.group
        self._stage_by_index: dict[int, LiveStage] = {stage.stage_index: stage for stage in stages_of(live)}
        self._frames = Frames(segments)
        self._record = Record(torch.device(first.device))
        self._checked: set[int] = set()  # stages of which a forward ran
        self._counting: dict[int, tuple[Visit, CountingScope]] = {}  # by stage, in this step
        self._counted: dict[int, Stage] = {}  # their bytes, of a step before
        self._last_action: str | None = None
        self._agreed = False
        self._before: Gathered | None = None
        super().__init__(live, self._placed(None if isinstance(costs, str) else costs, link))

    def timeline(self) -> Timeline:
        """The last step as it was measured, of all ranks, in the type of a simulated one.

        Collective: every rank of the pipeline calls it, and gets the same.

        Raises:
            ScheduleError: there was no step yet; or a rank does not call it, within half of the timeout of the group.
        """
        return _timeline(self._measured("timeline()"))

    def report(self) -> Comparison:
        """The last step beside what its own costs, simulated, make of it; ``print()`` shows a table.

        Collective: every rank of the pipeline calls it, and gets the same.

        Raises:
            ScheduleError: there was no step yet; or a rank does not call it, within half of the timeout of the group.
        """
        measured = self._measured("report()")
        return compare(_timeline(measured), measured.step)

    # what the runtime calls -----------------------------------------------------------------------------------------

    @contextmanager
    def running(self) -> Iterator[None]:
        if self.is_training:
            self._agree_in_pipeline()
        self._last_action = None
        self._record.begin()
        try:
            yield
            if self.is_training:
                self._counted |= {stage: scope.stage for stage, (_, scope) in self._counting.items()}
        except (RegionError, ScheduleError, torch.OutOfMemoryError):
            raise  # the ones say what to do, and loops that try again look for the last
        except Exception as error:
            raise ScheduleError(self._failure(error)) from error
        finally:
            self._frames.clear()
            self._counting.clear()
        if self.is_training:
            self._stepped()
        if self._is_measuring and self._record.steps == MEASURED_STEPS:
            self._place_as_measured()

    def reaches(self, action: str) -> None:
        self._last_action = action
        self._record.due()

    @contextmanager
    def computing(self, action: Action, outputs: list[object]) -> Iterator[None]:
        start = self._record.now()
        visit = action.stage, action.micro_batch
        if action.kind is Kind.FORWARD and self.is_training:
            with self._gathering(visit, outputs):
                yield
        else:
            self._frames.drop(visit)  # [3]
            yield
        self._record.ended(action, start)

    def recompute(self, action: Action) -> None:
        stage, _, micro_batch = action
        with record_function(f"torchckpt::recompute[stage={stage},mb={micro_batch}]"):
            with self._record.recomputing(action):
                self._frames.recompute((stage, micro_batch), self._stage_by_index[stage].submod)  # [2]

    def _agree_in_pipeline(self) -> None:
        """Before the first step, a rank that would wait for what others never send says so instead."""
        if self._agreed:
            return
        with self._record.device_current():
            agree(SAME, *self._told(), self._group)
        self._agreed = True

    # what a subclass may do otherwise -------------------------------------------------------------------------------

    def _told(self) -> tuple[str, str]:
        """A key that is equal on all ranks that will exchange the same, and its name in an error."""
        text = "costs='measured'" if self._is_measuring else "neither"
        return text, text

    def _stepped(self) -> None:
        """Note that a step was made."""
        self._record.end()

    def _choice(self, visit: Visit) -> Choice | State:
        """What becomes of the regions of a visit."""
        return State.KEPT if visit in self._exempt else State.EARLY

    def _counts(self, visit: Visit) -> bool:
        """Whether the bytes of a visit are counted: of its stage, the first that is recomputed, or else the first."""
        stage = visit[0]
        counted_visit, _ = self._counting.get(stage, (None, None))
        is_better = counted_visit in self._exempt and visit not in self._exempt
        return stage not in self._counted and (counted_visit is None or is_better)

    def _is_new(self, storage: StorageWeakRef) -> bool:
        """Whether the bytes of a storage are those of a step."""
        return True

    def _forwarded(self, visit: Visit, scope: Scope, outputs: list[object]) -> None:
        """Check a forward that has ended. Raises if its regions are not what they should be."""
        if not scope.keep and not scope.regions:
            raise_without_regions(visit[0], self._stage_by_index[visit[0]].submod, outputs)

    @contextmanager
    def _replaying(self, visit: Visit, region: int, recomputed: deque[SavedTensors]) -> Iterator[None]:
        """A context around the replay of a region, which fills ``recomputed``."""
        with self._record.replaying(visit, region):
            yield
        counted_visit, scope = self._counting.get(visit[0], (None, None))
        if scope is not None and counted_visit == visit:
            scope.replayed(region, recomputed)

    # how ------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _gathering(self, visit: Visit, outputs: list[object]) -> Iterator[None]:
        stage, choice = visit[0], self._choice(visit)
        module, is_first = self._stage_by_index[stage].submod, stage not in self._checked
        scope = self._scope(visit, choice, module)
        with ExitStack() as stack:
            if is_first:
                stack.enter_context(plain_regions_refused(stage, module))
            stack.enter_context(self._frames.gathered(visit, scope, choice))  # [1]
            yield
        if is_first and scope.frames:
            warn_of_compiled_regions(stage, module)
        self._checked.add(stage)
        self._forwarded(visit, scope, outputs)

    def _scope(self, visit: Visit, choice: Choice | State, module: nn.Module) -> Scope:
        keep = choice.restored_by is None if isinstance(choice, State) else frozenset(choice.restored_by(None))
        around = partial(self._replaying, visit)
        if not self._counts(visit):
            return Scope(keep, around)
        scope = CountingScope(keep, around, module, self._is_new)
        self._counting[visit[0]] = visit, scope
        return scope

    def _placed(self, costs: Stages | None, link: Links) -> Schedule:
        plain = self._plain_schedule
        if self._segments == 0:
            return plain
        choices = exempt(plain, ahead(plain), *self._exempt)
        return with_recompute(plain, choices) if costs is None else quickest(plain, choices, costs, link)

    def _place_as_measured(self) -> None:
        self._is_measuring = False
        # All processes of the job agree: replicas of a pipeline have collectives in common.
        measured = self._gathered(None)
        self.schedule = self.follow(quickest_of(measured.step, 1))
        self._record.clear()
        self._before = measured  # what there is to report on until the next step

    def _measured(self, call: str) -> Gathered:
        """The measurements for this ``call`` of the user. Collective."""
        if not self._record.steps and self._before is not None:
            return self._before
        if not self._record.steps:
            raise ScheduleError(
                "no step has run yet\n  received: timeline() or report() before step()\n"
                "  works:    schedule.step(x, target=y); then print(schedule.report())"
            )
        with meeting(call, self._group, self._record.device):
            return self._gathered(self._group)

    def _gathered(self, group: dist.ProcessGroup | None) -> Gathered:
        own = self.rank, self._record, self._counted
        return gather(self.schedule, self._exempt, self._segments, *own, group)

    def _failure(self, error: Exception) -> str:
        match = _ACTION.match(self._last_action or "")
        where, more = "preparing its stages, before the first action", ""
        if self._last_action is None and any(map(finds_shapes, self._stage_by_index.values())):
            more = f"; torch runs later stages on uninitialised memory to find their shapes, unless {GIVEN_SHAPES}"
        if self._last_action is not None and match is not None:
            stage, kind, micro_batch = match.groups()
            of_stage = f", micro-batch {micro_batch}" if micro_batch else ""
            where = f"stage {stage}{of_stage}, {_WORDS.get(kind, kind)} ({self._last_action})"
        first = first_cause(error)
        return (
            f"a step of the pipeline failed on rank {self.rank} of {self.pp_group_size}: {where}\n"
            f"  received: {type(first).__name__}: {_said(first)}\n"
            "  works:    the step without that error; if it is one of communication, another rank failed before, and "
            f"says at what itself{more}"
        )


def first_cause(error: BaseException) -> BaseException:
    """The error that a stage raised, which torch wraps."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _said(error: BaseException) -> str:
    """The first lines of its message, those behind the first indented; of all of them, ranks would print pages."""
    lines = [line.rstrip()[:_LINE] for line in str(error).strip().splitlines() if line.strip()]
    more = [f"({len(lines) - _LINES} more lines in __cause__)"] if len(lines) > _LINES else []
    return "\n              ".join([*lines[:_LINES], *more])


def _timeline(measured: Gathered) -> Timeline:
    return measured_timeline(measured.step, measured.spans[-1], in_bytes=True)
