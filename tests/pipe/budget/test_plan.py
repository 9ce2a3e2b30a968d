"""Plans for steps on paper: as good as every choice tried, and never slower with more budget."""
from __future__ import annotations

from itertools import combinations, product
from random import Random

import pytest
import torch
from torch import nn

from tests.pipe.budget.models import Wide
from tests.slow import few, slow
from torchckpt import BudgetInfeasible
from torchckpt.pipe.budget.count import Counted
from torchckpt.pipe.budget.plan import blocks_of, fit, graph_order, placement_of, step_order
from torchckpt.pipe.partition import ChangedInputs, Layer, Stage
from torchckpt.pipe.run.step import with_replays
from torchckpt.planning import Block, Choice, Kind, Link, with_recompute
from torchckpt.planning import Stage as Work
from torchckpt.planning.step.measured import Span
from torchckpt.planning.step.simulated import Step
from torchckpt.planning.work.choice import arrival

BOUNDARY = 500


def random_stages(seed, stages, most):
    """Stages of unlike blocks."""
    random = Random(seed)
    each = [[random.uniform(0.5, 2) for _ in range(random.randint(1, most))] for _ in range(stages)]
    return tuple(
        Work(tuple(Block(*[one] * 4, random.randint(1000, 40000) + BOUNDARY, BOUNDARY) for one in seconds))
        for seconds in each
    )


def counted(order, stages):
    """A step that recomputes everything, and takes what the stages say and nothing beside it."""
    step = Step(order, stages, (Link(),) * (len(stages) - 1), arrival(order))
    times = [[] for _ in order.ranks]
    for event in step.timeline.events:
        times[event.rank].append(Span(event.action, event.start_seconds, event.start_seconds, event.end_seconds))
    levels = [dict(zip(actions, step.levels(rank))) for rank, actions in enumerate(order.ranks)]
    return Counted(stages, times, levels)


def every_choice(order, stages):
    """All ways to keep blocks, each with what is not kept replayed where the graph does, and late."""
    visits = [(stage, i) for stage in range(len(stages)) for i in range(order.micro_batches)]
    subsets = [
        [kept for count in range(len(work.blocks) + 1) for kept in combinations(range(len(work.blocks)), count)]
        for work in stages
    ]
    for kept in product(*(subsets[stage] for stage, _ in visits)):
        rest = [tuple(set(range(len(stages[stage].blocks))) - {*one}) for (stage, _), one in zip(visits, kept)]
        yield {visit: Choice(kept=one, late=other) for visit, one, other in zip(visits, kept, rest)}
        yield {visit: Choice(kept=one, early=other) for visit, one, other in zip(visits, kept, rest)}


@few(1)
@pytest.mark.parametrize("seed", range(4))
def test_every_choice_is_tried(seed):
    stages = random_stages(seed, 2, 2)
    order = graph_order((0, 1), 2).schedule
    links = (Link(),)
    steps = [
        Step(with_recompute(order, choices), stages, links, choices) for choices in every_choice(order, stages)
    ]
    tried = [(step.peak_bytes, step.seconds) for step in steps]
    took = counted(order, stages)
    planned = 0
    for share in range(30, 101, 10):
        try:
            found = fit(order, took, f"{share}%", 1)
        except BudgetInfeasible:
            continue
        limits = found.budget_bytes
        best = min(seconds for peaks, seconds in tried if all(map(float.__le__, map(float, peaks), limits)))
        assert found.fits
        assert all(peak <= limit for peak, limit in zip(found.plan.peak_bytes, limits))
        assert found.plan.step_seconds <= 1.03 * best
        planned += 0 < found.plan.recomputed_share < 1
    assert planned


@few(1)
@pytest.mark.parametrize("order", [graph_order, step_order])
@pytest.mark.parametrize("seed", [0, 1, 3, 4, 5, *slow([2])])
def test_more_budget_is_never_slower(seed, order):
    stages = 1 + seed % 3
    made = random_stages(seed, stages, 2)
    schedule = order(tuple(range(stages)), 3).schedule
    took, before = counted(schedule, made), float("inf")
    for share in range(30, 101, 10):
        try:
            found = fit(schedule, took, f"{share}%", 1 if order is graph_order else None)
        except BudgetInfeasible:
            continue
        # In the graph's order the search may miss a plan that it found for less, by up to 2 % (docs/limits.md).
        assert found.plan.step_seconds <= before * (1.02 if order is graph_order else 1 + 1e-9)
        before = min(before, found.plan.step_seconds)
    assert before == found.plan.keep_all_seconds


def test_recomputes_of_the_graph_stand_where_its_lanes_have_them():
    stages = random_stages(0, 2, 2)
    order = graph_order((0, 1), 4)
    plan = fit(order.schedule, counted(order.schedule, stages), "60%", 2).plan
    assert plan.schedule == with_recompute(order.schedule, plan.choices, 2)
    launched = with_replays(order.launched, plan.schedule)
    assert [one for one in launched if one.kind is not Kind.RECOMPUTE] == list(order.launched)


def test_stages_on_one_device_are_one_rank():
    assert [one.kind.value + str(one.stage) for one in graph_order((0, 0, 1), 1).schedule.ranks[0]] == [
        "F0", "F1", "B1", "B0",
    ]  # fmt: skip
    assert [str(one) for one in step_order((0, 0), 2).launched] == [
        "0F0", "0F1", "1F0", "1B0", "0B0", "1F1", "1B1", "0B1",
    ]  # fmt: skip


def test_ranks():
    def ranks(*devices):
        layers = [Layer("0", nn.ReLU())]
        homes = enumerate(map(torch.device, devices))
        return placement_of([Stage(n, n, layers, device, ChangedInputs()) for n, device in homes])

    assert ranks("cpu", "cpu", "meta:0", "cpu") == (0, 1, 2, 3)
    assert ranks("meta:0", "meta:0", "meta:1", "meta:0") == (0, 0, 1, 0)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)], [3]),
        ([Wide(2), nn.ReLU(), Wide(2), nn.LayerNorm(2), nn.Linear(2, 2)], [2, 1, 2]),
        ([nn.Embedding(2, 2), nn.Dropout(), Wide(2), Wide(2), nn.Linear(2, 2), nn.ReLU()], [2, 1, 1, 2]),
        ([nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2), nn.Sequential()], [1, 2]),
    ],
)
def test_blocks(layers, expected):
    assert blocks_of(layers) == expected
