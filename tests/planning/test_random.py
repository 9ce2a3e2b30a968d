"""1,000 random schedules with heterogeneous costs: what holds for all of them."""
from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise, zip_longest
from random import Random

import pytest

from tests.planning.random_steps import needs, random_step
from tests.slow import few
from torchckpt.planning import Kind, Link, State, bound, quickest, simulate
from torchckpt.planning.step.placement import without

NEAR = 1e-9
SEEDS = range(1000)
COSTS = ("forward_seconds", "input_grad_seconds", "weight_grad_seconds", "recompute_seconds")

in_ten_parts = pytest.mark.parametrize(
    "seeds",
    [pytest.param(SEEDS[start::10], marks=pytest.mark.slow if start >= 3 else ()) for start in range(10)],
    ids=str,
)


def travel(schedule, costs, links, lower):
    """Seconds between stage ``lower`` and the next one."""
    if schedule.placement[lower] == schedule.placement[lower + 1]:
        return 0.0
    return links[lower].latency_seconds + costs[lower + 1].message_bytes / links[lower].bandwidth


@few(1)
@in_ten_parts
def test_nothing_is_used_twice_at_a_time_nor_left_idle(seeds):
    for seed in seeds:
        _, schedule, costs, links, choices = random_step(seed)
        timeline = simulate(schedule, costs, links, choices, exposed=False)
        used = defaultdict(list)
        for event in timeline.events:
            used[event.rank].append((event.start_seconds, event.end_seconds))
        for message in timeline.messages:
            wire = schedule.placement[message.action.stage], schedule.placement[message.to_stage]
            used[wire].append((message.sent_seconds, message.arrived_seconds))
        for spans in used.values():
            spans.sort()
            assert all(before[1] <= after[0] for before, after in pairwise(spans)), seed
        ends = {event.action: event.end_seconds for event in timeline.events}
        for message in timeline.messages:
            wire = schedule.placement[message.action.stage], schedule.placement[message.to_stage]
            free = [ends[message.action], *(arrived for _, arrived in used[wire])]
            assert message.sent_seconds in free, (seed, message)  # at once, or when the one before it is there


@in_ten_parts
def test_every_dependency_holds_and_nothing_waits_longer_than_it_must(seeds):
    for seed in seeds:
        draft, schedule, costs, links, choices = random_step(seed)
        timeline = simulate(schedule, costs, links, choices, exposed=False)
        ends = {event.action: event.end_seconds for event in timeline.events}
        late = {visit for visit, choice in choices.items() if choice.late}
        arrivals = {(m.action, m.to_stage): m for m in timeline.messages}
        last = defaultdict(float)
        for event, after in zip_longest(timeline.events, timeline.events[1:]):
            there = [last[event.rank]]
            awaited = needs(event.action, draft.stages, draft.split, draft.recomputed - draft.late)
            if after and is_late(event, after, late):  # it waits for the gradient, as its backward does
                backward = needs(after.action, draft.stages, draft.split, ())
                awaited += [need for need in backward if need.stage != after.action.stage]
            for need in awaited:
                message = arrivals.get((need, event.action.stage))
                if message is None:
                    assert schedule.placement[need.stage] == event.rank
                    there.append(ends[need])
                    continue
                seconds = travel(schedule, costs, links, min(need.stage, event.action.stage))
                assert message.sent_seconds >= ends[need]
                assert message.arrived_seconds == pytest.approx(message.sent_seconds + seconds)
                there.append(message.arrived_seconds)
            assert event.start_seconds == max(there), (seed, event)
            last[event.rank] = event.end_seconds


def is_late(event, after, late):
    """Whether a recompute is that of the late blocks: right before its backward, and after one of the early blocks."""
    action, following = event.action, after.action
    is_before = action[::2] == following[::2] and following.kind in (Kind.BACKWARD, Kind.INPUT_GRAD)
    return action.kind is Kind.RECOMPUTE and is_before and action[::2] in late


@in_ten_parts
def test_memory_is_never_negative_and_ends_where_it_began(seeds):
    for seed in seeds:
        _, schedule, costs, links, choices = random_step(seed)
        for curve in simulate(schedule, costs, links, choices, exposed=False).memory:
            assert min(amount for _, amount in curve) == 0 == curve[-1][1], seed
            times = [time for time, _ in curve]
            assert times == sorted(times)


@few(1)
@in_ten_parts
def test_time_is_monotone_in_every_cost(seeds):
    for seed in seeds:
        random = Random(seed)
        _, schedule, costs, links, choices = random_step(seed)
        step = simulate(schedule, costs, links, choices, exposed=False).step_seconds
        for name in COSTS:
            stage, more = random.randrange(schedule.stages), list(costs)
            first, *others = costs[stage].blocks
            slower = replace(first, **{name: getattr(first, name) + 1})
            more[stage] = replace(costs[stage], blocks=(slower, *others))
            assert simulate(schedule, more, links, choices, exposed=False).step_seconds >= step - NEAR, (seed, name)
        if links:
            slow = [Link(link.latency_seconds + 0.5, link.bandwidth / 2) for link in links]
            assert simulate(schedule, costs, slow, choices, exposed=False).step_seconds >= step - NEAR, seed


@few(1)
@in_ten_parts
def test_exposed_time_is_at_least_the_bound(seeds):
    for seed in seeds:
        _, schedule, costs, links, choices = random_step(seed)
        step = simulate(schedule, costs, links, choices, exposed=False).step_seconds
        plain = simulate(without(schedule), costs, links, exposed=False).step_seconds
        own, any_order = (bound(schedule, costs, links, choices, any_order=free) for free in (False, True))
        assert own.plain_seconds == pytest.approx(plain)
        assert step - plain >= own.overhead_seconds - NEAR, seed
        assert any_order.plain_seconds <= plain + NEAR, seed
        assert any_order.step_seconds <= step + NEAR, seed
        for supply in (*own.supplies, *any_order.supplies):
            parts = supply.bubble_seconds, supply.stall_seconds, supply.collective_seconds, supply.exposed_seconds
            assert min(parts) >= -NEAR
            assert sum(parts) == pytest.approx(supply.recompute_seconds)


@few(1)
@in_ten_parts
def test_the_critical_path_has_no_gap(seeds):
    for seed in seeds:
        _, schedule, costs, links, choices = random_step(seed)
        timeline = simulate(schedule, costs, links, choices)
        spans = [
            (entry.start_seconds, entry.end_seconds) if hasattr(entry, "rank") else
            (entry.sent_seconds, entry.arrived_seconds)
            for entry in timeline.critical_path
        ]
        assert spans[0][0] == 0, seed
        assert spans[-1][1] == timeline.step_seconds, seed
        assert all(before[1] == after[0] for before, after in pairwise(spans)), seed


@few(1)
@in_ten_parts
def test_recomputes_are_placed_no_later_than_they_must(seeds):
    for seed in seeds:
        draft, schedule, costs, links, _ = random_step(seed)
        plain, choices = without(schedule), dict.fromkeys(draft.recomputed, State.EARLY)
        least = simulate(plain, costs, links, exposed=False).step_seconds
        for k in (1, 2):
            placed = quickest(plain, choices, costs, links, k)
            assert simulate(placed, costs, links, choices, exposed=False).step_seconds >= least - NEAR
            assert without(placed) == plain, seed
