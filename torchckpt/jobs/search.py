"""Search: all layouts of a model on so many GPUs, the best of them, and why the others fell out.

Each layout has a bound that needs no simulation: the work of its slowest rank. Layouts are simulated from the lowest
bound on, until it is above the step of the last that is shown; the rest is pruned. Then layouts are planned block by
block, in the order of bounds that know the memory, until the next bound is above the best step.
"""
from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, TypeVar

from torchckpt.errors import ArgumentError, Fault, brief, called, raise_fault
from torchckpt.jobs.job import Job
from torchckpt.jobs.layout import SOFTWARE, Layout
from torchckpt.jobs.model import Model
from torchckpt.jobs.plan import JobPlan, asked, fits, fitting, least_planned, rooms, under
from torchckpt.planning.budget import Budget
from torchckpt.planning.draw.units import aligned, percent
from torchckpt.planning.rates import Machine
from torchckpt.planning.work.host import Host

__all__ = ["Outcome", "SearchResult", "search_layouts"]

_T = TypeVar("_T")

_BEST = 20
_MICRO_BATCHES = (1, 2, 4, 8)
_SCHEDULES = ("1f1b", "interleaved_1f1b", "zero_bubble", "zbv")
_CHUNKS = (2, 4)
_FREE = ("interleaved_1f1b", "looped_bfs")
"""Schedules of which as many chunks are tried."""
_RECOMPUTES = ("none", "selective", "full")
_LEAST_CONTEXT = 1024
_COLUMNS = ",tp,cp,ep,pp,dp,micro,schedule,state,recompute,step,tokens/s/GPU,MFU,peak,bubble,recomputed,away,bound"
_STAYS = ("simulated", "planned", "pruned")
_NO_ROOM = ("the state does not fit", "the activations do not fit")
_ROUNDING = 1e-9
_WORK = 2**15
"""The forwards and backwards of the layouts that are planned block by block, which takes no more than a minute."""
_BESIDE_HOST = 5
"""The best layouts that are planned beside a host: of those, bounds say little, and take long."""


class Outcome(NamedTuple):
    """What became of a layout."""

    layout: Layout
    what: str
    """``"simulated"``, ``"planned"``, ``"pruned"``, or why it fell out."""
    least_seconds: float | None = None
    """Of its step, without a simulation; None where it fell out before."""
    step_seconds: float | None = None
    peak_bytes: float | None = None

    def as_json(self) -> dict[str, object]:
        layout, what, least, step, peak = self
        return {**layout.as_json(), "outcome": what, "least": least, "step": step, "peak": peak}


@dataclass
class SearchResult:
    """What a search has found so far."""

    best: list[JobPlan] = field(default_factory=list)
    """The plans, shortest step first."""
    layouts: int = 0
    simulated: int = 0
    planned: int = 0
    """Layouts that were planned block by block beside the other policies."""
    outcomes: list[Outcome] = field(default_factory=list)
    """Of each layout that the search came to, and again of those that are faster planned block by block."""
    is_whole: bool = False
    """Whether the search came to its end."""

    def __str__(self) -> str:
        rows = [tuple(_COLUMNS.split(","))]
        rows += [self._row(place, plan) for place, plan in enumerate(self.best, 1)]
        ended = "" if self.is_whole else "; interrupted"
        return (
            f"{aligned(rows)}\n\n{self.layouts} layouts: {self.simulated} simulated, {self.planned} planned, "
            f"{self.pruned} pruned by their bound; fell out: {self.fell_out or 'none'}{ended}"
        )

    @property
    def pruned(self) -> int:
        """How many layouts have a bound above the step of the last of ``best``."""
        return sum(outcome.what == "pruned" for outcome in self.outcomes)

    @property
    def reasons(self) -> Counter[str]:
        """Why layouts fell out, and how many."""
        return Counter(outcome.what for outcome in self.outcomes if outcome.what not in _STAYS)

    @property
    def fell_out(self) -> str:
        """The reasons, most common first."""
        return ", ".join(f"{reason} {count}" for reason, count in self.reasons.most_common())

    @staticmethod
    def _row(place: int, plan: JobPlan) -> tuple[str, ...]:
        layout = plan.job.layout
        name = layout.schedule + (f" x{layout.chunks}" if layout.chunks > 1 else "")
        split = (layout.tp, layout.cp, layout.ep, layout.pp, layout.dp, layout.micro_batch)
        return (
            str(place), *map(str, split), name if layout.pp > 1 else "-", layout.state, layout.recompute,
            f"{plan.step_seconds:.4g} s", f"{plan.tokens_per_second:.0f}", percent(plan.mfu),
            f"{plan.peak_bytes / 1e9:.1f} GB", percent(plan.bubble), percent(plan.recomputed_share),
            percent(plan.away_share), f"{plan.bound_seconds:.4g} s",
        )  # fmt: skip

    def as_json(self) -> dict[str, object]:
        """All numbers, for a file."""
        return {
            "best": [plan.as_json() for plan in self.best],
            "layouts": self.layouts,
            "simulated": self.simulated,
            "planned": self.planned,
            "pruned": self.pruned,
            "reasons": dict(self.reasons),
            "whole": self.is_whole,
            "outcomes": [outcome.as_json() for outcome in self.outcomes],
        }


