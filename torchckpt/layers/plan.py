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
from operator import attrgetter
from typing import NamedTuple, TypeAlias

from torchckpt.layers.away import Away, with_away
from torchckpt.layers.took import Call, Took, most_of
from torchckpt.planning import Action, Block, Choice, Kind, Link, Schedule, Stage, Step, Timeline
from torchckpt.planning.draw.svg import svg
from torchckpt.planning.draw.units import Units, aligned, percent, units_of_bytes
from torchckpt.planning.figures import Drawn
from torchckpt.planning.plan.run.fit_measured import with_levels
from torchckpt.planning.step.memory import Level

__all__ = ["LayersPlan", "Option", "Wish", "chosen", "frontier", "kept_within"]

_OPTIONS, _FEWEST = 24_000, 150
"""The options of all calls together that a frontier keeps, and the fewest of one call."""

Option: TypeAlias = tuple[float, float, int]
"""One way to keep and recompute calls: the peak bytes, the seconds of the replays, the calls that are kept, as bits."""


def frontier(took: Took, must: Collection[int] = ()) -> list[Option]:
    """The options of a step, from the least peak to the fewest seconds. Exact unless there are very many, or calls keep
    what is cached until the forwards are done: then they are the best of those for all that is kept, and for nothing.

    Args:
        must: calls that are kept in any case.
    """
    if not any(call.cached_bytes or call.late_most for call in took.calls):
        return _frontier(took, must)
    kept = {kept for is_kept in (False, True) for *_, kept in _frontier(took.in_one(is_kept), must)}
    return _best(sorted(_option(took, each) for each in kept))


def _option(took: Took, kept: int) -> Option:
    calls = {place for place in range(len(took.calls)) if kept >> place & 1}
    seconds = sum(call.replay_seconds for place, call in enumerate(took.calls) if place not in calls)
    return took.peak_bytes(calls), seconds, kept


