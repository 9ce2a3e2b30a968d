"""Search: the choices of all ranks with which a step with a host is short.

First the ranks are tuned in turn, each amid the messages of a step in which the ranks before it have their choices, and
those after it have no budget. A rank alone takes a fraction of the time of a step, so many recipes are tried: a
``Recipe`` is a few numbers from which the choices of a rank follow. Then the best few steps are changed: the blocks
that go or are dropped of a stretch of visits, or a habit of a rank, most often on the critical path. What does not help
its rank alone is not simulated as a whole.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

from torchckpt.planning.plan.away.outlook import Gene, Habits, Outlook, Times, Work, leaving, returning
from torchckpt.planning.plan.away.simulator import Played, Simulator
from torchckpt.planning.plan.search.lane import FORWARD, Lane

__all__ = ["Candidate", "Search"]

_LONG = float("inf")


class Recipe(NamedTuple):
    """Seconds are in copies of a block, bytes in what a block moves."""

    shares: tuple[float, ...]
    """The blocks of each visit that go, by stage; with a fraction, of some visits one more than of others."""
    out_limit: float = _LONG
    """What would wait longer for its copy out stays."""
    back_limit: float = _LONG
    """What would have to be back so early, or earlier, stays."""
    spare: float = 0.0
    """The bytes that are kept free beside those that are expected to be on their way."""
    habits: Habits = Habits()


class Kitchen:
    """Makes the genes of one rank."""

    def __init__(self, lane: Lane, works: Sequence[Work], host_bytes: float, pace: int) -> None:
        self.lane, self.works, self.pace = lane, works, pace
        self.host_bytes = host_bytes * (1 + 1e-11)
        life: dict[int, int] = {}
        for visit, (stage, _) in enumerate(lane.visits):
            life[stage] = life.get(stage, 0) + lane.backward_place[visit] - lane.forward_place[visit]
        self.stages = sorted(life, key=lambda stage: (-life[stage], stage))
        """Those of the rank, what lives longest first."""
        self.blocks = {stage: work.blocks for (stage, _), work in zip(lane.visits, works)}
        every = [(out, moved) for work in works for out, moved in zip(work.out, work.moved)] or [(1.0, 1.0)]
        self.copy_seconds, self.block_bytes = (sum(column) / len(every) for column in zip(*every))

    def gene(self, recipe: Recipe, times: Times, until: float) -> Gene:
        """The gene for a step with such times."""
        shares = dict(zip(self.stages, recipe.shares))
        away = [
            min(work.blocks, int((i + 1) * shares[stage] + 1e-9) - int(i * shares[stage] + 1e-9))
            for (stage, i), work in zip(self.lane.visits, self.works)
        ]
        arguments, splits = (times.starts, self.pace), recipe.habits.pending >= 0
        if recipe.back_limit < _LONG:
            limit = recipe.back_limit * self.copy_seconds
            away, _ = returning(self.lane, self.works, away, *arguments, splits, limit)
        if recipe.out_limit < _LONG:
            away, _ = leaving(self.lane, self.works, away, *arguments, recipe.out_limit * self.copy_seconds)
        away = self.hosted(away)
        gene = Gene(away, [0] * len(away), recipe.habits, times, until)
        if not recipe.habits.drops:
            return gene
        levels = Outlook(self.lane, self.works, gene, self.pace).levels
        return gene._replace(dropped=self._dropped(away, levels, recipe.spare * self.block_bytes))

    def hosted(self, away: list[int]) -> list[int]:
        """What of it the host has room for. Of what lives shortest, the first to stay."""
        alive: set[int] = set()
        level, away = 0.0, list(away)
        for kind, visit in zip(self.lane.kinds, self.lane.visit_at):
            moved = self.works[visit].moved_until[away[visit]]
            if kind is not FORWARD:
                alive.discard(visit)
                level -= moved
                continue
            alive.add(visit)
            level += moved
            while level > self.host_bytes:
                lives = [(self.lane.backward_place[other] - self.lane.forward_place[other], other) for other in alive]
                _, first = min(pair for pair in lives if away[pair[1]])
                away[first] -= 1
                level -= self.works[first].moved[away[first]]
        return away

    def _dropped(self, away: Sequence[int], levels: Sequence[float], spare: float) -> list[int]:
        """The blocks to drop, of what is used last first, so that there is room beside what is on its way."""
        lane, works, dropped = self.lane, self.works, [0] * len(away)
        alive: list[int] = []
        freed = 0.0
        for place, (kind, visit) in enumerate(zip(lane.kinds, lane.visit_at)):
            if kind is not FORWARD:
                alive.remove(visit)
                freed -= sum(works[visit].freed[away[visit] : away[visit] + dropped[visit]])
                continue
            alive = sorted([*alive, visit])
            for other in reversed(alive):
                work = works[other]
                while levels[place] - freed > lane.budget_bytes - spare and away[other] + dropped[other] < work.blocks:
                    freed += work.freed[away[other] + dropped[other]]
                    dropped[other] += 1
        return dropped


_ROUNDING = 1e-9
_LIMITS = (_LONG, 1.0, 2.0, 4.0, 8.0)
_SPARE = (0.0, -2.0, -1.0, 1.0, 2.0, 4.0)
_EARLY = (2.0, 0.0, 8.0)
_OVERDUE = (1.0, 0.0, 4.0, _LONG)
_FLYING = (1.0, 0.5, 0.0)
_PENDING = (0, 1, 2, 1 << 30, -1)
_STEPS = (-2.0, -1.0, -0.5, -0.25, 0.25, 0.5, 1.0, 2.0)
_FIELDS: tuple[tuple[str, tuple[Any, ...]], ...] = (("back_limit", _LIMITS), ("out_limit", _LIMITS), ("spare", _SPARE))
_HABITS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("overdue", _OVERDUE), ("early", _EARLY), ("flying", _FLYING), ("pending", _PENDING),
)
"""What can be changed, and to what."""
_TRIES = 70
"""The recipes that are tried for a rank in one context."""
_STARTS = 4
"""The steps that are changed a little; one of them is changed more."""
_EFFORT, _STEPS_PLAYED = 1_900_000, (60, 4000)
"""The pieces of compute to simulate in all; as steps, at least and at most."""
_HEAT, _PATIENCE = 0.002, 3000
"""A changed step may be longer by this share, at first, for so many changes."""


class Candidate(NamedTuple):
    genes: list[Gene]
    step: Played


class Search:
    """Looks for short steps until one is as short as ``target``, or as much as it may has been simulated."""

    def __init__(self, simulator: Simulator, host_bytes: Sequence[float], target: float, drops: bool) -> None:
        pace = 1 + simulator.host.half_duplex
        self.simulator, self.target, self.drops = simulator, target * (1 + _ROUNDING), drops
        self.kitchens = [
            Kitchen(lane, works, room, pace)
            for lane, works, room in zip(simulator.lanes, simulator.works, host_bytes)
        ]
        self.random = Random(1)
        self.is_split = any(any(lane.is_split) for lane in simulator.lanes)
        fewest, most = (steps * sum(simulator.pieces) for steps in _STEPS_PLAYED)
        self.most = min(max(_EFFORT, fewest), most)

    def starts(self) -> list[Candidate]:
        """Steps whose ranks were tuned in turn; the shortest first."""
        candidates: list[Candidate] = []
        ranks = list(range(len(self.kitchens)))
        variants = [Habits(drops=self.drops, pending=pending) for pending in _PENDING] if self.is_split else [
            Habits(drops=self.drops), Habits(drops=self.drops, early=_EARLY[-1], flying=1.0 if self.drops else 0.0),
        ]
        for habits in variants:
            for order in (ranks, ranks[::-1]):
                candidate = self._tuned_in_turn(order, habits)
                candidates += [candidate] if candidate else []
                if candidate and candidate.step.key[0] <= self.target:
                    return [candidate]
        return sorted(candidates, key=lambda candidate: candidate.step.key)

    def best(self, candidates: Sequence[Candidate]) -> Candidate:
        """The shortest step that is found by changing ``candidates``."""
        simulator, changed = self.simulator, []
        for candidate in candidates[:_STARTS]:
            if candidate.step.key[0] <= self.target:
                return candidate
            changed.append(self._changed(candidate, simulator.effort + (self.most - simulator.effort) // 12, 0.0))
        return self._changed(min(changed, key=lambda candidate: candidate.step.key), self.most, _HEAT)

    def _tuned_in_turn(self, order: Sequence[int], habits: Habits) -> Candidate | None:
        genes = self.simulator.ideal(habits.pending)
        step = self.simulator.play(genes)
        for rank in order:
            if step is None:
                return None
            tuner = _Tuner(self, rank, self.simulator.times(step)[rank], max(step.key[0], self.target))
            tuner.run(habits)
            if tuner.gene is None:
                return None
            genes[rank] = tuner.gene
            step = self.simulator.play(genes)
        return Candidate(genes, step) if step else None

    def _changed(self, best: Candidate, until: int, heat: float) -> Candidate:
        """Change ``best`` until so much has been simulated. Up to ``heat``, steps may get longer for a while."""
        simulator, random, begin = self.simulator, self.random, self.simulator.effort
        context, since = _Context(simulator, best), 0
        while simulator.effort < until and best.step.key[0] > self.target:
            current, since = context.candidate, since + 1
            if since > _PATIENCE and current is not best:
                context, since = _Context(simulator, best), 0
                continue
            simulator.effort += 1
            rank, gene = self._changed_gene(context)
            allowed = heat * (until - simulator.effort) / (until - begin) * random.random() ** 2
            limit = current.step.key[0] * (1 + allowed + _ROUNDING)
            if gene is None or not context.helps(rank, gene, limit, allowed > 0.0):
                continue
            genes = [*current.genes[:rank], gene, *current.genes[rank + 1 :]]
            step = simulator.play(genes, limit)
            if step and (allowed or step.key < current.step.key):
                context = _Context(simulator, Candidate(genes, step))
                if step.key < best.step.key:
                    best, since = context.candidate, 0
        return best

    def _changed_gene(self, context: _Context) -> tuple[int, Gene | None]:
        """A rank, and its gene with a random change; None if nothing has changed."""
        random, genes = self.random, context.candidate.genes
        rank, visit = random.choice(context.path)
        if random.random() < 0.2:
            rank = random.randrange(len(genes))
            visit = random.randrange(max(1, len(genes[rank].away)))
        gene = genes[rank]
        if random.random() < 0.3:
            until = context.candidate.step.key[0] * (1 - random.choice((0.0, 0.003, 0.01, 0.03)))
            gene = gene._replace(times=context.times[rank], until=until)
        if random.random() < 0.15:
            name, values = random.choice(_HABITS if self.is_split else _HABITS[:-1])
            return rank, gene._replace(habits=gene.habits._replace(**{name: random.choice(values)}))
        away = list(gene.away)
        dropped = list(gene.dropped if random.random() < 0.5 else context.candidate.step.ranks[rank].dropped)
        for other, more_away, more_dropped in self._changes(visit, len(away)):
            blocks = self.simulator.works[rank][other].blocks
            away[other] = min(blocks, max(0, away[other] + more_away))
            dropped[other] = min(blocks - away[other], max(0, dropped[other] + more_dropped)) * self.drops
        away = self.kitchens[rank].hosted(away)
        is_new = gene is not genes[rank] or away != gene.away or dropped != gene.dropped
        return rank, gene._replace(away=away, dropped=dropped) if is_new else None

    def _changes(self, visit: int, visits: int) -> Iterator[tuple[int, int, int]]:
        """Visits, and how many blocks more of each go and are dropped: of two visits, or of a stretch of them."""
        random = self.random
        if random.random() < 0.3:
            other, by = random.randrange(visits), random.choice((1, 1, 2))
            if random.random() < 0.5:
                other = min(visits - 1, max(0, visit + random.choice((-3, -2, -1, 1, 2, 3))))
            less, more = random.choice((((-by, 0), (by, 0)), ((0, -by), (0, by)), ((-by, 0), (0, by))))
            yield visit, *less
            yield other, *more
            return
        length = random.choice((1, 1, 2, 4, 8, visits))
        first = max(0, visit - random.choice((0, 0, length - 1)))
        away, dropped = random.choice(((1, 0), (-1, 0), (0, 1), (0, -1), (1, -1), (-1, 1), (1, -9), (2, -9), (-2, 0)))
        for each in range(first, min(visits, first + length), random.choice((1, 1, 1, 2, 3))):
            yield each, away, dropped


class _Context:
    """The step that is to be changed."""

    def __init__(self, simulator: Simulator, candidate: Candidate) -> None:
        self.simulator, self.candidate = simulator, candidate
        self.times, self.path = simulator.times(candidate.step), simulator.critical(candidate.step)
        self._before: dict[int, tuple[float, float]] = {}

    def helps(self, rank: int, gene: Gene, limit: float, is_lenient: bool) -> bool:
        """Whether the rank alone does no worse with ``gene``; if not lenient, whether it does better."""
        if rank not in self._before:
            self._before[rank] = self.simulator.alone(rank, self.candidate.genes[rank], self.times[rank], limit)
        before, after = self._before[rank], self.simulator.alone(rank, gene, self.times[rank], limit)
        return after[0] <= max(limit, before[0]) < _LONG if is_lenient else after < before


class _Tuner:
    """Looks for a recipe for one rank in one context."""

    def __init__(self, search: Search, rank: int, times: Times, until: float) -> None:
        self.simulator, self.kitchen, self.rank = search.simulator, search.kitchens[rank], rank
        self.times, self.until = times, until
        self.key: tuple[float, float, float] = (_LONG, _LONG, _LONG)
        self.recipe: Recipe | None = None
        self.gene: Gene | None = None
        self._tried: set[object] = set()

    def run(self, habits: Habits) -> None:
        for shares in self._shares():
            self._offer(Recipe(shares, habits=habits))
            if self.key[0] <= self.until * (1 + _ROUNDING) and not any(self.gene.dropped if self.gene else (1,)):
                return
        before = None
        while self.recipe is not None and before != self.recipe and len(self._tried) < _TRIES:
            before = self.recipe
            for name, values in _FIELDS:
                for value in values:
                    self._offer(self.recipe._replace(**{name: value}))
            for name, values in _HABITS[:-1]:
                for value in values:
                    self._offer(self.recipe._replace(habits=self.recipe.habits._replace(**{name: value})))
            for index, stage in enumerate(self.kitchen.stages):
                for by in _STEPS:
                    changed = list(self.recipe.shares)
                    changed[index] = min(self.kitchen.blocks[stage], max(0.0, changed[index] + by))
                    self._offer(self.recipe._replace(shares=tuple(changed)))

    def _shares(self) -> Iterator[tuple[float, ...]]:
        """Of what lives longest first; then of all alike."""
        most = [self.kitchen.blocks[stage] for stage in self.kitchen.stages]
        for half in range(2 * sum(most) + 1):
            yield tuple(min(of_stage, max(0.0, half / 2 - sum(most[:index]))) for index, of_stage in enumerate(most))
        for half in range(1, 2 * max(most, default=0)) if len(most) > 1 else ():
            yield tuple(min(of_stage, half / 2) for of_stage in most)

    def _offer(self, recipe: Recipe) -> None:
        gene = self.kitchen.gene(recipe, self.times, self.until)
        what = tuple(gene.away), tuple(gene.dropped), gene.habits
        if what in self._tried:
            return
        self._tried.add(what)
        seconds, late = self.simulator.alone(self.rank, gene, self.times, self.key[0])
        key = max(seconds, self.until), late, sum(gene.dropped) + 1e-2 * sum(gene.away)
        if seconds < _LONG and key < self.key:
            self.key, self.recipe, self.gene = key, recipe, gene
