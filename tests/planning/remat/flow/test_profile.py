"""What is alive inside of one position, changed one repeat at a time, is what simulating all of it says."""
from __future__ import annotations

import random

import pytest

from tests.planning.remat import flows
from torchckpt.planning.remat.flow.dataflow import Tables
from torchckpt.planning.remat.flow.profile import PositionMemory


def simulated(tables, position, repeats, needed_later):
    """By the definition: each step with what it reads, what it writes, and what a later one touches."""
    def touched(step):
        if step == position:
            staying = tables.staying if position == tables.forward - 1 else ()
            return {*tables.first_reads[position], *staying}, set(tables.first_writes[position])
        return set(tables.repeat_reads[step]), set(tables.repeat_writes[step])

    steps = [*repeats, position]
    every = {storage for step in steps for part in touched(step) for storage in part}
    born = {storage: place for place, step in enumerate(steps) for storage in touched(step)[1]}
    last = {storage: place for place, step in enumerate(steps) for part in touched(step) for storage in part}
    peak = 0
    for place, step in enumerate(steps):
        alive = [s for s in every if born.get(s, 0) <= place and (place <= last[s] or s in needed_later)]
        extra = tables.first_extra_bytes[position] if step == position else tables.repeat_extra_bytes[step]
        peak = max(peak, sum(tables.sizes[storage] for storage in alive) + extra)
    return peak


@pytest.mark.parametrize("flow", [flows.random_step(12, 1), flows.mlp(6), flows.random_step(20, 3)])
@pytest.mark.parametrize("seed", range(5))
def test_is_that_of_a_simulation_of_its_steps(flow, seed):
    tables, draw = Tables(flow, frozenset()), random.Random(seed)
    position = draw.randrange(tables.forward, tables.count)
    memory, repeats, needed_later = PositionMemory(tables, position), [], set()
    able = [repeated for repeated in range(tables.forward - 1) if tables.repeat_writes[repeated]]
    for _ in range(60):
        repeated = draw.choice(able)
        memory.change(repeated, repeated not in repeats)
        repeats = sorted({repeated} ^ set(repeats))
        needed_later = {storage for storage in memory.storages() if draw.random() < 0.3}
        for storage in [*memory.storages()]:
            memory.set_needed_later(storage, storage in needed_later)
        if repeats:
            assert memory.peak_bytes(repeats) == simulated(tables, position, repeats, needed_later)


def test_what_it_does_not_touch_cannot_leave_it():
    tables = Tables(flows.mlp(3), frozenset())
    memory = PositionMemory(tables, tables.count - 1)
    before = memory.peak_bytes([])
    untouched = next(storage for storage in range(len(tables.sizes)) if storage not in set(memory.storages()))
    memory.set_needed_later(untouched, True)
    assert memory.peak_bytes([]) == before
