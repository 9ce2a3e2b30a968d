"""``recompute_ahead``: the recompute of a micro-batch as an action of its schedule, before its gradient arrives.

The runtime of torch posts the receive of a gradient long before it waits for it, in the backward. Between the two it
has nothing to do, and the recompute needs nothing that is still to come::

    RECV_B posted -> R: replay the frames of this stage and micro-batch -> wait for RECV_B -> B

[1] A forward runs in a scope of its own, which gathers the frames of its regions, or has them keep what they save.
[2] R replays them, the last one first. [3] The backward finds them replayed; what is not, it replays itself.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import record_function

from torchckpt.distributed.faults import (
    END,
    PREPARING,
    LeftOut,
    failure_of,
    out_of_memory,
    plain_regions_refused,
    raise_without_regions,
    warn_of_compiled_regions,
)
from torchckpt.distributed.meeting import Gathered, all_gather, check_the_same, gather, meeting, order_told, together
from torchckpt.distributed.private import Live, LiveStage, finds_shapes, handing_over, in_backward, stages_of
from torchckpt.distributed.runtime import Runtime
from torchckpt.errors import Fault, RegionError, ScheduleError, without_generators
from torchckpt.measuring.record import Record
from torchckpt.measuring.saved import CountingScope, RegionBytes
from torchckpt.modules import module_of, uncompiled
from torchckpt.planning import Action, Choice, Kind, Schedule, Stage, State, Timeline
from torchckpt.planning.order.schedule import Visit
from torchckpt.planning.step.measured import measured_timeline
from torchckpt.planning.step.quickest import quickest_of
from torchckpt.planning.step.table import Comparison, compare
from torchckpt.regions.core.frame import Frame
from torchckpt.regions.core.scope import Scope

__all__ = ["MEASURED_STEPS", "SAME", "Frames", "RecomputeAhead"]

MEASURED_STEPS = 4
"""With ``costs="measured"``: the steps before recomputes move to where the costs put them. The first is warm-up."""

SAME = "arguments"
"""What all ranks must have the same of: by them, they exchange what they measured."""


class RecomputeAhead(Runtime):
    """A schedule of torch that recomputes before gradients arrive. Made by :func:`recompute_ahead`.

    ``step()`` and ``eval()`` are those of ``torch.distributed.pipelining``. All methods are to be called on every rank
    of the pipeline.
    """

    _remedy = ""  # what a step that failed may need besides

    def __init__(
        self, live: Live, schedule: Schedule, segments: int | None, exempt: frozenset[Visit], is_measuring: bool
    ) -> None:
        self._segments, self._exempt, self._is_measuring = segments, exempt, is_measuring
        first: LiveStage = stages_of(live)[0]
        self._group: dist.ProcessGroup | None = first.group
        self._stage_by_index: dict[int, LiveStage] = {stage.stage_index: stage for stage in stages_of(live)}
        self._frames = Frames(segments)
        self._record = Record(torch.device(first.device))
        self._checked: dict[int, bool] = {}  # stages of which a forward ran: whether any has entered regions
        self._left_out = LeftOut()
        self._counting: dict[int, tuple[Visit, CountingScope]] = {}  # by stage, in this step
        self._counted: dict[int, Stage] = {}  # their bytes, of a step before
        self._last_action: str | None = None  # of a step that has not ended; PREPARING before, END after all
        self._agreed = False
        self._before: Gathered | None = None
        super().__init__(live, schedule)

    def timeline(self) -> Timeline:
        """The last step as it was measured, of all ranks, in the type of a simulated one.

        Collective: every rank of the pipeline calls it, and gets the same.

        Raises:
            ScheduleError: there was no step yet; or a rank does not call it, within half of the timeout of the group.
        """
        return _timeline(self._measured("timeline()"))

    def report(self) -> Comparison:
        """The last step beside what its own costs, simulated, make of it; ``print()`` shows a table. Collective, and
        raises ``ScheduleError``, as :meth:`timeline`."""
        measured = self._measured("report()")
        return compare(_timeline(measured), measured.step)

    # what the runtime calls -----------------------------------------------------------------------------------------

    @contextmanager
    def running(self) -> Iterator[None]:
        self._check_ranks()
        self._last_action = None
        self._record.begin()
        try:
            with handing_over(self._stage_by_index):
                yield
            self._last_action = None
            if self.is_training:
                self._counted |= {stage: scope.stage for stage, (_, scope) in self._counting.items()}
        except (RegionError, ScheduleError):
            raise  # which say what to do
        except Exception as error:
            text = out_of_memory(error)
            if text is not None:  # loops that try again look for this type
                raise torch.OutOfMemoryError(self._out_of_memory(text)) from without_generators(error)
            is_found = self._last_action == PREPARING and any(map(finds_shapes, self._stage_by_index.values()))
            rank = f"{self.rank} of {self.pp_group_size}"
            raise failure_of(error, rank, self._last_action, is_found, self._remedy) from without_generators(error)
        finally:
            self._frames.clear()
            self._counting.clear()
        if self.is_training:
            self._stepped()
        if self._is_measuring and len(self._record.steps) == MEASURED_STEPS:
            self._place_as_measured()

    def _check_ranks(self) -> None:
        """Before a step or ``eval()``, say what would have ranks wait for what others never send, or mix two steps."""
        if self._last_action is not None and self.pp_group_size > 1:
            rule = "after a failed step the other ranks would mix its micro-batches with those of the next"
            failed = f"after a failure at {self._last_action}"
            received = f"another step on rank {self.rank} of {self.pp_group_size}, {failed}"
            works = "end all processes of the job, and go on from a saved state"
            raise ScheduleError(str(Fault(rule, received, works)))
        if self.is_training and not self._agreed:
            if dist.get_world_size(self._group) > 1:
                with together("begin a step"), self._record.device_current():
                    check_the_same(SAME, all_gather(self._told(), self._group))
            self._agreed = True

    def _initialize_stages(self, *args: Any, **kwargs: Any) -> None:
        self._last_action = PREPARING
        super()._initialize_stages(*args, **kwargs)
        self._last_action = None

    def reaches(self, action: str) -> None:
        self._last_action = action
        self._record.awaits()

    def ends(self) -> None:
        self._last_action = END

    @contextmanager
    def computing(self, action: Action, outputs: list[object]) -> Iterator[None]:
        start = self._record.now()
        visit = action.stage, action.micro_batch
        if action.kind is Kind.FORWARD and self.is_training:
            with self._gathering(visit, outputs):
                yield
        else:
            if action.kind is Kind.INPUT_GRAD:
                self._left_out.look(self._stage_by_index[action.stage], action.micro_batch, self._internal_losses)
            self._frames.drop(visit)  # [3]
            yield
        self._record.ended(action, start)

    def recompute(self, action: Action) -> None:
        stage, _, micro_batch = action
        with record_function(f"torchckpt::recompute[stage={stage},mb={micro_batch}]"):
            with self._record.recomputing(action):
                self._frames.recompute((stage, micro_batch), self._stage_by_index[stage].submod)  # [2]

    # what a subclass may do otherwise -------------------------------------------------------------------------------

    def _told(self) -> tuple[str, str]:
        """A key that is equal on all ranks that will exchange the same, and its name in an error."""
        order, of_all = order_told(self.schedule, "with R")
        shown = f"segments={self._segments}, {len(self._exempt)} exempt visits, {of_all}"
        shown += ", costs='measured'" if self._is_measuring else ""
        return repr((shown, sorted(self._exempt), order)), shown

    def _stepped(self) -> None:
        self._record.end()

    def _out_of_memory(self, text: str) -> str:
        """The message about a step for which the device has too little memory, which ``text`` says."""
        return text

    def _choice(self, visit: Visit) -> Choice | State:
        return State.KEPT if visit in self._exempt else State.EARLY

    def _counts(self, visit: Visit) -> bool:
        """Whether the bytes of a visit are counted: of its stage, the first that is recomputed, or else the first."""
        stage = visit[0]
        counted_visit, _ = self._counting.get(stage, (None, None))
        is_better = counted_visit in self._exempt and visit not in self._exempt
        return stage not in self._counted and (counted_visit is None or is_better)

    def _is_new(self, storage: StorageWeakRef) -> bool:
        """Whether a storage was made in this step."""
        return True

    def _forwarded(self, visit: Visit, scope: Scope, outputs: list[object]) -> None:
        """Check a forward that has ended. Raises if its regions are not what they should be."""
        if not scope.keep and not scope.regions and not self._checked.get(visit[0]):
            raise_without_regions(visit[0], self._stage_by_index[visit[0]].submod, outputs)

    @contextmanager
    def _replaying(self, visit: Visit, region: int, frame: Frame) -> Iterator[None]:
        """A context around the replay of a region, which fills ``frame.recomputed``."""
        with self._record.replaying(visit, region):
            yield
        counted_visit, scope = self._counting.get(visit[0], (None, None))
        if scope is not None and counted_visit == visit:
            scope.saved.replayed(region, frame)

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
        self._forwarded(visit, scope, outputs)
        self._checked[stage] = self._checked.get(stage, False) or bool(scope.regions)

    def _scope(self, visit: Visit, choice: Choice | State, module: nn.Module) -> Scope:
        keep = choice.restored_by is None if isinstance(choice, State) else frozenset(choice.restored_by(None))
        around = partial(self._replaying, visit)
        if not self._counts(visit):
            return Scope(keep, around)
        scope = CountingScope(keep, around, RegionBytes([module], self._is_new))
        self._counting[visit[0]] = visit, scope
        return scope

    def _place_as_measured(self) -> None:
        self._is_measuring = False
        # All processes of the job agree: replicas of a pipeline have collectives in common.
        with together("tell each other what steps take"):
            measured = self._gathered(None)
        self.schedule = self.follow(quickest_of(measured.step, 1))
        self._record.steps.clear()
        self._before = measured  # what there is to report on until the next step

    def _measured(self, call: str) -> Gathered:
        """The measurements for this ``call`` of the user. Collective."""
        if not self._record.steps and self._before is not None:
            return self._before
        if not self._record.steps:
            works = "schedule.step(x, target=y); then print(schedule.report())"
            raise ScheduleError(str(Fault("no step has run yet", "timeline() or report() before step()", works)))
        with meeting(call, self._group, self._record.device):
            return self._gathered(self._group)

    def _gathered(self, group: dist.ProcessGroup | None) -> Gathered:
        return gather(self.schedule, self._exempt, self._segments, self.rank, self._record, self._counted, group)


def _timeline(measured: Gathered) -> Timeline:
    return measured_timeline(measured.step, measured.spans[-1], in_bytes=True)


class Frames:
    """The frames of one schedule. ``gathered()`` is a context around a forward, ``recompute()`` is the action.

    Args:
        segments: how many regions of a stage ``State.EARLY`` means, the last ones; None for all.
    """

    def __init__(self, segments: int | None) -> None:
        self._segments = segments
        self._waiting: dict[Visit, list[Frame]] = {}
        self._sharded: dict[nn.Module, list[FSDPModule]] = {}  # by the module of a stage
        self._used: dict[tuple[nn.Module, object], list[FSDPModule]] = {}  # by that, and by the module of a region

    @contextmanager
    def gathered(self, visit: Visit, scope: Scope, choice: Choice | State) -> Iterator[None]:
        """Inside the block, the regions that this thread enters belong to ``visit``, and to ``scope``."""
        with scope.entered():
            yield
        if isinstance(choice, Choice):
            early = choice.restored_by(Kind.RECOMPUTE)
            self._waiting[visit] = [frame for n, frame in zip(scope.numbers, scope.frames) if n in early]
        elif choice.restored_by is Kind.RECOMPUTE:
            late = 0 if self._segments is None else max(0, len(scope.frames) - self._segments)
            self._waiting[visit] = scope.frames[late:]

    def recompute(self, visit: Visit, module: nn.Module) -> None:
        """Replay the waiting frames, the last one first, with the ``module`` of the stage. The backward replays the
        others."""
        if module not in self._sharded:
            self._sharded[module] = [child for child in module.modules() if isinstance(child, FSDPModule)]
        frames = self._waiting.pop(visit, [])
        while frames:
            frame = frames.pop()
            if self._sharded[module]:
                self._recompute_gathered(frame, module)
            else:
                frame.recompute()

    def drop(self, visit: Visit) -> None:
        """Forget the waiting frames: their backward begins, and replays what is left."""
        self._waiting.pop(visit, None)

    def clear(self) -> None:
        self._waiting.clear()

    def _recompute_gathered(self, frame: Frame, module: nn.Module) -> None:
        """Gather the parameters of the replay, as FSDP2 does at the region's backward, and replay. The backward then
        finds the parameters gathered, and does not gather them again. Of a region of a plain function, those of all of
        the stage."""
        sharded, called = self._sharded[module], module_of(uncompiled(frame.function))
        key = module, called
        if key not in self._used:
            self._used[key] = [fsdp for fsdp in sharded if called is None or _is_in_line(fsdp, called)]
        for used in self._used[key]:
            used.unshard()
        with in_backward(sharded):
            frame.recompute()


def _is_in_line(module: Any, other: nn.Module) -> bool:
    """Whether one of the two modules is, or contains, the other."""
    return any(child is other for child in module.modules()) or any(child is module for child in other.modules())
