"""Random pipelines: a schedule of any family, stages of equal or unequal blocks, links, and a budget that works."""
from __future__ import annotations

from dataclasses import replace
from random import Random

from torchckpt.planning import Block, Stage, fixed
from torchckpt.planning.order.schedules import named_schedule
from torchckpt.planning.plan.problem import problem_of

NAMES = ("1f1b", "gpipe", "eager_1f1b", "interleaved_1f1b", "looped_bfs", "zero_bubble", "zbv", "dualpipe_v")


def random_pipeline(random: Random, actions: int = 2000):
    """Arguments of ``plan_pipeline``. At most so many forwards."""
    while True:
        name = random.choice((*NAMES, "1f1b", "zero_bubble"))
        p = random.choice((2, 2, 3, 4, 4, 6, 8, 8, 12, 16))
        m = random.choice((1, 2, 3, 4, 6, 8)) * p + random.choice((0, 0, 1))
        m = random.choice((m, m, m, random.randint(1, 256)))
        try:
            schedule = named_schedule(name, p, m)
        except ValueError:
            continue
        if schedule.stages * m <= actions:
            break
    most = random.choice((1, 2, 4, 8, 8, 12, 20))
    stages = random_stages(random, schedule.stages, max(1, most * p // schedule.stages))
    forward = sum(stage.forward_seconds for stage in stages) / len(stages)
    link = random.choice((0.0, 0.0, 0.1, 0.3, 1.0)) * forward * random.uniform(0.5, 1.0)
    whole = problem_of(schedule, stages, 1.0, link)
    top, least = max(whole.keep_all.peak_bytes), max(whole.least_bytes)
    share = random.random()
    budget = least + (top - least) * share
    if random.random() < 0.2:
        pairs = zip(whole.keep_all.peak_bytes, whole.least_bytes)
        budget = [max(low, random.uniform(0.3, 1.0) * high, 1e-3) for high, low in pairs]
    return schedule, stages, budget, link


def random_stages(random: Random, count: int, most: int):
    """Alike; or alike but for noise; or of a few kinds of blocks; or each block its own."""
    kind = random.choice(("alike", "alike", "noise", "kinds", "own"))
    boundary = random.choice((0.0, 0.06, 0.2))
    base = Block(boundary_bytes=boundary)
    if random.random() < 0.3:
        base = replace(base, recompute_seconds=random.uniform(0.5, 1.2), weight_grad_seconds=random.uniform(0.5, 1.5))
    kinds = [random_block(random, boundary) for _ in range(random.choice((2, 3)))]
    even = random.random() < 0.6
    stages = []
    for _ in range(count):
        n = most if even else random.randint(1, most)
        if kind == "alike":
            blocks = [base] * n
        elif kind == "noise":
            blocks = [replace(base, forward_seconds=base.forward_seconds * random.uniform(0.9, 1.1))] * n
        elif kind == "kinds":
            blocks = [kinds[at % len(kinds)] for at in range(n)]
        else:
            blocks = [random_block(random, boundary) for _ in range(n)]
        if random.random() < 0.1:
            place = random.randrange(n)
            blocks[place] = replace(blocks[place], boundary_bytes=blocks[place].saved_bytes)
        stages.append(Stage(tuple(blocks)))
    if random.random() < 0.1:
        place = random.randrange(count)
        bare = Stage((), before=fixed(0.5, 0.5, 0.0, 0.3), message_bytes=0.1)
        stages[place] = bare if any(stage.blocks for at, stage in enumerate(stages) if at != place) else stages[place]
    if random.random() < 0.5:
        stages[0] = replace(stages[0], before=fixed(0.1, 0.0, 0.1, 0.02))
        stages[-1] = replace(stages[-1], after=fixed(1.0, 1.0, 1.0, 2.0))
    return stages


def random_block(random: Random, boundary: float) -> Block:
    forward = random.choice((0.25, 0.5, 1.0, 1.0, 2.0)) * random.uniform(0.8, 1.2)
    saved = random.choice((0.5, 1.0, 1.0, 2.0)) * random.uniform(0.8, 1.2)
    return Block(forward, forward, forward * random.choice((0.5, 1.0)), forward, saved, boundary * saved)


def random_tiny(random: Random):
    """Of at most two ranks, three micro-batches and two blocks a stage; of two stages a rank, one block each."""
    while True:
        name, p, m = random.choice(NAMES), random.choice((1, 2, 2)), random.choice((1, 2, 3))
        try:
            schedule = named_schedule(name, p, m)
        except ValueError:
            continue
        if schedule.stages * m <= 8:
            break
    stages = random_stages(random, schedule.stages, 1 if schedule.stages > p else 2)
    link = random.choice((0.0, 0.0, 0.3, 1.0))
    whole = problem_of(schedule, stages, 1.0, link)
    pairs = zip(whole.keep_all.peak_bytes, whole.least_bytes)
    budget = [max(1e-3, low + (high - low) * random.random()) for high, low in pairs]
    return schedule, stages, budget if random.random() < 0.3 else max(budget), link
