"""Random cells: a named schedule with costs and links, of every family."""
from __future__ import annotations

from random import Random

from torchckpt.planning import NAMES
from torchckpt.planning.order.schedule import Schedule
from torchckpt.planning.order.schedules import named_schedule
from torchckpt.planning.work.block import Block, Link


def random_schedule(random: Random, most: int = 6) -> Schedule:
    name = random.choice(NAMES)
    p = random.randint(2, most)
    m = p * random.randint(1, 4)
    if name == "dualpipe_v":
        m = max(m, 2 * p)
    if name in ("1f1b", "eager_1f1b", "gpipe", "looped_bfs", "zbv"):
        m += random.randint(0, 2)
    return named_schedule(name, p, m)


def random_cell(random: Random) -> tuple[Schedule, list[Block], Link]:
    """Stages that cost alike, or each its own; a link of no time, or of up to a forward."""
    schedule = random_schedule(random)
    alike = random.random() < 0.5
    first = _costs(random)
    costs = [first if alike else _costs(random) for _ in range(schedule.stages)]
    return schedule, costs, Link(random.choice([0.0, random.random()]))


def _costs(random: Random) -> Block:
    return Block(
        forward_seconds=random.uniform(0.5, 1.5),
        input_grad_seconds=random.uniform(0.3, 1.3),
        weight_grad_seconds=random.uniform(0.3, 1.3),
        recompute_seconds=random.uniform(0.3, 1.5),
        boundary_bytes=random.uniform(0.0, 0.2),
    )
