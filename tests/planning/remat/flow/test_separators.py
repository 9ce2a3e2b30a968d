"""Separators: what they are on small graphs, and beside a brute-force twin on random ones."""
from __future__ import annotations

from random import Random

import pytest

from tests.slow import few
from torchckpt.planning.remat.flow.dataflow import Dataflow, Operation
from torchckpt.planning.remat.flow.late import separating_storages, separators


def random_reads(seed: int) -> list[list[int]]:
    random = Random(seed)
    nodes, reach = random.randint(0, 12), random.randint(1, 5)
    return [
        sorted({random.randrange(max(0, node - reach), node) for _ in range(random.randint(0, 2))}) if node else []
        for node in range(nodes)
    ]


def reachable_without(reads: list[list[int]], removed: int) -> set[int]:
    """What can be reached from the nodes before ``removed`` on paths past it."""
    reached = set(range(removed))
    for node in range(len(reads)):
        if node != removed and reached & set(reads[node]):
            reached.add(node)
    return reached


def forward(*operations: tuple[tuple[int, ...], tuple[int, ...]], given: int) -> Dataflow:
    """A forward of operations as (reads, writes); storages below ``given`` are given."""
    listed = tuple(Operation(str(index), reads, writes, 1.0) for index, (reads, writes) in enumerate(operations))
    storages = 1 + max(storage for reads, writes in operations for storage in reads + writes)
    return Dataflow(listed, (1,) * storages, len(listed), frozenset(range(given)))


@pytest.mark.parametrize(
    ("reads", "separating"),
    [
        ([], []),
        ([[]], [0]),
        ([[], [0], [1]], [0, 1, 2]),
        ([[], [0], [0, 1]], [0, 2]),
        ([[], [0], [0], [1, 2]], [0, 3]),
        ([[], [0], [1], [2, 0], [3], [4, 3]], [0, 3, 5]),
    ],
    ids=["empty", "one", "chain", "skip", "diamond", "two skips"],
)
def test_separators(reads, separating):
    assert separators(reads) == separating


@few(38)
@pytest.mark.parametrize("seed", range(200))
def test_separators_are_the_nodes_whose_removal_disconnects(seed):
    reads = random_reads(seed)
    nodes = range(len(reads))
    assert separators(reads) == [node for node in nodes if reachable_without(reads, node) == set(range(node))]


def test_a_parameter_enters_at_any_place():
    flow = forward(((0, 1), (3,)), ((3, 2), (4,)), ((4, 1), (5,)), ((5,), (6,)), given=3)
    assert separating_storages(flow) == [3, 4, 5]


def test_an_input_may_be_read_again():
    assert separating_storages(forward(((0,), (1,)), ((1,), (2,)), ((2, 0), (3,)), ((3,), (4,)), given=1)) == [1, 2, 3]


def test_a_value_read_again_prevents_separation():
    assert separating_storages(forward(((0,), (1,)), ((1,), (2,)), ((2, 1), (3,)), ((3,), (4,)), given=1)) == [1, 3]


def test_a_value_that_is_there_anyway_does_not_prevent_it():
    flow = forward(((0,), (1,)), ((1,), (2,)), ((2, 1), (3,)), ((3,), (4,)), given=1)
    assert separating_storages(flow, shared={1}) == [2, 3]


def test_one_of_two_outputs_separates_if_the_other_is_not_read():
    assert separating_storages(forward(((0,), (1, 2)), ((2,), (3,)), given=1)) == [2]


def test_two_outputs_that_are_read_do_not_separate():
    assert separating_storages(forward(((0,), (1, 2)), ((2,), (3,)), ((1, 3), (4,)), given=1)) == []


def test_reads_of_the_backward_do_not_count():
    forward_only = forward(((0,), (1,)), ((1,), (2,)), ((2,), (3,)), given=1)
    backward = Operation("backward", (1, 2, 3), (4,), 1.0)
    flow = Dataflow((*forward_only.operations, backward), (1,) * 5, 3, forward_only.given)
    assert separating_storages(flow) == [1, 2]


def test_a_skip_over_everything_leaves_only_its_ends():
    """A U-Net has no other."""
    down_and_up = (((0,), (1,)), ((1,), (2,)), ((2,), (3,)), ((3, 2), (4,)), ((4, 1), (5,)), ((5,), (6,)))
    assert separating_storages(forward(*down_and_up, given=1)) == [1, 5]
