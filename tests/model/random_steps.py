"""Random schedules that can run, by construction, and random costs."""
from __future__ import annotations

from functools import cache
from random import Random

from torchckpt.model.schedule.action import Action, Kind
from torchckpt.model.schedule.costs import Link, StageCosts
from torchckpt.model.schedule.schedule import Schedule, Segments

F, B, I, W, R = Kind  # noqa: E741  # the letters of the notation


class Draft:
    """Draws one action after the other from those that nothing stands in the way of."""

    def __init__(self, random: Random) -> None:
        ranks = random.randint(1, 4)
        self.random, self.m = random, random.randint(1, 4)
        # Every rank has a stage; further ones are anywhere.
        self.placement = [*range(ranks), *(random.randrange(ranks) for _ in range(random.randint(0, 3)))]
        random.shuffle(self.placement)
        self.stages = len(self.placement)
        visits = [(stage, i) for stage in range(self.stages) for i in range(self.m)]
        self.split = {visit for visit in visits if random.random() < 0.3}
        self.recomputed = {visit for visit in visits if random.random() < 0.5}
        self.late = {visit for visit in self.recomputed if random.random() < 0.3}
        self.orders = [[] for _ in range(ranks)]
        self.done = set()

    def schedule(self) -> Schedule:
        while ready := [action for action in self.actions() if self.is_ready(action)]:
            action = self.random.choice(ready)
            self.orders[self.placement[action.stage]].append(action)
            self.done.add(action)
        segments = [Segments(early, early + self.random.randint(0, 2)) for early in range(1, self.stages + 1)]
        return Schedule(
            "random",
            tuple(map(tuple, self.orders)),
            tuple(self.placement),
            self.m,
            frozenset(self.late),
            tuple(segments) if self.random.random() < 0.5 else (),
        )

    def actions(self):
        for stage in range(self.stages):
            for i in range(self.m):
                kinds = (F, I, W) if (stage, i) in self.split else (F, B)
                for kind in (*kinds, R) if (stage, i) in self.recomputed else kinds:
                    action = Action(stage, kind, i)
                    if action not in self.done:
                        yield action

    def is_ready(self, action) -> bool:
        return all(need in self.done for need in needs(action, self.stages, self.split, self.recomputed, self.late))


def needs(action, stages, split, recomputed, late):
    """What must be done before ``action``."""
    stage, kind, i = action
    above = (stage + 1, I if (stage + 1, i) in split else B, i)
    if kind is F:
        return [Action(stage - 1, F, i)] if stage else []
    if kind is W:
        return [Action(stage, I, i)]
    gradient = [Action(*above)] if stage < stages - 1 else []
    if kind is R:
        return [Action(stage, F, i), *(gradient if (stage, i) in late else [])]
    recompute = [Action(stage, R, i)] if (stage, i) in recomputed else []
    return [Action(stage, F, i), *gradient, *recompute]


@cache
def random_step(seed: int):
    """A schedule, its costs and links; bytes are whole, so that sums of them are exact."""
    random = Random(seed)
    draft = Draft(random)
    schedule = draft.schedule()
    costs = [
        StageCosts(
            *(random.choice([0.0, random.random(), 3 * random.random()]) for _ in range(4)),
            saved_bytes=random.randint(0, 100),
            boundary_bytes=random.randint(0, 10),
            static_bytes=random.randint(0, 5),
        )
        for _ in range(schedule.stages)
    ]
    links = [
        Link(random.choice([0.0, random.random()]), random.choice([float("inf"), 1 + 20 * random.random()]))
        for _ in range(schedule.stages - 1)
    ]
    return draft, schedule, costs, links
