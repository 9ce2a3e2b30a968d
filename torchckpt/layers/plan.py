"""Plan: which calls of one step are kept, for the least time within a byte budget.

One device is a pipeline of one rank, whose forwards all come before their backwards. There the best choice can be
found, which the search for pipelines does not promise. From the last call to the first, the frontier of the calls from
there on: for each peak above what is held before them, the fewest seconds of recomputation. A call that is kept adds
its bytes to the peaks of later calls, one that is recomputed adds its seconds::

    peak of calls i, i+1, ...  =  max(forward and backward of i, inner_bytes of i if it is kept + peak of i+1, ...)

The frontier does not depend on the budget, so more budget is never slower.
"""
from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

from torchckpt.layers.took import Call, Took
from torchckpt.planning import Action, Block, Choice, Kind, Link, Schedule, Stage, Step, Timeline
from torchckpt.planning.draw.svg import svg
from torchckpt.planning.draw.units import aligned, percent, units_of_bytes
from torchckpt.planning.figures import Drawn
from torchckpt.planning.plan.run.measured import with_levels
from torchckpt.planning.step.memory import Level

__all__ = ["LayersPlan", "Option", "frontier"]

_OPTIONS, _FEWEST = 24_000, 150
"""The options of all calls together that a frontier keeps, and the fewest of one call."""

Option: TypeAlias = tuple[float, float, int]
"""One way to keep and recompute calls: the peak bytes, the seconds of the replays, the calls that are kept, as bits."""


