"""Orders of recomputation, as literals, and what holds of all of them."""
from __future__ import annotations

import random

import pytest

from tests.planning.remat.flows import chain, resnet, transformer, unet
from tests.planning.remat.random_flows import random_flow
from torchckpt.planning.remat.flow.dataflow import Dataflow, Operation
from torchckpt.planning.remat.flow.late import Home, late
from torchckpt.planning.remat.flow.memory import simulate


def powers(length):
    """a1 = f(x), a2 = f(a1), ...; the backward of each reads what its forward read."""
    forward = [Operation(f"a{place}", (place - 1,), (place,), 1.0) for place in range(1, length + 1)]
    backward = []
    for place in range(length, 0, -1):
        gradient = 2 * length + 1 - place
        reads = (place - 1, gradient - 1) if place < length else (place - 1,)
        backward.append(Operation(f"d{place}", reads, (gradient,), 1.0))
    given, results = frozenset({0}), frozenset({length, 2 * length})
    return Dataflow((*forward, *backward), (1,) * (2 * length + 1), length, given, results)


def drawn(flow, schedule):
    return " ".join(flow.operations[index].name for index in schedule)


@pytest.mark.parametrize(
    ("kept", "backward"),
    [
        ({1, 2, 3}, "d4 d3 d2 d1"),
        ({2}, "a3 d4 d3 a1 d2 d1"),
        ({1, 3}, "d4 a2 d3 d2 d1"),
        ({3}, "d4 a1 a2 d3 d2 d1"),
        (set(), "a1 a2 a3 d4 d3 d2 d1"),
    ],
)
def test_chain(kept, backward):
    flow = powers(4)
    assert drawn(flow, late(flow, kept)) == f"a1 a2 a3 a4 {backward}"


A, AB, ABC = ("A",), ("A", "B"), ("A", "B", "C")


def test_chain_in_regions_one_in_the_other():
    """a1 in one region, a2 in two, a3 in three: what is d deep runs d + 1 times, with that of the forward."""
    flow = powers(4)
    homes = {2: Home(AB, AB), 3: Home(ABC, ABC)}
    regions = (A, AB, ABC, (), (), ABC, AB, A)
    assert drawn(flow, late(flow, set(), homes, regions)) == "a1 a2 a3 a4 a1 a2 a3 d4 a2 d3 d2 d1"


def test_values_of_one_region_are_there_until_they_are_used():
    flow = powers(4)
    flat = "a1 a2 a3 a4 a1 a2 a3 d4 d3 d2 d1"
    assert drawn(flow, late(flow, set(), {}, (A, A, A, (), (), A, A, A))) == flat
    deep = {2: Home(AB, AB), 3: Home(AB, AB)}
    assert drawn(flow, late(flow, set(), deep, (A, AB, AB, (), AB, AB, AB, A))) == flat


def test_value_that_leaves_a_region_is_there_for_the_region_around_and_made_again_for_its_own():
    """a2 is made in B and read by d3 and d4, which are in A alone: once for both of them."""
    flow = powers(4)
    regions = (A, AB, A, A, A, A, AB, A)
    homes = {2: Home(AB, A)}
    assert drawn(flow, late(flow, {1}, homes, regions)) == "a1 a2 a3 a4 a2 a3 d4 d3 d2 d1"
    assert drawn(flow, late(flow, {1}, {2: Home(AB, AB)}, regions)) == "a1 a2 a3 a4 a2 a3 d4 a2 d3 d2 d1"


def test_outside_of_what_it_is_for_a_value_goes_at_once():
    flow = powers(4)
    homes = {2: Home(AB, AB), 3: Home(AB, AB)}
    assert drawn(flow, late(flow, {1}, homes, ((),) * 8)) == "a1 a2 a3 a4 a2 a3 d4 a2 d3 d2 d1"


def test_kept_whatever_its_depth():
    flow = powers(4)
    homes, regions = {2: Home(AB, AB), 3: Home(ABC, ABC)}, (A, AB, ABC, (), (), ABC, AB, A)
    assert drawn(flow, late(flow, {1, 2, 3}, homes, regions)) == drawn(flow, flow.eager)


def test_what_no_repeat_writes_is_kept():
    """A mask that was drawn, and what runs once."""
    substitute = Operation("scale", (0, 2), (1,), 1.0)
    operations = (
        Operation("dropout", (0,), (1, 2), 1.0, substitute=substitute),
        Operation("once", (1,), (3,), 1.0, repeatable=False),
        Operation("back", (1, 2, 3), (4,), 1.0),
    )
    flow = Dataflow(operations, (1, 1, 1, 1, 1), 2, frozenset({0}), frozenset({4}))
    assert drawn(flow, late(flow, set())) == "dropout once dropout back"
    assert simulate(flow, late(flow, set())).saved == (2, 3)


def test_results_are_kept():
    operations = Operation("a", (0,), (1,), 1.0), Operation("back", (1,), (2,), 1.0)
    flow = Dataflow(operations, (1, 1, 1), 1, frozenset({0}), frozenset({1, 2}))
    assert late(flow, set()) == [0, 1]


def test_only_what_is_needed_is_brought_back():
    """b reads a, and nothing after the forward reads b."""
    operations = (
        Operation("a", (0,), (1,), 1.0), Operation("b", (1,), (2,), 1.0), Operation("c", (2,), (3,), 1.0),
        Operation("back", (1,), (4,), 1.0),
    )
    flow = Dataflow(operations, (1,) * 5, 3, frozenset({0}), frozenset({3, 4}))
    assert drawn(flow, late(flow, set())) == "a b c a back"


def test_outputs_of_one_operation_come_back_together():
    operations = (
        Operation("pair", (0,), (1, 2), 1.0), Operation("first", (2,), (3,), 1.0),
        Operation("second", (1, 3), (4,), 1.0),
    )
    flow = Dataflow(operations, (1,) * 5, 1, frozenset({0}), frozenset({4}))
    assert drawn(flow, late(flow, set())) == "pair pair first second"


@pytest.mark.parametrize("flow", [chain(20), transformer(3, dropout=True), resnet(4), unet(3)])
def test_operations_of_real_steps_run_twice_at_most_and_late(flow):
    """With every fourth value kept; all at the start of the backward, the repeats would need more."""
    schedule = late(flow, {storage for storage in flow.writer if storage % 4 == 0})
    assert max(map(schedule.count, set(schedule))) == 2
    again = sorted(index for index in set(schedule) if schedule.count(index) == 2)
    hoisted = [*range(flow.forward), *again, *range(flow.forward, len(flow.operations))]
    assert simulate(flow, schedule).peak_bytes < simulate(flow, hoisted).peak_bytes


def test_all_kept_is_eager_and_random_sets_run():
    rng = random.Random(0)
    for seed in range(60):
        flow = random_flow(seed, 30)
        assert list(late(flow, set(flow.writer))) == list(flow.eager)
        kept = {storage for storage in flow.writer if rng.random() < 0.5}
        schedule = late(flow, kept)
        for storage in simulate(flow, schedule).saved:
            assert storage in kept | flow.results or storage not in flow.recoverable
        assert [*dict.fromkeys(schedule)] == list(flow.eager)
