"""What a step recomputes and keeps, where that stands, and what it shows."""
from __future__ import annotations

import importlib
import re
from collections import Counter

import pytest
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.distributed.stages import (
    NAMES,
    SINGLE,
    TWO_STAGES,
    Blocks,
    ahead,
    batch,
    events_of_step,
    noted,
    schedule_on,
    stages_of,
    step,
)
from tests.settings import with_gloo
from tests.slow import few
from torchckpt import checkpoint_module
from torchckpt.distributed import recompute_ahead, schedule_of
from torchckpt.distributed.ahead import MEASURED_STEPS
from torchckpt.errors import ScheduleError
from torchckpt.planning import Block, Kind, Link
from torchckpt.planning.work.choice import free_to_keep
from torchckpt.testing import count_recomputes

pytestmark = with_gloo


# what is recomputed ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("segments", "early", "late"),
    [
        (None, ["replay 0.2", "replay 0.1", "replay 0.0"], []),
        (3, ["replay 0.2", "replay 0.1", "replay 0.0"], []),
        (9, ["replay 0.2", "replay 0.1", "replay 0.0"], []),
        (2, ["replay 0.2", "replay 0.1"], ["replay 0.0"]),
        (1, ["replay 0.2"], ["replay 0.1", "replay 0.0"]),
        (0, [], ["replay 0.2", "replay 0.1", "replay 0.0"]),
    ],
)
def test_last_segments_are_early_and_all_go_last_one_first(segments, early, late):
    schedule, stages = ahead("ScheduleGPipe", lambda stage: Blocks(stage, count=3), 1, segments=segments, exempt="none")
    seen = events_of_step(noted(schedule), stages, 1)
    assert seen == [
        *("0UNSHARD", "0F0", "forward 0.0", "forward 0.1", "forward 0.2"),
        *(["0R0", *early] if early else []),
        *("0B0", *late, "0REDUCE_GRAD", "0RESHARD"),
    ]


def kept(schedule):
    """The (stage, micro-batch) that a schedule of this rank does not recompute."""
    (order,) = schedule.schedule.ranks
    return {(stage, i) for stage, kind, i in order if kind is Kind.FORWARD} - {
        (stage, i) for stage, kind, i in order if kind is Kind.RECOMPUTE
    }


def replays(schedule, stages, m=4):
    """Per stage and micro-batch, how many blocks a step replays."""
    found, action = Counter(), None
    for event in events_of_step(noted(schedule), stages, m):
        if match := re.fullmatch(r"(\d)[RBI](\d)", event):
            action = tuple(map(int, match.groups()))
        elif event.startswith("replay"):
            found[action] += 1
    return found


@few(2)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", NAMES[:-3])  # but DualPipeV, whose pairs are one action
def test_exempt_by_default_is_what_is_free_to_keep(name):
    schedule, stages = ahead(name)
    exempt = free_to_keep(schedule_of(schedule_on(stages, name, 4)))
    assert kept(schedule) == exempt != set()
    every = {(stage, i) for stage in range(len(stages)) for i in range(4)}
    assert replays(schedule, stages) == dict.fromkeys(every - exempt, 2)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", [*SINGLE, "ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"])
def test_exempt_none(name):
    schedule, stages = ahead(name, exempt="none")
    assert kept(schedule) == set()
    assert replays(schedule, stages) == {(stage, i): 2 for stage in range(len(stages)) for i in range(4)}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("exempt", [{(0, 1), (1, 3)}, [(0, 1), (1, 3)], frozenset({(0, 0)}), ()])
def test_exempt_of_the_caller(exempt):
    schedule, stages = ahead("ScheduleInterleaved1F1B", exempt=exempt)
    every = {(stage, i) for stage in range(2) for i in range(4)}
    assert kept(schedule) == set(exempt)
    assert replays(schedule, stages) == dict.fromkeys(every - set(exempt), 2)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("segments", [0, 1, 2])
def test_with_segments_nothing_is_exempt_by_default(segments):
    schedule, stages = ahead("Schedule1F1B", segments=segments)
    assert kept(schedule) == (set() if segments else {(0, i) for i in range(4)})  # what is late has no action
    assert replays(schedule, stages) == {(0, i): 2 for i in range(4)}


@pytest.mark.usefixtures("alone")
def test_late_regions_that_nothing_asks_for_are_reported_without_time():
    """The first region of the first stage is frozen, and its input is the caller's."""
    schedule, stages = ahead("Schedule1F1B", segments=1)
    stages[0].submod.blocks[0].requires_grad_(False)
    step(schedule, stages, *batch(4))
    schedule.report()
    assert len(schedule.timeline().events) == 3 * 4


@pytest.mark.usefixtures("alone")
def test_number_of_recomputes():
    schedule, stages = ahead("ScheduleInterleaved1F1B", exempt={(0, 1), (1, 3)})
    step(schedule, stages, *batch(4))
    with count_recomputes() as recomputes:
        step(schedule, stages, *batch(4))
    assert recomputes.total == (8 - 2) * 2


