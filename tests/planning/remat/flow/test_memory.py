"""The simulator beside one that counts references step by step, and by hand."""
from __future__ import annotations

import random

import pytest

from tests.planning.remat.flows import random_dag, random_step
from tests.planning.remat.random_flows import random_flow
from torchckpt.errors import ArgumentError
from torchckpt.planning.remat.flow.dataflow import Dataflow, Operation
from torchckpt.planning.remat.flow.late import late
from torchckpt.planning.remat.flow.memory import Memory, Residence, lower_bound_bytes, residences, simulate

CHAIN = Dataflow(
    (
        Operation("a", (0,), (1,), 1.0),
        Operation("b", (1,), (2,), 1.0, workspace_bytes=100),
        Operation("db", (1, 2), (3,), 1.0),
        Operation("da", (0, 1, 3), (4,), 1.0),
    ),
    (1000, 10, 20, 30, 40), 2, frozenset({0}), frozenset({4}),
)
"""The input 0 counts for nothing; the gradient 4 stays to the end."""


# by hand --------------------------------------------------------------------------------------------------------------


def test_eager_chain():
    memory = simulate(CHAIN, CHAIN.eager)
    assert memory == Memory((10, 10 + 20 + 100, 10 + 20 + 30, 10 + 30 + 40), 2, (1, 2))
    assert memory.peak_bytes == 130


def test_dropped_and_recomputed():
    """1 dies after b, and is back before db."""
    memory = simulate(CHAIN, [0, 1, 0, 2, 3])
    assert memory == Memory((10, 130, 20 + 10, 60, 80), 2, (2,))


def test_result_of_the_forward_stays_and_its_repeat_is_a_copy_that_nobody_reads():
    flow = Dataflow((Operation("a", (), (0,), 1.0), Operation("b", (0,), (1,), 1.0)), (5, 7), 1, results=frozenset({0}))
    assert simulate(flow, [0, 0, 1]) == Memory((5, 10, 12), 1, (0,))


def test_forward_result_stays_to_the_end_of_the_forward():
    operations = (
        Operation("norm", (), (0, 1), 1.0), Operation("b", (0,), (2,), 1.0), Operation("db", (2,), (3,), 1.0),
    )
    flow = Dataflow(operations, (1, 50, 2, 4), 2, results=frozenset({3}), forward_results=frozenset({1}))
    assert simulate(flow, flow.eager).bytes_during == (51, 53, 6)
    assert simulate(flow, [0, 1, 2]).saved == (2,)


def test_output_that_nobody_reads_is_alive_while_it_is_written():
    flow = Dataflow((Operation("a", (), (0, 1), 1.0), Operation("b", (1,), (2,), 1.0)), (5, 6, 7), 2)
    assert simulate(flow, flow.eager).bytes_during == (11, 13)


def test_output_that_crosses_and_is_not_read_is_not_saved():
    flow = Dataflow((Operation("a", (), (0,), 1.0), Operation("b", (), (1,), 1.0)), (5, 7), 1, results=frozenset({0}))
    assert simulate(flow, flow.eager) == Memory((5, 12), 1, ())


def test_empty_step():
    assert simulate(Dataflow((), (), 0), ()) == Memory((), 0, ())
    assert simulate(Dataflow((), (), 0), ()).peak_bytes == 0


def test_residences_last_first():
    assert residences(CHAIN, [0, 1, 0, 2, 3], 2) == [
        Residence(4, 4, 4), Residence(3, 3, 4), Residence(1, 2, 4), Residence(2, 1, 3), Residence(1, 0, 1),
    ]


def test_lower_bound():
    assert lower_bound_bytes(CHAIN) == 10 + 20 + 100
    assert lower_bound_bytes(Dataflow((), (), 0)) == 0


# what is no schedule --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        ([0, 1, 2], "the schedule does not run every operation\n  received: the operation da\n  works:    schedule"),
        ([0, 2, 1, 3], "the schedule starts the backward before the forward ends\n  received: the operation db"),
        ([1, 0, 2, 3], "the schedule reads a storage before it is written\n  received: the operation b"),
        ([], "the schedule does not run every operation\n  received: the operation a"),
    ],
)
def test_schedule_that_is_none(schedule, text):
    with pytest.raises(ArgumentError) as caught:
        simulate(CHAIN, schedule)
    assert str(caught.value).startswith(text)