@called("search_layouts()")
def search_layouts(
    model: Model,
    machine: Machine,
    base: Layout,
    device_bytes: Budget | None = None,
    host: Host | None = None,
    progress: Callable[[int, int], None] | None = None,
    fixed: Collection[str] = (),
) -> SearchResult:
    """The best layouts of ``model`` on ``base.gpus`` devices, with the batch and sequence of ``base``.

    Tried are tp x cp x ep x pp x dp, micro-batches of 1 to 8, four schedules, ZeRO-1 and FSDP2, and what is recomputed:
    nothing, the attention, everything; and what the planner of pipelines chooses, of the layouts that may be best by
    it. An interrupt (``KeyboardInterrupt``) ends the search with what it has.

    Args:
        host: as of :func:`~torchckpt.jobs.plan.plan_job`; one size for all ranks.
        progress: is called with the layouts that are done, and all.
        fixed: fields of ``base`` that all layouts have, such as ``("tp", "schedule")``. Default: gpus, batch, sequence.

    Raises:
        ArgumentError: no layout divides, or none fits; the error counts the reasons. Or an argument is wrong.
    """
    if host is not None and isinstance(host.bytes, tuple):
        rule = "a search has layouts of many ranks, and a host of one size"
        raise_fault(Fault(rule, f"bytes={brief(list(host.bytes))}", 'Host("200GiB", out="25GB")'))
    names = [each.name for each in fields(Layout)]
    if isinstance(fixed, str) or not set(fixed) <= set(names):
        rule = f"what is fixed is not a list of fields of a layout: {', '.join(names)}"
        raise_fault(Fault(rule, f"fixed={brief(fixed)}", 'fixed=("tp",)'))
    layout = base if "recompute" in fixed else replace(base, recompute="planned")
    memory = asked(machine, layout, device_bytes, host)
    result = SearchResult()
    try:
        waiting = _bounded(model, machine, Space(model, base, machine.network.node_devices, fixed), memory, result)
        kept = [] if "recompute" in fixed else [each for each in waiting if each[2].layout.recompute == "none"]
        count, say = len(waiting), progress or (lambda done, of: None)
        _simulate(waiting, memory, host, result, lambda done: say(done, count + len(kept)))
        _plan_best(kept, memory, host, result, lambda done: say(count + done, count + len(kept)))
        result.is_whole = True
    except KeyboardInterrupt:
        pass
    if not result.best and result.is_whole:
        why = result.fell_out or "none is as the options say"
        works = _larger(model, machine, base, memory, fixed) or _otherwise(result, fixed)
        received = f"{model.name} on {base.gpus} {machine.device.name}: {why}"
        raise_fault(Fault("no layout fits", received, works))
    return result


