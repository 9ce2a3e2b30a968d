"""Measured: what a real step took, in the types of a simulated one."""
from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median
from typing import TypeAlias

from torchckpt.errors import Fault, called, check
from torchckpt.planning.draw.units import units_of_bytes, units_of_clock
from torchckpt.planning.figures import Event, Message
from torchckpt.planning.order.program import Run
from torchckpt.planning.order.schedule import BACKWARDS, Action, Kind, Schedule, Visit
from torchckpt.planning.step.placement import recomputed_early
from torchckpt.planning.step.simulated import Step
from torchckpt.planning.step.timeline import Timeline
from torchckpt.planning.work.block import Block, Link, Stage, fixed
from torchckpt.planning.work.choice import Choice

__all__ = [
    "Span", "Spans", "measured_links", "measured_seconds", "measured_stage", "measured_step", "measured_timeline",
    "replays_apart",
]

_SHORT_SECONDS, _SMALL_BYTES = 1e-9, 1.0
"""The least seconds and bytes of a region: used if the clock measures no time, or if the region saves nothing."""


@dataclass(frozen=True)
class Span:
    """One action of one rank. From ``due_seconds`` on the rank had nothing else to do, at ``start_seconds`` the input
    was there. All ranks count from the same moment."""

    action: Action
    due_seconds: float
    start_seconds: float
    end_seconds: float


Spans: TypeAlias = Sequence[Sequence[Span]]
"""For each rank the spans of one step, in the order of the schedule."""


def replays_apart(spans: Iterable[Span], inside: Mapping[Visit, float]) -> list[Span]:
    """``spans`` with an ``R``, as long as all that was replayed inside a backward, where that backward began.

    A backward that recomputes region by region goes to and fro between the two; here its replays stand together.
    ``inside``: for each (stage, micro-batch) that was replayed so, the seconds of that.
    """
    apart = []
    for span in spans:
        stage, kind, i = span.action
        if kind in BACKWARDS and (stage, i) in inside:
            turn = min(span.start_seconds + inside[stage, i], span.end_seconds)
            apart.append(replace(span, action=Action(stage, Kind.RECOMPUTE, i), end_seconds=turn))
            apart.append(replace(span, due_seconds=turn, start_seconds=turn))
        else:
            apart.append(span)
    return apart


@called("measured_timeline()")
def measured_timeline(step: Step, spans: Spans, in_bytes: bool = False) -> Timeline:
    """``step`` as it was measured. The timeline begins with its first action.

    Messages are sent when their action ends. If the receiver was waiting by then, it arrived when that went on; if not,
    after the time of its link, or earlier if the receiver went on earlier.

    Args:
        step: what was run. Its links say how long messages take, its stages and choices what is held.
        spans: with an ``R`` for all that was replayed, early and late; see :func:`replays_apart`.
        in_bytes: the memory of the stages is in bytes, and is written so, however little it is. Default: False.
    """
    zero = min((span.start_seconds for on_rank in spans for span in on_rank), default=0.0)
    events = tuple(
        Event(rank, span.action, span.start_seconds - zero, span.end_seconds - zero)
        for rank, on_rank in enumerate(spans)
        for span in on_rank
    )
    travels = step.travel_seconds
    messages = tuple(
        Message(sender.action, receiver.action.stage, sender.end_seconds - zero, arrived - zero)
        for sender, receiver in _messages(step, spans)
        for arrived in [_arrived(sender, receiver, travels[_boundary(sender, receiver)])]
    )
    memory = step.curves(_played(step, spans, zero))
    most = max((amount for curve in memory for _, amount in curve), default=0.0)
    units = units_of_bytes(most) if in_bytes else units_of_clock(most)
    return Timeline(step.schedule, events, messages, memory, units=units)


def _played(step: Step, spans: Spans, zero: float) -> Run:
    """The times in the order of the step's program, for of two actions that ran at once either may have ended first."""
    times: list[defaultdict[Action, list[Span]]] = []
    for on_rank in spans:
        times.append(defaultdict(list))
        for span in on_rank:
            times[-1][span.action].append(span)
    pairs = list(zip(times, step.program.actions))
    for known, order in pairs:
        for action, count in Counter(order).items():
            if action.kind is Kind.RECOMPUTE:  # of one that is early and late, the late one
                known[action] += _not_replayed(action, known) * (count - len(known[action]))
    missing = [str(action) for known, order in pairs for action in order if not known[action]]
    rule = "an action of the schedule was not measured"
    works = "custom functions of a schedule that call forward_one_chunk() and backward_one_chunk() of its stages"
    check([Fault(rule, f"nothing of {', '.join(missing)}", works)] if missing else [])
    ordered = [[known[action].pop(0) for action in order] for known, order in pairs]
    starts = [[span.start_seconds - zero for span in on_rank] for on_rank in ordered]
    return Run(starts, [[span.end_seconds - zero for span in on_rank] for on_rank in ordered], [], [])


