"""Exact: beside brute force on tiny steps, and what it proves of larger ones."""
from __future__ import annotations

import sys
from functools import cache

import pytest

from tests.planning.remat.brute_force import fastest
from tests.planning.remat.flows import budget_of, chain, mlp, transformer
from tests.planning.remat.random_flows import random_flow
from tests.slow import few, slow
from torchckpt.errors import ArgumentError
from torchckpt.planning.remat.flow.dataflow import Dataflow, Operation, Schedule
from torchckpt.planning.remat.flow.memory import simulate
from torchckpt.planning.remat.search.exact import optimum

pytest.importorskip("ortools")

SHARES = (0.6, 0.75, 0.9)


def seconds_of(flow: Dataflow, schedule: Schedule) -> float:
    runs = [flow.operations[index] for index in schedule]
    return sum((run.repeat if index in schedule[:step] else run).seconds
               for step, (index, run) in enumerate(zip(schedule, runs)))


def exact_seconds(flow: Dataflow, budget_bytes: int, **options) -> float | None:
    result = optimum(flow, budget_bytes, workers=1, **options)
    if result is None:
        return None
    assert result.proven
    assert simulate(flow, result.schedule).peak_bytes <= budget_bytes
    assert result.seconds == seconds_of(flow, result.schedule) == pytest.approx(result.bound_seconds, rel=1e-5)
    return result.seconds


# brute force ----------------------------------------------------------------------------------------------------------


@cache
def schedules(flow: Dataflow, length: int) -> list[tuple[int, ...]]:
    """All that can run, of at most ``length`` steps."""
    listed = []

    def extend(schedule: tuple[int, ...]) -> None:
        if set(schedule) == set(flow.eager):
            listed.append(schedule)
        if len(schedule) < length:
            for index in flow.eager:
                if runs_next(flow, schedule, index):
                    extend((*schedule, index))

    extend(())
    return listed


def runs_next(flow: Dataflow, schedule: tuple[int, ...], index: int) -> bool:
    operation = flow.operations[index]
    if index in schedule:
        return operation.repeatable
    written = {storage for done in schedule for storage in flow.operations[done].writes} | flow.given
    return written >= set(operation.reads) and (index < flow.forward or set(range(flow.forward)) <= set(schedule))


@few(6)
@pytest.mark.parametrize("seed", range(40))
def test_brute_force_finds_the_fastest_of_all_short_schedules(seed):
    flow = random_flow(seed, most_operations=6)
    length = len(flow.operations) + 2
    measured = [(simulate(flow, schedule).peak_bytes, seconds_of(flow, schedule), schedule)
                for schedule in schedules(flow, length)]
    for budget_bytes in sorted({peak_bytes for peak_bytes, _, _ in measured}):
        best = min(seconds for peak_bytes, seconds, _ in measured if peak_bytes <= budget_bytes)
        seconds, schedule = fastest(flow, budget_bytes)
        assert simulate(flow, schedule).peak_bytes <= budget_bytes
        assert seconds == seconds_of(flow, schedule)
        assert seconds == best or (seconds < best and len(schedule) > length)


@few(2)
@pytest.mark.parametrize("seed", [*range(20), *slow(range(20, 40))])
def test_optimum_is_that_of_brute_force(seed):
    flow = random_flow(seed)
    for budget_bytes in {budget_of(flow, share) for share in SHARES}:
        best = fastest(flow, budget_bytes, ordered=True)
        assert exact_seconds(flow, budget_bytes) == (best and best[0])


def test_an_operation_may_have_to_be_repeated_twice():
    """A big value is read three times; the operations between them need its room."""
    small, big, room = 1, 8, 8
    operations = (
        Operation("big", (0,), (1,), 1.0),
        Operation("reads it", (1,), (2,), 1.0),
        Operation("needs room", (2,), (3,), 1.0, workspace_bytes=room),
        Operation("reads it again", (1, 3), (4,), 1.0),
        Operation("needs room again", (4,), (5,), 1.0, workspace_bytes=room),
        Operation("reads it at last", (1, 5), (6,), 1.0),
    )
    sizes = (big, big, *[small] * 5)
    flow = Dataflow(operations, sizes, 2, frozenset({0}), frozenset({6}))
    assert exact_seconds(flow, 10) == fastest(flow, 10)[0] == 8.0


# larger steps ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flow", "share", "repeats"),
    [(chain(14), 0.5, 9.0), (chain(14), 0.75, 5.0)],
    ids=["half", "three quarters"],
)
def test_a_chain_is_proven(flow, share, repeats):
    """Times the seconds of a tanh."""
    seconds = exact_seconds(flow, budget_of(flow, share))
    assert (seconds - flow.seconds) / flow.operations[0].seconds == pytest.approx(repeats)


def test_the_eager_schedule_is_the_fastest_if_it_fits():
    flow = transformer(2)
    result = optimum(flow, budget_of(flow, 1))
    assert result.proven
    assert result.schedule == tuple(flow.eager)
    assert result.seconds == result.bound_seconds == flow.seconds


def test_no_time_leaves_the_hint_and_a_bound():
    flow = mlp(4)
    budget_bytes = budget_of(flow, 0.8)
    slow = optimum(flow, budget_of(flow, 0.7)).schedule
    result = optimum(flow, budget_bytes, hint=slow, time_limit_seconds=0.0)
    assert not result.proven
    assert result.schedule == slow
    assert flow.seconds <= result.bound_seconds < result.seconds


def test_a_hint_gives_the_order_of_first_runs():
    flow = next(flow for flow in map(random_flow, range(100))
                if fastest(flow, budget_of(flow, 0.9))[0] < fastest(flow, budget_of(flow, 0.9), ordered=True)[0])
    seconds, hint = fastest(flow, budget_of(flow, 0.9))
    assert exact_seconds(flow, budget_of(flow, 0.9), hint=hint) == seconds


def test_pinned_storages_are_written_once():
    flow = chain(8)
    schedule = optimum(flow, budget_of(flow, 0.75), workers=1).schedule
    twice = {index for index in schedule if schedule.count(index) > 1}
    pinned = {storage for index in twice for storage in flow.operations[index].writes}
    other = optimum(flow, budget_of(flow, 0.75), workers=1, pinned=pinned).schedule
    assert not twice & {index for index in other if other.count(index) > 1}


# errors ---------------------------------------------------------------------------------------------------------------


def test_no_schedule_fits_or_none_is_found_in_time():
    flow = mlp(12)
    assert optimum(chain(8), 1) is None
    assert optimum(flow, budget_of(flow, 0.5), time_limit_seconds=0.0) is None


def test_without_ortools_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(ArgumentError, match=r"(?s)OR-tools is missing.*pip install 'torchckpt\[exact\]'"):
        optimum(chain(3), 1)