@pytest.mark.usefixtures("alone")
def test_regions_inside_of_regions_are_their_own():
    """The outer one is recomputed early, up to the last input that it saved; the inner ones are replayed after that."""

    def make(stage):
        outer = nn.Sequential(*Blocks(stage, count=2).blocks)
        checkpoint_module(outer)
        return nn.Sequential(outer)

    schedule, stages = ahead("ScheduleGPipe", make, 1, exempt="none")
    seen = events_of_step(noted(schedule), stages, 1)
    place, backward = seen.index("0R0"), seen.index("0B0")
    assert seen[place:backward] == ["0R0", "forward in a replay 0.0"]
    assert seen[backward:-2] == ["0B0", "replay 0.1", "replay 0.0"]


# where recomputes stand -----------------------------------------------------------------------------------------------


@pytest.fixture
def first_of_four():
    """This process is the first of four ranks, to which nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("first_of_four")
@pytest.mark.parametrize(
    ("options", "orders"),
    [
        (
            {},
            [
                "1F0 1F1 1F2 1R0 1B0 1F3 1R1 1B1 1R2 1B2 1R3 1B3",
                "2F0 2F1 2R0 2B0 2F2 2R1 2B1 2F3 2R2 2B2 2R3 2B3",
            ],
        ),
        (
            {"costs": Block(), "link": Link(2.0)},
            [
                "1F0 1R0 1F1 1F2 1B0 1F3 1R1 1B1 1R2 1B2 1R3 1B3",
                "2F0 2R0 2F1 2B0 2F2 2R1 2B1 2R2 2F3 2B2 2R3 2B3",
            ],
        ),
        (
            {"costs": [Block()] * 4, "link": [Link(2.0)] * 3},
            [
                "1F0 1R0 1F1 1F2 1B0 1F3 1R1 1B1 1R2 1B2 1R3 1B3",
                "2F0 2R0 2F1 2B0 2F2 2R1 2B1 2R2 2F3 2B2 2R3 2B3",
            ],
        ),
    ],
    ids=["no costs", "costs", "costs of each"],
)
def test_recomputes_stand_where_costs_have_their_rank_idle(options, orders):
    plain = schedule_on(stages_of("Schedule1F1B", Blocks), "Schedule1F1B", 4)
    schedule = recompute_ahead(plain, exempt="none", **options).schedule
    assert [" ".join(map(str, order)) for order in schedule.ranks[1:3]] == orders


@pytest.mark.usefixtures("alone")
def test_measured_costs_place_recomputes_after_the_first_steps(monkeypatch):
    schedule, stages = ahead("ScheduleInterleaved1F1B", costs="measured")
    placed = []
    module = importlib.import_module("torchckpt.distributed.ahead")
    place = module.quickest_of
    monkeypatch.setattr(module, "quickest_of", lambda step, k: placed.append(step) or place(step, k))
    for number in range(MEASURED_STEPS + 3):
        assert len(placed) == (number >= MEASURED_STEPS)
        step(schedule, stages, *batch(4))
    (measured,) = placed
    assert (len(measured.stages), len(measured.links)) == (2, 1)
    assert all(stage.saved_bytes > stage.arriving_bytes >= 0 for stage in measured.stages)


# what it shows --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
def test_recomputes_are_ranges_of_the_profiler():
    schedule, stages = ahead("ScheduleInterleaved1F1B", exempt="none")
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step(schedule, stages, *batch(4))
    counts = {event.key: event.count for event in seen.key_averages() if event.key.startswith("torchckpt::")}
    assert counts == {f"torchckpt::recompute[stage={stage},mb={i}]": 1 for stage in range(2) for i in range(4)}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("show", ["timeline", "report"])
def test_nothing_is_shown_before_a_step(show):
    schedule, stages = ahead("ScheduleGPipe")
    text = (
        "no step has run yet\n  received: timeline() or report() before step()\n"
        "  works:    schedule.step(x, target=y); then print(schedule.report())"
    )
    for _ in range(2):
        with pytest.raises(ScheduleError, match=f"^{re.escape(text)}$"):
            getattr(schedule, show)()
        schedule.eval(batch(4)[0], target=batch(4)[1])  # no step either
    step(schedule, stages, *batch(4))
    assert getattr(schedule, show)() is not None


@few(1)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", [*SINGLE, *TWO_STAGES])
def test_report_is_a_table_of_the_steps_and_stages(name):
    schedule, stages = ahead(name, exempt="none")
    for _ in range(2):
        step(schedule, stages, *batch(4))
    report = schedule.report()
    head, *rows = report.table().splitlines()
    assert head.split() == ["step", "overhead", "bound", "hidden", "peak"]
    assert [row.split("  ")[0] for row in rows if "simulated" in row or "measured" in row] == [
        "none (simulated)",
        "at arrival (simulated)",
        "this schedule (simulated)",
        "this schedule (measured)",
    ]
    place = rows.index("")
    assert rows[place + 1].split() == ["stage", "forward", "backward", "recompute", "peak", "of", "rank"]
    assert [row.split()[0] for row in rows[place + 2 :]] == [str(stage) for stage in range(len(stages))]
    assert report.measured == schedule.timeline()


@pytest.mark.usefixtures("alone")
def test_evaluations_are_no_steps_of_the_timeline():
    schedule, stages = ahead("ScheduleGPipe", exempt="none")
    step(schedule, stages, *batch(4))
    before = schedule.timeline()
    schedule.eval(batch(4)[0], target=batch(4)[1])
    assert schedule.timeline() == before
