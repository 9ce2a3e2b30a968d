"""Recipe: a few numbers from which the choices of a rank follow."""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torchckpt.planning.plan.away.outlook import Gene, Habits, Outlook, Times, leaving, returning
from torchckpt.planning.plan.away.work import Work
from torchckpt.planning.plan.search.lane import FORWARD, Lane

__all__ = ["Kitchen", "Recipe"]

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