def test_schedule_that_repeats_what_runs_once():
    flow = Dataflow((Operation("draw", (), (0,), 1.0, repeatable=False),), (1,), 1)
    with pytest.raises(ArgumentError, match=r"twice that is not repeatable\n  received: the operation draw"):
        simulate(flow, [0, 0])


def test_repeat_reads_what_runs_in_its_place():
    """The mask must be there: the operation itself does not need it."""
    substitute = Operation("scale", (1,), (0,), 1.0)
    operations = (Operation("dropout", (), (0, 1), 1.0, substitute=substitute), Operation("b", (0,), (2,), 1.0))
    flow = Dataflow(operations, (10, 1, 5), 1, results=frozenset({2}))
    assert simulate(flow, [0, 0, 1]) == Memory((11, 11, 15), 1, (1,))


# the twin -------------------------------------------------------------------------------------------------------------


def counted(flow, schedule):
    """Bytes during each step: every copy has a count of the reads that are still to come, and goes with the last."""
    seen, steps = set(), []
    for index in schedule:
        operation = flow.operations[index]
        steps.append((operation.repeat if index in seen else operation, index not in seen))
        seen.add(index)
    boundary = 1 + max([step for step, index in enumerate(schedule)
                        if index < flow.forward and index not in schedule[:step]], default=-1)
    newest, copies = {}, []  # copies: [storage, reads to come, stays until]
    readers = [[] for _ in steps]
    writers = [[] for _ in steps]
    for step, (operation, first) in enumerate(steps):
        for storage in operation.reads:
            if storage not in flow.given:
                copies[newest[storage]][1] += 1
                readers[step].append(newest[storage])
        for storage in operation.writes:
            until = step
            if first and storage in flow.results:
                until = len(steps)
            elif first and storage in flow.forward_results:
                until = boundary - 1
            copies.append([storage, 0, until])
            writers[step].append(len(copies) - 1)
            if first or storage not in flow.results:
                newest[storage] = len(copies) - 1
    alive, during, saved = set(), [], set()
    for step, (operation, _) in enumerate(steps):
        if step == boundary:
            saved = {copies[copy][0] for later in readers[step:] for copy in later if copy in alive}
        alive.update(writers[step])
        during.append(sum(flow.sizes_bytes[copies[copy][0]] for copy in alive) + operation.workspace_bytes)
        for copy in readers[step]:
            copies[copy][1] -= 1
        alive = {copy for copy in alive if copies[copy][1] or copies[copy][2] > step}
    return Memory(tuple(during), boundary, tuple(sorted(saved)))


def with_repeats(flow, rng):
    """Drop at random, bring back late; then repeat at random whatever may be."""
    kept = {storage for storage in flow.writer if rng.random() < 0.5}
    schedule = list(late(flow, kept))
    for _ in range(rng.randint(0, 5)):
        place = rng.randint(1, len(schedule))
        candidates = [index for index in set(schedule[:place]) if flow.operations[index].repeatable]
        if candidates:
            schedule.insert(place, rng.choice(candidates))
    return schedule


def flows():
    yield from (random_flow(seed, 30) for seed in range(60))
    yield from (random_dag(random.Random(seed).randint(4, 25), seed=seed) for seed in range(40))
    yield from (random_step(12, seed=seed) for seed in range(20))


def test_simulator_is_the_one_that_counts_references():
    rng, repeats = random.Random(0), 0
    for flow in flows():
        for schedule in (flow.eager, with_repeats(flow, rng), with_repeats(flow, rng)):
            assert simulate(flow, schedule) == counted(flow, list(schedule))
            repeats += len(schedule) - len(flow.operations)
    assert repeats > 500


def test_no_schedule_is_below_the_lower_bound():
    rng = random.Random(1)
    for flow in flows():
        assert simulate(flow, with_repeats(flow, rng)).peak_bytes >= lower_bound_bytes(flow)