def _not_replayed(action: Action, known: Mapping[Action, Sequence[Span]]) -> list[Span]:
    """The span of a replay that nothing asked for, as of a stage that saves nothing: no time, before its backward.

    Where only one of an early and a late replay was asked for, the early one is taken to be it.
    """
    backwards = (span for kind in BACKWARDS for span in known.get(action._replace(kind=kind), ()))
    return [Span(action, *[span.start_seconds] * 3) for span in backwards][:1]


def measured_seconds(step: Step, measured: Iterable[Spans]) -> tuple[Block, ...]:
    """For each stage, the medians over all micro-batches and steps, as a block without bytes.

    A backward that ran whole counts half as input, half as weight gradients. What is recomputed early and late of one
    micro-batch counts together. A stage that is never recomputed would take as long as its forward.
    """
    seconds: defaultdict[tuple[int, Kind], list[float]] = defaultdict(list)
    for spans in measured:
        replays: defaultdict[Action, float] = defaultdict(float)
        for span in (span for on_rank in spans for span in on_rank):
            stage, kind, _ = span.action
            if kind is Kind.RECOMPUTE:
                replays[span.action] += span.end_seconds - span.start_seconds
            else:
                seconds[stage, kind].append(span.end_seconds - span.start_seconds)
        for (stage, kind, _), replay in replays.items():
            seconds[stage, kind].append(replay)
    return tuple(_seconds_of(stage, seconds) for stage in range(step.schedule.stages))


def _seconds_of(stage: int, seconds: Mapping[tuple[int, Kind], list[float]]) -> Block:
    def of(kind: Kind, otherwise: float) -> float:
        return median(seconds[stage, kind]) if seconds.get((stage, kind)) else otherwise

    forward, half = of(Kind.FORWARD, 0.0), of(Kind.BACKWARD, 0.0) / 2
    weights = of(Kind.WEIGHT_GRAD, half)
    return Block(forward, of(Kind.INPUT_GRAD, half), weights, of(Kind.RECOMPUTE, forward), saved_bytes=0.0)


