"""A collective call: who makes it alone, or beside another one, is told so, and the next call works again."""
from __future__ import annotations

import re
import threading
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import attempted, on_ranks
from tests.distributed.stages import Blocks, ahead, batch, step
from torchckpt.distributed.meeting import meeting
from torchckpt.distributed.phases import FIRST_STEPS
from torchckpt.errors import ArgumentError, ScheduleError
from torchckpt.ranks import turns as module

CPU = torch.device("cpu")
NAME = "Schedule1F1B"


class Group:
    """As much of a group as a meeting asks for, of ranks that are threads."""

    def __init__(self, rank, ranks, store):
        self.rank, self.size, self.store = (lambda: rank), (lambda: ranks), store


@pytest.fixture
def patience(monkeypatch):
    """The timeout of groups: a second, twice what a rank that is alone waits; else as long as it takes."""
    chosen = {"seconds": 600.0}
    monkeypatch.setattr(module, "store_of", lambda group: group.store)
    monkeypatch.setattr(module, "timeout_of", lambda *_: timedelta(seconds=chosen["seconds"]))
    return chosen


def said(call, group):
    """``met``, or the error; the warning, too, if there is one."""
    try:
        with meeting(call, group, CPU):
            return "met"
    except ScheduleError as error:
        return str(error)


def together(*calls, store):
    """What each rank is told, where rank ``i`` makes ``calls[i]``."""
    found = [None] * len(calls)

    def work(rank):
        found[rank] = said(calls[rank], Group(rank, len(calls), store))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def refusal(call, received):
    return (
        f"schedule.{call}() did not complete on every rank of the pipeline: it is collective\n  received: {received}\n"
        f"  works:    {call} = schedule.{call}() on every rank; then, on one: print({call})"
    )


def test_ranks_that_make_the_same_call_meet_and_leave_a_number_each(patience):
    store = dist.HashStore()
    for call in ("report()", "timeline()", "report()"):
        assert together(call, call, call, store=store) == ["met"] * 3
    assert sorted(store.list_keys()) == [f"torchckpt/meeting/turn/{rank}" for rank in range(3)]


def test_ranks_that_make_different_calls_are_all_told(patience):
    store = dist.HashStore()
    received = "report() on rank 0, timeline() on rank 1, report() on rank 2"
    expected = [refusal(call, received) for call in ("report", "timeline", "report")]
    assert together("report()", "timeline()", "report()", store=store) == expected
    assert together("report()", "report()", "report()", store=store) == ["met"] * 3


def test_a_rank_alone_is_warned_and_then_told_who_is_missing(patience):
    store = dist.HashStore()
    patience["seconds"] = 0.1
    with pytest.warns(UserWarning, match=re.escape("schedule.report() is collective: it waits for ranks 0, 2")):
        found = said("report()", Group(1, 3, store))
    assert found == refusal("report", "report() on rank 1, nothing on ranks 0, 2 within 0.05 s")


def test_late_ranks_pass_over_the_turns_that_were_missed(patience):
    store = dist.HashStore()
    patience["seconds"] = 0.02
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = [said("report()", Group(rank, 2, store)) for rank in (0, 0, 1)]
    pairs = ((0, 1), (0, 1), (1, 0))
    late = "report() on rank {}, nothing on rank {} within 0.01 s"
    assert alone == [refusal("report", late.format(*pair)) for pair in pairs]
    patience["seconds"] = 600.0
    assert together("timeline()", "timeline()", store=store) == ["met"] * 2
    assert sorted(store.list_keys()) == ["torchckpt/meeting/turn/0", "torchckpt/meeting/turn/1"]


def test_a_rank_alone_in_its_process_asks_nobody(patience):
    assert said("report()", Group(0, 1, None)) == "met"


def test_a_backend_without_a_store_names_the_call_when_its_timeout_ends(patience):
    with pytest.raises(ScheduleError) as caught, meeting("report()", Group(0, 2, None), CPU):
        raise RuntimeError("timed out")
    assert str(caught.value) == refusal("report", "RuntimeError: timed out")
    with pytest.raises(ArgumentError, match="mine"), meeting("report()", Group(0, 2, None), CPU):
        raise ArgumentError("mine")


# two processes --------------------------------------------------------------------------------------------------------


def stepped(steps, **options):
    schedule, stages = ahead(NAME, Blocks, **options)
    for _ in range(steps):
        step(schedule, stages, *batch(4))
    return schedule


def calls_of(schedule, rank):
    """A call on rank 0 alone, which times out; one that differs; then what all ranks ask for."""
    timeout = module.timeout_of
    module.timeout_of = lambda *_: timedelta(seconds=2)
    found = [attempted(schedule.report) if rank == 0 else None]
    module.timeout_of = timeout
    dist.barrier()
    found.append(attempted([schedule.report, schedule.timeline][rank]))
    schedule.report()
    found.append(attempted(schedule.timeline))
    return found


def calls_of_rank(rank):
    schedules = {"ahead": stepped(1), "within": stepped(FIRST_STEPS + 2, budget="1GB")}
    found = {name: calls_of(schedule, rank) for name, schedule in schedules.items()}
    group = dist.new_group(timeout=timedelta(seconds=77))
    return {**found, "timeout": module.timeout_of(group, CPU), "store": module.store_of(group) is not None}


@pytest.fixture(scope="module")
def called(tmp_path_factory):
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("no gloo")
    return on_ranks(calls_of_rank, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("kind", ["ahead", "within"])
def test_calls_of_a_schedule_on_some_ranks_alone_end_with_an_error_that_names_them(kind, called):
    first, second = (one[kind] for one in called)
    assert refusal("report", "report() on rank 0, nothing on rank 1 within 1 s") in first[0]
    received = "report() on rank 0, timeline() on rank 1"
    assert refusal("report", received) in first[1]
    assert refusal("timeline", received) in second[1]
    assert first[2] == second[2]
    assert first[2].step_seconds > 0


def test_timeout_and_store_are_those_of_the_group(called):
    assert [(one["timeout"], one["store"]) for one in called] == [(timedelta(seconds=77), True)] * 2