def _larger(model: Model, machine: Machine, base: Layout, memory: float, fixed: Collection[str]) -> str:
    """How many GPUs would do with the ``fixed`` fields, in the first layout that is found; empty if none is."""
    least: dict[str, Any] = {"micro_batch": 1, "recompute": "full", "schedule": "1f1b"}
    for name in [*fixed, *(["schedule"] if "chunks" in fixed else [])]:  # 1F1B has no chunks
        least.pop(name, None)
    for gpus in (base.gpus << more for more in range(1, 9)):
        space = Space(model, replace(base, gpus=gpus, **least), machine.network.node_devices, {*fixed, *least})
        for layout in space.layouts():
            with suppress(ArgumentError):  # micro-batches that do not suit the schedule
                if not list(layout.faults(model)) and fits(Job(model, layout, machine), memory):
                    return f"gpus={gpus}"
    return ""


def _otherwise(result: SearchResult, fixed: Collection[str]) -> str:
    """What else would do: memory helps where something did not fit."""
    ways = ["devices with more memory"] * any(reason in _NO_ROOM for reason in result.reasons)
    if fixed:
        ways.append(f"other values of {', '.join(sorted(fixed))}")
    return ", or ".join(ways) or "another number of GPUs, or another batch"


def _bounded(
    model: Model, machine: Machine, space: Space, memory: float, result: SearchResult
) -> list[tuple[float, int, Job]]:
    """The layouts that divide and whose state fits, each with the least seconds of its step; a heap."""
    waiting: list[tuple[float, int, Job]] = []
    for layout in space.layouts():
        result.layouts += 1
        wrong = [fault.wrong for fault in layout.faults(model)]
        if layout.cp > 1 and layout.context < _LEAST_CONTEXT:
            wrong.append(f"a rank has fewer than {_LEAST_CONTEXT} tokens of a sequence")
        if wrong:
            result.outcomes.append(Outcome(layout, wrong[0]))
            continue
        job = Job(model, layout, machine)
        if min(rooms(job, memory)) < 0:
            result.outcomes.append(Outcome(layout, _NO_ROOM[0]))
            continue
        heapq.heappush(waiting, (_least_seconds(job), result.layouts, job))
    return waiting


def _least_seconds(job: Job) -> float:
    """The work of the rank that has most: no schedule makes a step shorter."""
    work = [0.0] * job.layout.pp
    for index, (stage, rank) in enumerate(zip(job.stages, job.layout.placement)):
        work[rank] += stage.forward_seconds + stage.input_grad_seconds + stage.weight_grad_seconds
        if job.layout.recompute == "full":
            work[rank] += sum(block.recompute_seconds for block in stage.blocks[: job.recomputed_layers(index)])
    return job.layout.micro_batches * max(work) + job.once_seconds


def _simulate(
    waiting: list[tuple[float, int, Job]], memory: float, host: Host | None, result: SearchResult,
    progress: Callable[[int], None]
) -> None:
    count = len(waiting)
    while waiting:
        least, _, job = heapq.heappop(waiting)
        if len(result.best) == _BEST and least > result.best[-1].step_seconds:
            result.outcomes += [Outcome(job.layout, "pruned", least) for least, _, job in [(least, 0, job), *waiting]]
            break
        progress(count - len(waiting))
        result.simulated += 1
        try:
            plan = fitting(job, memory, host)
        except ArgumentError:
            result.outcomes.append(Outcome(job.layout, "the micro-batches do not suit the schedule", least))
            continue
        if plan is None:
            result.outcomes.append(Outcome(job.layout, _NO_ROOM[1], least))
        else:
            _keep(plan, result, "simulated", least)