def _frontier(took: Took, must: Collection[int]) -> list[Option]:
    most = max(_FEWEST, _OPTIONS // max(1, len(took.calls)))
    options: list[Option] = [(took.between_most[-1], 0.0, 0)]
    for place in reversed(range(len(took.calls))):
        call, before = took.calls[place], took.between_most[place]
        seconds, inner, bit = call.replay_seconds, call.inner_bytes, 1 << place
        own = max(call.forward_most, call.replay_most, call.backward_most, before)
        found = [] if place in must else [(max(own, peak), rest + seconds, kept) for peak, rest, kept in options]
        if seconds or place in must:
            own = max(call.kept_most, call.backward_most, before)
            found += [(max(own, inner + peak), rest, kept | bit) for peak, rest, kept in options]
        options = _thinned(_best(sorted(found)), most)
    return options


class Wish(NamedTuple):
    """What a rank wishes for the step that begins."""

    step: str
    """A text that is another for each step that it knows."""
    took: Took
    limit_bytes: float
    is_narrowed: bool
    """Whether the limit is less than the budget, so that it may be too little."""


def chosen(wishes: Sequence[Wish]) -> frozenset[int]:
    """The calls that all ranks keep, for the least time within the limit of each; for the least bytes, if none fits."""
    limits = [max(wish.limit_bytes, 1.0) for wish in wishes]
    options = frontier(most_of([wish.took for wish in wishes], [limits[0] / limit for limit in limits]))
    kept = next((kept for peak, _, kept in reversed(options) if peak <= limits[0]), options[0][2])
    return frozenset(place for place in range(len(wishes[0].took.calls)) if kept >> place & 1)


def kept_within(limit_bytes: float, took: Took, must: frozenset[int]) -> frozenset[int] | None:
    """The calls that are kept for the least time within so many bytes, ``must`` among them; None if nothing fits."""
    kept = next((kept for peak, _, kept in reversed(frontier(took, must)) if peak <= limit_bytes), None)
    return None if kept is None else frozenset(place for place in range(len(took.calls)) if kept >> place & 1)


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
    away: tuple[Away, ...] = ()
    """Those that go to the host and come back."""
    measured_peak_bytes: float | None = None
    """The peak of the second step of this plan, above what was there before it. None until then."""

    @cached_property
    def peak_bytes(self) -> float:
        """The planned peak, above what is there before the step."""
        return self._took_with_away.peak_bytes(self.not_recomputed)

    @cached_property
    def not_recomputed(self) -> frozenset[int]:
        """The calls that are kept or away."""
        return self.kept | self.sent

    @cached_property
    def sent(self) -> frozenset[int]:
        """The calls that are away."""
        return frozenset(each.call for each in self.away)

    @property
    def recompute_seconds(self) -> float:
        calls = enumerate(self.took.calls)
        return sum(call.replay_seconds for place, call in calls if place not in self.not_recomputed)

    @property
    def host_bytes(self) -> float:
        """What of the away calls is on the host when the first backward begins."""
        return sum(self.took.calls[each.call].moved_bytes for each in self.away)

    @cached_property
    def _took_with_away(self) -> Took:
        return with_away(self.took, self.away)

    @property
    def plain_seconds(self) -> float:
        """The forwards and backwards of the calls, without any recomputation."""
        return sum(call.forward_seconds + call.backward_seconds for call in self.took.calls)

    @property
    def everything_kept_bytes(self) -> float:
        """The peak if every call is kept."""
        return self.took.peak_bytes(range(len(self.took.calls)))

    @property
    def everything_recomputed_bytes(self) -> float:
        """The peak if no call is kept."""
        return self.took.peak_bytes(())

    def __str__(self) -> str:
        units, measured = units_of_bytes(max(self.everything_kept_bytes, 1.0)), self.measured_peak_bytes
        peaks = [
            ("budget", units.of_memory(self.budget_bytes)),
            ("planned peak", units.of_memory(self.peak_bytes)),
            ("measured peak", "-" if measured is None else units.of_memory(measured)),
            *([("on the host", units.of_memory(self.host_bytes))] if self.away else []),
            ("if everything is kept", units.of_memory(self.everything_kept_bytes)),
            ("if everything is recomputed", units.of_memory(self.everything_recomputed_bytes)),
        ]
        counts = "calls", "kept", *["away"] * bool(self.away)
        head = "layer", *counts, "bytes if kept", "if recomputed", "forward", "replay"
        rows = [head, *(self._row(layer, name, units) for layer, name in enumerate(self.names))]
        return f"{self.summary}\n\n{aligned(peaks)}\n\n{aligned(rows)}"

    def _row(self, layer: int, name: str, units: Units) -> tuple[str, ...]:
        own = {place: call for place, call in enumerate(self.took.calls) if call.layer == layer}
        counts = [own.keys(), self.kept & own.keys(), *[self.sent & own.keys()] * bool(self.away)]
        boundary, inner = (sum(map(attrgetter(of), own.values())) for of in ("boundary_bytes", "inner_bytes"))
        seconds = (sum(map(attrgetter(of), own.values())) for of in ("forward_seconds", "replay_seconds"))
        texts = *map(units.of_memory, (boundary + inner, boundary)), *map(units.of_time, seconds)
        return name, *map(str, map(len, counts)), *texts

    @property
    def summary(self) -> str:
        """One line: how many calls are kept, and what the others cost."""
        calls, plain = len(self.took.calls), self.plain_seconds
        if len(self.kept) == calls:
            return f"all {calls} calls are kept: everything fits"
        share = percent(self.recompute_seconds / plain) if plain else "-"
        away = f", {len(self.away)} are on the host meanwhile" if self.away else ""
        kept = f"{len(self.kept)} of {calls} calls are kept{away}"
        return f"{kept}; recomputing the others adds {share} to the time of all"

    def _svg(self) -> str:
        """The step that keeps everything, and the planned one: when each call runs, and the memory under the budget."""
        everything = replace(self, kept=frozenset(range(len(self.took.calls))), away=())
        units = units_of_bytes(max(everything.peak_bytes, self.budget_bytes))
        peaks = units.of_memory(self.peak_bytes), units.of_memory(everything.peak_bytes)
        measured = self.measured_peak_bytes
        told = "" if measured is None else f" (measured {units.of_memory(measured)})"
        return svg(
            everything.timeline,
            self.timeline,
            names=("everything kept", "planned"),
            budget_bytes=(self.budget_bytes,),
            units=units,
            title=f"Peak memory {peaks[0]}{told} in place of {peaks[1]}",
            subtitle=self.summary,
            stage_names=[self.names[call.layer] for call in self.took.calls],
        )

    @property
    def timeline(self) -> Timeline:
        """The planned step. Each call is a stage of a pipeline on one rank."""
        calls = range(len(self.took.calls))
        order = [*(Action(call, Kind.FORWARD, 0) for call in calls)]
        order += [Action(call, Kind.BACKWARD, 0) for call in reversed(calls)]
        schedule = Schedule("one device", (tuple(order),), (0,) * len(calls), 1)
        choices = {(call, 0): Choice(late=(0,)) for call in calls if call not in self.not_recomputed}
        stages = tuple(Stage((_block(call),)) for call in self.took.calls)
        timeline = Step(schedule, stages, (Link(),) * (len(calls) - 1), choices).timeline
        return with_levels(timeline, [dict(_levels(self._took_with_away, self.not_recomputed))])


def _block(call: Call) -> Block:
    saved_bytes = call.boundary_bytes + call.inner_bytes
    seconds = call.forward_seconds, call.backward_seconds, 0.0, call.replay_seconds
    return Block(*seconds, saved_bytes=saved_bytes, boundary_bytes=call.boundary_bytes)


def _levels(took: Took, kept: Collection[int]) -> Iterator[tuple[Action, Level]]:
    """The bytes of each forward and backward. What runs before one counts with it: a loss with the last backward."""
    held, early = took.held(kept), took.held_early(kept)
    for place, call in enumerate(took.calls):
        forward = max(call.kept_most if place in kept else call.forward_most, took.between_most[place])
        yield Action(place, Kind.FORWARD, 0), Level(forward + early[place], call.forward_left + early[place + 1])
        backward = held[place] + (call.backward_most if place in kept else max(call.backward_most, call.replay_most))
        if place + 1 == len(took.calls):
            backward = max(backward, took.between_most[-1] + early[-1], call.late_most + held[-1])
        yield Action(place, Kind.BACKWARD, 0), Level(backward, call.backward_left + held[place])
