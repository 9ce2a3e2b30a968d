from __future__ import annotations

from random import Random

import pytest

from tests.planning.remat.flows import random_dag, random_step
from torchckpt.planning.remat.flow import profile as profile_module
from torchckpt.planning.remat.flow.dataflow import Dataflow, Schedule, Tables
from torchckpt.planning.remat.flow.incremental import Stages
from torchckpt.planning.remat.flow.memory import simulate
from torchckpt.planning.remat.flow.profile import BlockProfile, Profile, profile


def peaks_by_stage(flow: Dataflow, schedule: Schedule) -> list[int]:
    """What the simulator says, the most of each first run and the repeats before it."""
    seen: set[int] = set()
    found, most = [], 0
    for index, bytes_ in zip(schedule, simulate(flow, schedule).bytes_during):
        most = max(most, bytes_)
        if index not in seen:
            seen.add(index)
            found.append(most)
            most = 0
    return found


def disturb(stages: Stages, random: Random, times: int) -> list[tuple[int, int]]:
    """Add and remove repeats at random; those that are there."""
    tables, there = stages.tables, [(t, p) for t, repeats in enumerate(stages.repeats) for p in repeats]
    for _ in range(times):
        if there and random.random() < 0.4:
            stages.remove(*there.pop(random.randrange(len(there))))
        elif (position := random.randrange(tables.count)) + 1 < tables.count:
            stage = random.randrange(position + 1, tables.count)
            if tables.may_repeat(position, stage) and (stage, position) not in there:
                there.append((stage, position))
                stages.add(stage, position)
    return there


def during(stages: Stages) -> list[int]:
    return [stages.during.at(stage) for stage in range(stages.tables.count)]


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_it_sees_the_memory_that_the_simulator_sees(
    seed: int, blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if blocks:
        monkeypatch.setattr(profile_module, "_PLAIN", 1)
    random = Random(seed)
    for flow in (random_step(12, seed), random_dag(20, seed)):
        stages = Stages(Tables(flow))
        assert isinstance(stages.during, BlockProfile) == blocks
        assert during(stages) == peaks_by_stage(flow, flow.eager)
        for _ in range(15):
            disturb(stages, random, 5)
            schedule = stages.schedule()
            assert during(stages) == peaks_by_stage(flow, schedule)
            assert stages.peak_bytes == simulate(flow, schedule).peak_bytes


@pytest.mark.parametrize("seed", range(4))
def test_going_back_restores_everything(seed: int) -> None:
    flow = random_dag(20, seed)
    stages = Stages(Tables(flow))
    disturb(stages, Random(seed), 20)
    before, mark = (stages.schedule(), during(stages)), len(stages.log)
    disturb(stages, Random(seed + 1), 20)
    stages.back(mark)
    assert (stages.schedule(), during(stages)) == before
    stages.back(0)
    assert stages.schedule() == tuple(flow.eager)
    assert stages.cost == pytest.approx(0.0, abs=1e-9)


def test_the_cost_is_that_of_the_repeats_and_a_trifle_each() -> None:
    flow = random_dag(20, seed=3)
    stages = Stages(Tables(flow))
    there = disturb(stages, Random(0), 30)
    assert stages.cost == pytest.approx(sum(flow.operations[p].repeat.seconds for _, p in there), rel=1e-3)


@pytest.mark.parametrize("seed", range(4))
def test_blocks_answer_as_a_plain_list_does(seed: int) -> None:
    random = Random(seed)
    values = [random.randrange(100) for _ in range(50)]
    plain, blocks = Profile(values), BlockProfile(values)
    for _ in range(200):
        first, end = sorted((random.randrange(51), random.randrange(51)))
        more, limit = random.randrange(-20, 20), random.randrange(150)
        plain.add(first, end, more)
        blocks.add(first, end, more)
        assert blocks.most(first, end) == plain.most(first, end)
        assert blocks.over(first, limit) == plain.over(first, limit)
        assert [blocks.at(stage) for stage in range(50)] == [plain.at(stage) for stage in range(50)]


def test_a_long_profile_comes_in_blocks() -> None:
    assert type(profile([0] * 10)) is Profile
    assert type(profile([0] * 10_000)) is BlockProfile
