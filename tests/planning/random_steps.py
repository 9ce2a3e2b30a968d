"""Random schedules that can run, by construction, and random costs."""
from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import chain
from random import Random

from torchckpt.planning.order.schedule import Action, Kind, Schedule
from torchckpt.planning.step.boundary import levels_of_places
from torchckpt.planning.step.simulated import Step
from torchckpt.planning.work.block import Block, Link, Stage, fixed
from torchckpt.planning.work.choice import Choice
from torchckpt.planning.work.host import Boundary, Host, Move

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
        self.blocks = [random.randint(1, 3) for _ in range(self.stages)]
        self.orders = [[] for _ in range(ranks)]
        self.done = set()

    def schedule(self) -> Schedule:
        while ready := [action for action in self.actions() if self.is_ready(action)]:
            action = self.random.choice(ready)
            self.orders[self.placement[action.stage]].append(action)
            self.done.add(action)
        return Schedule("random", tuple(map(tuple, self.orders)), tuple(self.placement), self.m)

    def choices(self):
        """Of what is recomputed: some blocks early, if there is an R; else some blocks late."""
        return {visit: self.choice(visit) for visit in sorted(self.recomputed)}

    def choice(self, visit):
        blocks = list(range(self.blocks[visit[0]]))
        self.random.shuffle(blocks)
        kept, early = (sorted(self.random.sample(range(len(blocks) + 1), 2)) if len(blocks) > 1 else (0, 1))
        first, second = tuple(sorted(blocks[kept:early])), tuple(sorted(blocks[early:]))
        if visit in self.late:
            return Choice(tuple(sorted(blocks[:kept])), (), tuple(sorted((*first, *second))))
        return Choice(tuple(sorted(blocks[:kept])), first, second)

    def actions(self):
        for stage in range(self.stages):
            for i in range(self.m):
                kinds = (F, I, W) if (stage, i) in self.split else (F, B)
                for kind in (*kinds, R) if (stage, i) in self.recomputed - self.late else kinds:
                    action = Action(stage, kind, i)
                    if action not in self.done:
                        yield action

    def is_ready(self, action) -> bool:
        return all(need in self.done for need in needs(action, self.stages, self.split, self.recomputed - self.late))


def needs(action, stages, split, early):
    """What must be done before ``action``."""
    stage, kind, i = action
    above = (stage + 1, I if (stage + 1, i) in split else B, i)
    if kind is F:
        return [Action(stage - 1, F, i)] if stage else []
    if kind is W:
        return [Action(stage, I, i)]
    gradient = [Action(*above)] if stage < stages - 1 else []
    if kind is R:
        return [Action(stage, F, i)]
    recompute = [Action(stage, R, i)] if (stage, i) in early else []
    return [Action(stage, F, i), *gradient, *recompute]


@cache
def random_step(seed: int):
    """A draft, its schedule, stages, links and choices; bytes are whole, so that sums of them are exact."""
    random = Random(seed)
    draft = Draft(random)
    schedule = draft.schedule()
    blocks = [tuple(_block(random) for _ in range(count)) for count in draft.blocks]
    stages = [Stage(each, message_bytes=random.randint(0, 10)) for each in blocks]
    links = [
        Link(random.choice([0.0, random.random()]), random.choice([float("inf"), 1 + 20 * random.random()]))
        for _ in range(schedule.stages - 1)
    ]
    return draft, schedule, stages, links, draft.choices()


def _block(random):
    boundary = random.randint(0, 10)
    seconds = [random.choice([0.0, random.random(), 3 * random.random()]) for _ in range(4)]
    return Block(*seconds, boundary + random.randint(0, 100), boundary, random.randint(0, 5))


def random_moves(seed: int) -> Step:
    """The random step with parts before and after its blocks, of which blocks that were kept are away, and a host."""
    random = Random(seed)
    _, schedule, stages, links, choices = random_step(seed)
    stages = tuple(replace(stage, before=_part(random), after=_part(random)) for stage in stages)
    away, moves = {}, []
    for order in schedule.ranks:
        at = [(index, block) for index, action in enumerate(order) for block in _boundaries(stages, action)]
        for stage, i in {action.visit for action in order}:
            choice = choices.get((stage, i), Choice(tuple(range(len(stages[stage].blocks)))))
            gone = tuple(block for block in choice.kept if random.random() < 0.6)
            away[stage, i] = replace(choice, kept=tuple(b for b in choice.kept if b not in gone), away=gone)
            forward = order.index((stage, F, i))
            backward = next(order.index((stage, kind, i)) for kind in (B, I) if (stage, kind, i) in order)
            for block in gone:
                places = at[at.index((forward, block)) + 1 : at.index((backward, block)) + 1]
                release, issue = sorted(random.choices(range(len(places)), k=2))
                between = Boundary(*places[release]), Boundary(*places[issue])
                moves.append(Move(stage, i, block, *between, random.choice((0, 0, 1, 9))))
    rates = [random.choice([5.0, 50.0, 500.0]) for _ in range(2)]
    host = Host(1e9, *rates, half_duplex=random.random() < 0.5, drag=random.choice([0.0, 0.25]))
    return Step(schedule, stages, tuple(links), away, tuple(moves), host)


def _boundaries(stages, action):
    n = len(stages[action.stage].blocks)
    return {F: range(n + 1), R: range(1), W: range(1)}.get(action.kind, range(n, -1, -1))


def _part(random):
    return fixed(*(random.choice([0.0, random.random()]) for _ in range(3)), random.randint(0, 20))

def boundary_levels(step: Step, rank: int) -> dict[tuple[int, int], tuple[float, float]]:
    """The most bytes of ``rank``, which has moves, from each boundary to the next, and the bytes there at its end."""
    places, levels = step.places[rank], levels_of_places(step.places[rank], step.stages)
    pairs = zip(chain.from_iterable(places), chain.from_iterable(levels))
    return {tuple(place.boundary): (level.highest, level.left) for place, level in pairs}
