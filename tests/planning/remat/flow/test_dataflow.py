"""What a dataflow knows of itself."""
from __future__ import annotations

import dataclasses

import pytest

from torchckpt.planning.remat.flow.dataflow import Dataflow, Operation

MASKED = Operation("dropout", (0,), (1, 2), 3.0, repeatable=True, substitute=Operation("scale", (0, 2), (1,), 1.0))
DRAWN = Operation("draw", (1,), (3,), 2.0, repeatable=False)
GRADIENT = Operation("backward", (2, 3), (4, 5), 5.0, flops=7)


@pytest.fixture
def flow():
    return Dataflow((MASKED, DRAWN, GRADIENT), (9, 1, 2, 3, 4, 5), 2, frozenset({0}), frozenset({4}))


def test_writer_is_that_of_each_storage_that_is_not_given(flow):
    assert flow.writer == {1: 0, 2: 0, 3: 1, 4: 2, 5: 2}


def test_recoverable_is_what_a_repeat_writes(flow):
    """Not the mask, which the repeat reads, and not what was drawn."""
    assert flow.recoverable == {1, 4, 5}


def test_repeat_is_what_runs_in_place_or_the_operation_itself():
    assert MASKED.repeat.name == "scale"
    assert GRADIENT.repeat is GRADIENT


def test_eager_runs_all_once(flow):
    assert list(flow.eager) == [0, 1, 2]
    assert flow.seconds == 10.0


def test_defaults():
    assert Operation("a", (), (), 1.0) == Operation("a", (), (), 1.0, 0, 0, True, None)
    flow = Dataflow((), (), 0)
    assert (flow.given, flow.results, flow.forward_results) == (frozenset(), frozenset(), frozenset())
    assert (flow.writer, flow.seconds, list(flow.eager)) == ({}, 0, [])


def test_frozen(flow):
    with pytest.raises(dataclasses.FrozenInstanceError):
        flow.forward = 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        MASKED.seconds = 0.0
