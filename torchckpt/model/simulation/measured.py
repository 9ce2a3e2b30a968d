"""Measured: what a real step took, in the types of a simulated one."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median
from typing import TypeAlias

from torchckpt.errors import Fault, raise_faults
from torchckpt.model.draw.units import Units, units_of_bytes, units_of_clock
from torchckpt.model.figures import Event, Message
from torchckpt.model.schedule.action import Action, Kind
from torchckpt.model.schedule.costs import Link, StageCosts
from torchckpt.model.schedule.orders import Visit
from torchckpt.model.schedule.program import recomputed_keys, travel_seconds
from torchckpt.model.schedule.run import Run
from torchckpt.model.schedule.schedule import Schedule, Segments
from torchckpt.model.simulation.memory import curves
from torchckpt.model.simulation.timeline import Timeline

__all__ = ["Span", "Step", "measured_costs", "measured_timeline", "replays_apart"]

_BACKWARDS = (Kind.BACKWARD, Kind.INPUT_GRAD)


@dataclass(frozen=True)
class Span:
    """One action of one rank. From ``due_seconds`` on the rank had nothing else to do, at ``start_seconds`` the input
    was there. All ranks count from the same moment."""

    action: Action
    due_seconds: float
    start_seconds: float
    end_seconds: float


Step: TypeAlias = Sequence[Sequence[Span]]
"""Per rank its spans, in the order of the schedule."""

_Seconds: TypeAlias = "defaultdict[tuple[int, Kind, bool], list[float]]"
"""Per stage and kind, and by whether the micro-batch is recomputed, what each span took."""

_Travels: TypeAlias = "defaultdict[tuple[int, bool], list[float]]"
"""Per pair of stages, and by whether a rank was waiting when it was sent, what each message took, at most."""


def replays_apart(spans: Iterable[Span], inside: Mapping[Visit, float]) -> list[Span]:
    """``spans`` with an ``R``, as long as all that was replayed inside a backward, where that backward began.

    A backward that recomputes region by region goes to and fro between the two; here its replays stand together.

    Args:
        inside: seconds of each (stage, micro-batch) that was replayed so. An ``R`` that it has already did nothing.
    """
    found = []
    for span in spans:
        stage, kind, i = span.action
        if kind in _BACKWARDS and (stage, i) in inside:
            turn = min(span.start_seconds + inside[stage, i], span.end_seconds)
            found += [replace(span, action=Action(stage, Kind.RECOMPUTE, i), end_seconds=turn)]
            found += [replace(span, due_seconds=turn, start_seconds=turn)]
        elif kind is not Kind.RECOMPUTE or (stage, i) not in inside:
            found.append(span)
    return found


def measured_timeline(
    schedule: Schedule,
    step: Step,
    costs: Sequence[StageCosts],
    links: Sequence[Link],
    segments: tuple[Segments, ...] = (),
    in_bytes: bool = False,
) -> Timeline:
    """``step`` as a timeline, which begins with its first action.

    Messages are sent when their action ends. If the receiver was waiting by then, it arrived when that went on; if not,
    after the time of its link, or earlier if the receiver went on earlier.

    Args:
        costs: per stage, for the bytes of the curve of memory.
        links: per pair of neighbouring stages.
        segments: per stage, for the curve of memory, if not those of ``schedule``: what is recomputed inside backwards
            and stands together here was alive one region at a time.
        in_bytes: the memory of ``costs`` is in bytes, and is written so, however little it is.
    """
    zero = min((span.start_seconds for spans in step for span in spans), default=0.0)
    events = tuple(
        Event(rank, span.action, span.start_seconds - zero, span.end_seconds - zero)
        for rank, spans in enumerate(step)
        for span in spans
    )
    travels = [travel_seconds(schedule, costs, links, boundary) for boundary in range(schedule.stages - 1)]
    messages = tuple(
        Message(sender.action, receiver.action.stage, sender.end_seconds - zero, arrived - zero)
        for sender, receiver in _messages(schedule, step)
        for arrived in [_arrived(sender, receiver, travels[_boundary(sender, receiver)])]
    )
    played = _played(schedule, step, zero)
    memory = curves(replace(schedule, segments=segments) if segments else schedule, costs, played)
    return Timeline(schedule, events, messages, memory, units=_units(memory, in_bytes))


def _units(memory: Sequence[Sequence[tuple[float, float]]], in_bytes: bool) -> Units:
    most = max((amount for curve in memory for _, amount in curve), default=0.0)
    return units_of_bytes(most) if in_bytes else units_of_clock(most)


def _played(schedule: Schedule, step: Step, zero: float) -> Run:
    """In the order of the schedule: of two actions that ran at once, either may have ended first."""
    found = [{span.action: span for span in spans} for spans in step]
    missing = [str(action) for own, order in zip(found, schedule.ranks) for action in order if action not in own]
    rule = "every action of the schedule was measured"
    works = "custom functions of a schedule that call forward_one_chunk() and backward_one_chunk() of its stages"
    raise_faults("measured_timeline()", [Fault(rule, f"nothing of {', '.join(missing)}", works)] if missing else [])
    ordered = [[own[action] for action in order] for own, order in zip(found, schedule.ranks)]
    starts = [[span.start_seconds - zero for span in spans] for spans in ordered]
    return Run(starts, [[span.end_seconds - zero for span in spans] for spans in ordered], [], [])


def measured_costs(
    schedule: Schedule, steps: Iterable[Step], sizes: Sequence[StageCosts]
) -> tuple[tuple[StageCosts, ...], tuple[Link, ...]]:
    """The medians of ``steps``: per stage, and per pair of neighbouring stages.

    A backward that ran whole counts half as input, half as weight gradients. What is recomputed inside a backward, by
    ``schedule.segments``, counts as recompute, at the pace of ``R``. A link takes as long as the fastest quarter of the
    messages for which a rank was waiting when they were sent; without such, as the slowest other link, unless a message
    was there sooner.

    Args:
        sizes: per stage its bytes. A stage that is never recomputed would take as long as its forward.
    """
    keys = recomputed_keys(schedule)
    seconds: _Seconds = defaultdict(list)
    travels: _Travels = defaultdict(list)
    for step in steps:
        for span in (span for spans in step for span in spans):
            stage, kind, i = span.action
            is_recomputed = bool(keys[stage * schedule.micro_batches + i])
            seconds[stage, kind, is_recomputed].append(span.end_seconds - span.start_seconds)
        for sender, receiver in _messages(schedule, step):
            seen = max(0.0, receiver.start_seconds - sender.end_seconds)
            travels[_boundary(sender, receiver), _was_waited_for(sender, receiver)].append(seen)
    segments = schedule.segments or (Segments(),) * schedule.stages
    costs = tuple(_costs(stage, seconds, own, part) for stage, (own, part) in enumerate(zip(sizes, segments)))
    return costs, tuple(Link(_latency(travels, boundary)) for boundary in range(schedule.stages - 1))


def _latency(travels: _Travels, boundary: int) -> float:
    known = {at: sorted(seen)[len(seen) // 4] for (at, was_waited_for), seen in travels.items() if was_waited_for}
    others = travels.get((boundary, False), [])
    return known.get(boundary, min([max(known.values(), default=inf), *others]) if others else 0.0)


def _costs(stage: int, seconds: _Seconds, own: StageCosts, part: Segments) -> StageCosts:
    def of(kind: Kind, otherwise: float, rest: float = 0.0) -> float:
        """``rest`` is what a backward recomputes itself, if it is one of what is recomputed at all."""
        recomputed = (max(0.0, found - rest) for found in seconds[stage, kind, True])
        return median(every) if (every := [*seconds[stage, kind, False], *recomputed]) else otherwise

    forward = of(Kind.FORWARD, 0.0)
    early = of(Kind.RECOMPUTE, forward * part.early / part.total)
    recompute = early * part.total / part.early
    half = of(Kind.BACKWARD, 0.0, recompute - early) / 2
    return replace(
        own,
        forward_seconds=forward,
        input_grad_seconds=of(Kind.INPUT_GRAD, half, recompute - early),
        weight_grad_seconds=of(Kind.WEIGHT_GRAD, half),
        recompute_seconds=recompute,
    )


def _messages(schedule: Schedule, step: Step) -> Iterator[tuple[Span, Span]]:
    """Sender and receiver of everything that went from one rank to another."""
    late = schedule.late
    taken = {(_awaits(span.action, late), span.action.micro_batch): span for spans in step for span in spans}
    for span in (span for spans in step for span in spans):
        stage, kind, i = span.action
        if kind is not Kind.FORWARD and kind not in _BACKWARDS:
            continue
        receiver = taken.get(((stage, kind is Kind.FORWARD), i))
        if receiver is not None and schedule.placement[receiver.action.stage] != schedule.placement[stage]:
            yield span, receiver


def _awaits(action: Action, late: Collection[Visit]) -> tuple[int, bool] | None:
    """The stage whose output ``action`` takes, and whether it is an activation."""
    stage, kind, i = action
    if kind is Kind.FORWARD:
        return stage - 1, True
    takes = kind is Kind.RECOMPUTE if (stage, i) in late else kind in _BACKWARDS
    return (stage + 1, False) if takes else None


def _was_waited_for(sender: Span, receiver: Span) -> bool:
    return receiver.due_seconds < sender.end_seconds


def _boundary(sender: Span, receiver: Span) -> int:
    """The pair of neighbouring stages that a message goes between, by the first of them."""
    return min(sender.action.stage, receiver.action.stage)


def _arrived(sender: Span, receiver: Span, travel: float) -> float:
    if _was_waited_for(sender, receiver):
        return max(sender.end_seconds, receiver.start_seconds)
    return max(sender.end_seconds, min(receiver.start_seconds, sender.end_seconds + travel))