def frontier(took: Took) -> list[Option]:
    """The options of a step, from the least peak to the fewest seconds. Exact unless there are very many."""
    most = max(_FEWEST, _OPTIONS // max(1, len(took.calls)))
    options: list[Option] = [(took.between_most[-1], 0.0, 0)]
    for place in reversed(range(len(took.calls))):
        call, before = took.calls[place], took.between_most[place]
        seconds, inner, bit = call.replay_seconds, call.inner_bytes, 1 << place
        own = max(call.forward_most, call.replay_most, call.backward_most, before)
        found = [(max(own, peak), rest + seconds, kept) for peak, rest, kept in options]
        if seconds:
            own = max(call.kept_most, call.backward_most, before)
            found += [(max(own, inner + peak), rest, kept | bit) for peak, rest, kept in options]
        options = _thinned(_best(sorted(found)), most)
    return options


def _best(options: Iterable[Option]) -> list[Option]:
    """Of sorted options those that no other one beats both in bytes and in seconds."""
    best, fewest = [], float("inf")
    for option in options:
        if option[1] < fewest:
            fewest = option[1]
            best.append(option)
    return best


def _thinned(options: list[Option], most: int) -> list[Option]:
    """About so many of the options, evenly by seconds: of those that are nearly equal, that with the least peak."""
    if len(options) <= most:
        return options
    least, width = options[-1][1], (options[0][1] - options[-1][1]) / most
    by_seconds: dict[int, Option] = {}
    for option in options:
        by_seconds.setdefault(int((option[1] - least) / width), option)
    return list(dict.fromkeys([*by_seconds.values(), options[-1]]))


@dataclass(frozen=True)
class LayersPlan(Drawn):
    """Which calls of a step are kept. ``print(plan)`` is a table by layer, ``plan.draw("plan.svg")`` a picture."""

    took: Took
    names: tuple[str, ...]
    """The names of the layers."""
    budget_bytes: float
    kept: frozenset[int]
    """The numbers of the calls that are kept, in the order of the step."""
    measured_peak_bytes: float | None = None
    """The peak of the second step of this plan, above what was there before it. None until then."""

    @cached_property
    def peak_bytes(self) -> float:
        """The planned peak, above what is there before the step."""
        return peak_of(self.took, self.kept)

    @property
    def recompute_seconds(self) -> float:
        return sum(call.replay_seconds for place, call in enumerate(self.took.calls) if place not in self.kept)

    @property
    def plain_seconds(self) -> float:
        """The forwards and backwards of the calls, without any recomputation."""
        return sum(call.forward_seconds + call.backward_seconds for call in self.took.calls)

    @property
    def everything_kept_bytes(self) -> float:
        """The peak if every call is kept."""
        return peak_of(self.took, range(len(self.took.calls)))

    @property
    def everything_recomputed_bytes(self) -> float:
        """The peak if no call is kept."""
        return peak_of(self.took, ())

    def __str__(self) -> str:
        units = units_of_bytes(max(self.everything_kept_bytes, 1.0))
        calls, names = self.took.calls, self.names
        rows = [("layer", "calls", "kept", "bytes if kept", "if recomputed", "forward", "replay")]
        for layer, name in enumerate(names):
            own = [place for place, call in enumerate(calls) if call.layer == layer]
            sums = [sum(amounts) for amounts in zip(*(calls[place][1:] for place in own))] or [0.0] * len(Call._fields)
            bytes_ = units.of_memory(sums[3] + sums[4]), units.of_memory(sums[3])
            count = sum(place in self.kept for place in own)
            rows.append((name, str(len(own)), str(count), *bytes_, units.of_time(sums[0]), units.of_time(sums[1])))
        measured = self.measured_peak_bytes
        peaks = [
            ("budget", units.of_memory(self.budget_bytes)),
            ("planned peak", units.of_memory(self.peak_bytes)),
            ("measured peak", "-" if measured is None else units.of_memory(measured)),
            ("if everything is kept", units.of_memory(self.everything_kept_bytes)),
            ("if everything is recomputed", units.of_memory(self.everything_recomputed_bytes)),
        ]
        return f"{self.summary}\n\n{aligned(peaks)}\n\n{aligned(rows)}"

    @property
    def summary(self) -> str:
        """One line: how many calls are kept, and what the others cost."""
        calls, plain = len(self.took.calls), self.plain_seconds
        if len(self.kept) == calls:
            return f"all {calls} calls are kept: everything fits"
        share = percent(self.recompute_seconds / plain) if plain else "-"
        return f"{len(self.kept)} of {calls} calls are kept; to recompute the others takes {share} of their own time"

    def _svg(self) -> str:
        """The step that keeps everything, and the planned one: when each call runs, and the memory under the budget."""
        everything = replace(self, kept=frozenset(range(len(self.took.calls))))
        units = units_of_bytes(max(everything.peak_bytes, self.budget_bytes))
        peaks = units.of_memory(self.peak_bytes), units.of_memory(everything.peak_bytes)
        return svg(
            everything.timeline,
            self.timeline,
            names=("everything kept", "planned"),
            budget_bytes=(self.budget_bytes,),
            units=units,
            title="Peak memory {} in place of {}".format(*peaks),
            subtitle=self.summary,
        )

    @property
    def timeline(self) -> Timeline:
        """The planned step. Each call is a stage of a pipeline on one rank."""
        calls = range(len(self.took.calls))
        order = [*(Action(call, Kind.FORWARD, 0) for call in calls)]
        order += [Action(call, Kind.BACKWARD, 0) for call in reversed(calls)]
        schedule = Schedule("one device", (tuple(order),), (0,) * len(calls), 1)
        choices = {(call, 0): Choice(late=(0,)) for call in calls if call not in self.kept}
        stages = tuple(Stage((_block(call),)) for call in self.took.calls)
        timeline = Step(schedule, stages, (Link(),) * (len(calls) - 1), choices).timeline
        return with_levels(timeline, [dict(_levels(self.took, self.kept))])


def _block(call: Call) -> Block:
    saved_bytes = call.boundary_bytes + call.inner_bytes
    seconds = call.forward_seconds, call.backward_seconds, 0.0, call.replay_seconds
    return Block(*seconds, saved_bytes=saved_bytes, boundary_bytes=call.boundary_bytes)


def peak_of(took: Took, kept: Collection[int]) -> float:
    """The most bytes of a step that keeps these calls."""
    held = _held(took.calls, kept)
    between = max(map(sum, zip(took.between_most, held)))
    return max([between, *(level.highest for _, level in _levels(took, kept))])


def _held(calls: Sequence[Call], kept: Collection[int]) -> list[float]:
    """At place p, what the kept ones of the first p calls hold."""
    held = [0.0]
    for place, call in enumerate(calls):
        held.append(held[-1] + (call.inner_bytes if place in kept else 0.0))
    return held


def _levels(took: Took, kept: Collection[int]) -> Iterator[tuple[Action, Level]]:
    """The bytes of each forward and backward."""
    held = _held(took.calls, kept)
    for place, call in enumerate(took.calls):
        is_kept = place in kept
        forward = call.kept_most if is_kept else call.forward_most
        left = call.forward_left + held[place + 1]
        yield Action(place, Kind.FORWARD, 0), Level(forward + held[place], left)
        backward = call.backward_most if is_kept else max(call.backward_most, call.replay_most)
        yield Action(place, Kind.BACKWARD, 0), Level(backward + held[place], call.backward_left + held[place])