def measured_links(step: Step, measured: Iterable[Spans]) -> tuple[Link, ...]:
    """For each pair of neighbouring stages, the fastest quarter of the messages for which a rank was waiting when they
    were sent; without such, as the slowest other link, unless a message was there sooner. Of a message is known the
    most that it can have taken."""
    travels: defaultdict[tuple[int, bool], list[float]] = defaultdict(list)
    for spans in measured:
        for sender, receiver in _messages(step, spans):
            seen = max(0.0, receiver.start_seconds - sender.end_seconds)
            travels[_boundary(sender, receiver), _was_waited_for(sender, receiver)].append(seen)
    known = {pair: sorted(seen)[len(seen) // 4] for (pair, was_waited_for), seen in travels.items() if was_waited_for}
    slowest = max(known.values(), default=inf)
    others = {pair: min(slowest, *seen) for (pair, was_waited_for), seen in travels.items() if not was_waited_for}
    return tuple(Link(known.get(pair, others.get(pair, 0.0))) for pair in range(step.schedule.stages - 1))


def _messages(step: Step, spans: Spans) -> Iterator[tuple[Span, Span]]:
    """Sender and receiver of everything that went from one rank to another."""
    placement = step.schedule.placement
    taken = {awaited: span for on_rank in spans for awaited, span in _takers(step, on_rank)}
    for span in (span for on_rank in spans for span in on_rank):
        stage, kind, i = span.action
        if kind is Kind.FORWARD or kind in BACKWARDS:
            receiver = taken.get((stage, kind is Kind.FORWARD, i))
            if receiver is not None and placement[receiver.action.stage] != placement[stage]:
                yield span, receiver


def _takers(step: Step, spans: Sequence[Span]) -> Iterator[tuple[tuple[int, bool, int], Span]]:
    """The spans of one rank that take a message, each with the stage that sends it, whether it is an activation, and
    its micro-batch. A gradient is taken by the late recompute before the backward, if there is one."""
    before: Span | None = None
    for span in spans:
        stage, kind, i = span.action
        if kind is Kind.FORWARD:
            yield (stage - 1, True, i), span
        elif kind in BACKWARDS:
            recompute = Action(stage, Kind.RECOMPUTE, i)
            is_late = bool(step.choice((stage, i)).restored_by(kind=Kind.BACKWARD))
            yield (stage + 1, False, i), before if is_late and before and before.action == recompute else span
        before = span


def _was_waited_for(sender: Span, receiver: Span) -> bool:
    return receiver.due_seconds < sender.end_seconds


def _boundary(sender: Span, receiver: Span) -> int:
    """The pair of neighbouring stages that a message goes between, by the first of them."""
    return min(sender.action.stage, receiver.action.stage)


def _arrived(sender: Span, receiver: Span, travel: float) -> float:
    if _was_waited_for(sender, receiver):
        return max(sender.end_seconds, receiver.start_seconds)
    return max(sender.end_seconds, min(receiver.start_seconds, sender.end_seconds + travel))


def measured_step(
    schedule: Schedule, kept: Collection[Visit], segments: int | None, counted: Sequence[Stage], spans: Sequence[Spans]
) -> Step:
    """The step that was run, with the medians that were measured; each region is a block of its stage.

    Args:
        kept: the visits of which nothing is recomputed.
        segments: how many regions a recompute action replays, the last ones; None for all.
        counted: the bytes of the stages, and the seconds of the replays of their blocks.
        spans: of each step. The first of several is warm-up.
    """
    early = recomputed_early(schedule)
    choices: dict[Visit, Choice] = {}
    for stage, blocks in enumerate(tuple(range(len(stage.blocks))) for stage in counted):
        first = 0 if segments is None else max(0, len(blocks) - segments)  # an R replays the last blocks
        by_r, by_backward = Choice(early=blocks[first:], late=blocks[:first]), Choice(late=blocks)
        visits = [(stage, i) for i in range(schedule.micro_batches) if (stage, i) not in kept]
        choices |= {visit: by_r if visit in early else by_backward for visit in visits}
    step = Step(schedule, tuple(counted), (), choices)
    measured = spans[1:] or spans
    stages = tuple(map(measured_stage, counted, measured_seconds(step, measured)))
    return replace(step, stages=stages, links=measured_links(step, measured))


def measured_stage(counted: Stage, seconds: Block) -> Stage:
    """``counted`` with the ``seconds`` of the stage, which its blocks share as their replays do.

    The forward of a block takes as long as its replay. The rest of the stage's forward becomes one fixed part.
    ``counted``: the bytes of the stage, and the seconds of the replay of each block. Where replays of blocks were not
    timed, they take equally long. ``seconds``: those of the stage. Its backward must not include recomputation.
    """
    blocks, before, after = counted.blocks, counted.before, counted.after
    if not blocks:
        halves = seconds.input_grad_seconds, seconds.weight_grad_seconds
        after = fixed(max(seconds.forward_seconds, _SHORT_SECONDS), *halves, saved_bytes=after.saved_bytes)
        return Stage((), before, after)
    equal = seconds.recompute_seconds / len(blocks)
    replays = [max(block.recompute_seconds or equal, _SHORT_SECONDS) for block in blocks]
    scale = min(1.0, seconds.forward_seconds / sum(replays))
    timed = []
    for block, replay in zip(blocks, replays):
        share, least = replay / sum(replays), 0.0 if block.saved_bytes else _SMALL_BYTES
        timed.append(
            Block(
                forward_seconds=max(replay * scale, _SHORT_SECONDS),
                input_grad_seconds=max(seconds.input_grad_seconds * share, _SHORT_SECONDS),
                weight_grad_seconds=seconds.weight_grad_seconds * share,
                recompute_seconds=replay,
                saved_bytes=block.saved_bytes + least,
                boundary_bytes=block.boundary_bytes + least,
                moved_bytes=block.moved_bytes,
            )
        )
    rest = max(0.0, seconds.forward_seconds - sum(block.forward_seconds for block in timed))
    return Stage(tuple(timed), before, fixed(rest, saved_bytes=after.saved_bytes))