def _plan_best(
    jobs: list[tuple[float, int, Job]], memory: float, host: Host | None, result: SearchResult,
    progress: Callable[[int], None]
) -> None:
    """Plan the layouts that may be the best, those that keep everything with the seconds of that: from the lowest bound
    on, which is a dearer one each time, until none is below the best step. Beside a host, the best that recompute."""
    if host is None:
        waiting = [(least, place, 0, under(job, "planned")) for least, place, job in jobs]
    else:
        chosen = [plan.job for plan in result.best[: _BESIDE_HOST * bool(jobs)] if plan.recomputed_share]
        waiting = [(0.0, place, 2, under(job, "planned")) for place, job in enumerate(chosen)]
    heapq.heapify(waiting)
    left, count = _WORK, len(waiting)
    while waiting and left > 0:
        progress(count - len(waiting))
        least, place, passed, job = heapq.heappop(waiting)
        if math.isinf(least) or (result.best and least >= result.best[0].step_seconds * (1 - _ROUNDING)):
            break
        with suppress(ArgumentError):  # micro-batches that do not suit the schedule
            if passed < 2:
                bound = least_planned(job, memory, host, is_quick=passed == 0)
                heapq.heappush(waiting, (max(least, bound), place, passed + 1, job))
                continue
            result.planned += 1
            left -= 2 * job.layout.stages * job.schedule.micro_batches
            plan = fitting(job, memory, host)
            if plan is not None and not any(_is_no_longer(other, plan) for other in result.best):
                _keep(plan, result, "planned", least)


def _is_no_longer(other: JobPlan, plan: JobPlan) -> bool:
    """Whether ``other`` is of the same layout, but for what is recomputed, and its step is as short."""
    is_same = under(other.job, plan.job.layout.recompute).layout == plan.job.layout
    return is_same and other.step_seconds <= plan.step_seconds * (1 + _ROUNDING)


def _keep(plan: JobPlan, result: SearchResult, what: str, least: float) -> None:
    result.outcomes.append(Outcome(plan.job.layout, what, least, plan.step_seconds, plan.peak_bytes))
    result.best.append(plan)
    result.best.sort(key=lambda plan: plan.step_seconds)
    del result.best[_BEST:]


class Space(NamedTuple):
    """All layouts that are tried. Each field is that of ``base`` or one of some values."""

    model: Model
    base: Layout
    node: int
    fixed: Collection[str]
    """The fields that are those of ``base``."""

    def layouts(self) -> Iterator[Layout]:
        """Tensor parallel stays inside of a node."""
        base = self.base
        for tp in self._of("tp", _divisors(min(base.gpus, self.node))):
            for cp in self._of("cp", _divisors(base.gpus // tp)):
                for pp in self._of("pp", _divisors(base.gpus // (tp * cp))):
                    for dp in self._of("dp", [max(1, base.gpus // (tp * cp * pp))]):
                        for ep in self._of("ep", _divisors(tp * cp * dp) if self.model.experts else (1,)):
                            yield from self._variants(replace(base, tp=tp, cp=cp, ep=ep, pp=pp, dp=dp))

    def _variants(self, split: Layout) -> Iterator[Layout]:
        """FSDP2 is tried without a pipeline, in which it would keep what it gathers. Selective recomputation of a fused
        attention frees nothing, so it is tried with the policy of torchtitan alone."""
        rows = split.global_batch // split.dp
        micro_batches = [size for size in _MICRO_BATCHES if rows % size == 0 and rows] or [1]
        for micro_batch in self._of("micro_batch", micro_batches):
            for schedule in self._of("schedule", _SCHEDULES if split.pp > 1 else ("1f1b",)):
                for chunks in self._of("chunks", _CHUNKS if schedule in _FREE and split.pp > 1 else (1,)):
                    for state in self._of("state", ("zero1", "fsdp2") if split.pp == 1 else ("zero1",)):
                        (software,) = self._of("software", [SOFTWARE["torchtitan" if state == "fsdp2" else "megatron"]])
                        for recompute in self._of("recompute", _RECOMPUTES[:: 1 if state == "fsdp2" else 2]):
                            yield replace(
                                split, micro_batch=micro_batch, schedule=schedule, chunks=chunks, state=state,
                                software=software, recompute=recompute,
                            )  # fmt: skip

    def _of(self, field: str, values: Iterable[_T]) -> Iterable[_T]:
        return (getattr(self.base, field),) if field in self.fixed else values


def _divisors(number: int) -> Iterator[int]:
    return (divisor for divisor in range(1, number + 1) if number % divisor == 0)
