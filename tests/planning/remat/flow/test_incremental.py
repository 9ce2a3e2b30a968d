from __future__ import annotations

from random import Random

import pytest

from tests.planning.remat.flows import random_dag, random_step
from tests.planning.remat.random_flows import random_flow
from torchckpt.planning.remat.flow.dataflow import Dataflow, Schedule, Tables
from torchckpt.planning.remat.flow.incremental import Draft, Profile
from torchckpt.planning.remat.flow.memory import simulate


def peaks_by_position(flow: Dataflow, schedule: Schedule) -> list[int]:
    """What the simulator says, the most of each first run and the repeats before it."""
    seen: set[int] = set()
    peaks, most = [], 0
    for index, bytes_ in zip(schedule, simulate(flow, schedule).bytes_during):
        most = max(most, bytes_)
        if index not in seen:
            seen.add(index)
            peaks.append(most)
            most = 0
    return peaks


def disturb(draft: Draft, random: Random, times: int) -> list[tuple[int, int]]:
    """Add and remove repeats at random. Returns those that the draft has then."""
    tables, present = draft.tables, draft.all_repeats()
    for _ in range(times):
        if present and random.random() < 0.4:
            draft.remove(*present.pop(random.randrange(len(present))))
        elif (repeated := random.randrange(tables.count)) + 1 < tables.count:
            position = random.randrange(repeated + 1, tables.count)
            if tables.may_repeat(repeated, position) and (position, repeated) not in present:
                present.append((position, repeated))
                draft.add(position, repeated)
    return present


def during(draft: Draft) -> list[int]:
    return [draft.during.at(position) for position in range(draft.tables.count)]


@pytest.mark.parametrize("seed", range(6))
def test_it_sees_the_memory_that_the_simulator_sees(seed: int) -> None:
    random = Random(seed)
    for flow in (random_step(12, seed), random_dag(20, seed)):
        draft = Draft(Tables(flow))
        assert during(draft) == peaks_by_position(flow, flow.eager)
        for _ in range(15):
            disturb(draft, random, 5)
            schedule = draft.schedule()
            assert during(draft) == peaks_by_position(flow, schedule)
            assert draft.peak_bytes == simulate(flow, schedule).peak_bytes


@pytest.mark.parametrize("seed", range(4))
def test_going_back_restores_everything(seed: int) -> None:
    flow = random_dag(20, seed)
    draft = Draft(Tables(flow))
    disturb(draft, Random(seed), 20)
    before, mark = (draft.schedule(), during(draft)), len(draft.log)
    disturb(draft, Random(seed + 1), 20)
    draft.back(mark)
    assert (draft.schedule(), during(draft)) == before
    draft.back(0)
    assert draft.schedule() == tuple(flow.eager)
    assert draft.cost == pytest.approx(0.0, abs=1e-9)


def test_the_cost_is_that_of_the_repeats_and_a_trifle_each() -> None:
    flow = random_dag(20, seed=3)
    draft = Draft(Tables(flow))
    repeats = disturb(draft, Random(0), 30)
    assert draft.cost == pytest.approx(sum(flow.operations[p].repeat.seconds for _, p in repeats), rel=1e-3)


@pytest.mark.parametrize("seed", range(4))
def test_blocks_answer_as_a_plain_list_does(seed: int) -> None:
    random = Random(seed)
    values = [random.randrange(100) for _ in range(50)]
    blocks = Profile(values)
    for _ in range(200):
        first, end = sorted((random.randrange(51), random.randrange(51)))
        more, limit = random.randrange(-20, 20), random.randrange(150)
        values[first:end] = [value + more for value in values[first:end]]
        blocks.add(first, end, more)
        assert blocks.most(first, end) == max(values[first:end], default=0)
        assert blocks.over(first, limit) == next((p for p in range(first, 50) if values[p] > limit), 50)
        assert [blocks.at(position) for position in range(50)] == values


@pytest.mark.parametrize("seed", range(6))
def test_a_second_draft_of_the_same_tables_sees_the_same_memory(seed: int) -> None:
    """New values of buffers are alive to the end of the forward. Each draft counted them once more."""
    flow = random_flow(seed, 20)
    tables = Tables(flow)
    assert during(Draft(tables)) == during(Draft(tables)) == peaks_by_position(flow, flow.eager)
