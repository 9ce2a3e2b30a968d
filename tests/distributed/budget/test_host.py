"""A budget with a host beside the device: the numbers are torch's, and the bytes are the plan's."""
from __future__ import annotations

import functools
from ast import literal_eval
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import nn

from tests.distributed.stages import SINGLE, Stage, equal, gradients_of, loss_of, schedule_on
from tests.settings import with_gloo
from tests.slow import few, slow, slow_but
from torchckpt import checkpoint_module
from torchckpt.distributed import phases, recompute_ahead
from torchckpt.errors import ArgumentError, BudgetInfeasible, CheckpointError, ScheduleError
from torchckpt.planning import Kind
from torchckpt.planning.plan.run import fit_measured
from torchckpt.planning.plan.run.extra_memory import beside_of, highest_bytes, peaks_of
from torchckpt.regions.moved.copies import copies_of
from torchckpt.regions.moved.region import Moved
from torchckpt.testing import count_recomputes

pytestmark = [with_gloo, pytest.mark.accelerator, pytest.mark.usefixtures("alone")]

SIZE, ROWS, MICRO_BATCHES, BLOCKS = 32, 512, 4, 4
HOST = "1GiB"
NAMES = ("ScheduleGPipe", "ScheduleInterleaved1F1B")


@pytest.fixture(autouse=True)
def activations_of_these_stages_are_sent(monkeypatch):
    """They have 64 KiB, so that the tests are quick."""
    monkeypatch.setattr(Moved.__init__, "__defaults__", (SIZE * ROWS * 4, None, False))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)

    def forward(self, x):
        return x + nn.functional.dropout(self.second(nn.functional.gelu(self.first(x))), 0.2, self.training)


def stages_on(name, device, regions):
    torch.manual_seed(0)
    stages = []
    count = 1 if name in SINGLE else 2
    for index in range(count):
        blocks = [Block() for _ in range(BLOCKS + 1 - count)]
        for block in blocks if regions else ():
            checkpoint_module(block)
        stages.append(Stage(nn.Sequential(*blocks).to(device), index, count, device))
    return stages


def trained(name, device, steps, **options):
    """What a run saw, and its schedule."""
    stages = stages_on(name, device, bool(options))
    schedule = schedule_on(stages, name, MICRO_BATCHES)
    if options:
        schedule = recompute_ahead(schedule, **options)
    generator, seen = torch.Generator().manual_seed(1), []
    for number in range(steps):
        torch.manual_seed(number)
        x, target = (torch.randn(MICRO_BATCHES * ROWS, SIZE, generator=generator).to(device) for _ in range(2))
        losses: list[torch.Tensor] = []
        schedule.step(x, target=target, losses=losses)
        seen += [loss.detach() for loss in losses] + gradients_of(stages)
        for stage in stages:
            stage.submod.zero_grad()
    return seen, schedule


@functools.cache
def plain(name, device, steps):
    return trained(name, device, steps)[0]


def cases(budgets, quick):
    """Both schedules within all budgets, of which those that are not quick are slow."""
    return slow_but(quick, product(NAMES, budgets))


@few(1)
@pytest.mark.parametrize(("name", "budget"), cases(["55%", "70%"], [(NAMES[0], "55%"), (NAMES[1], "70%")]))
def test_equal_to_the_bit_and_within_the_budget(accelerator, name, budget):
    seen, schedule = trained(name, accelerator, 6, budget=budget, host=HOST)
    assert equal(seen, plain(name, accelerator, 6))
    report = schedule.report()
    assert report.plan.moves
    (measured,), (planned,) = report.measured_peak_bytes, report.planned_peak_bytes
    # The output of a block may count twice where it is the input of a kept one, and a forward is the peak.
    assert planned - measured in (0, SIZE * ROWS * 4)
    assert measured <= report.budget_bytes[0]
    assert report.host_peak_bytes == report.plan.host_peak_bytes
    assert len(report.waited_seconds) == 1
    assert "planned on host" in str(report)


@few(1)
@pytest.mark.parametrize(
    ("name", "budget"), cases(["50%", "60%", "85%"], [(NAMES[0], "50%"), (NAMES[1], "85%")])
)
def test_no_action_takes_more_than_planned(accelerator, name, budget, monkeypatch):
    measured = []
    monkeypatch.setattr(fit_measured, "beside_of", lambda *args: measured.append(beside_of(*args)) or measured[-1])
    _, schedule = trained(name, accelerator, 6, budget=budget, host="1920KiB")
    planned, (beside,) = schedule.plan.step, measured
    # A replay that takes more than the backward behind it counts for a block that is kept, too.
    for action, highest in zip(planned.schedule.ranks[0], highest_bytes(planned, 0, beside)):
        assert schedule._phase.levels[action].highest <= highest, action
    assert max(level.highest for level in schedule._phase.levels.values()) == peaks_of(planned, beside)[0]


def with_seconds(monkeypatch, seconds, rate):
    """Plan as if each part of a block took so long and nothing else did, with so many bytes a second both ways."""

    def at_once(part):
        return replace(part, forward_seconds=0.0)

    def fitted(order, stages, links, budget, took, tied, pairs, host):
        names = "forward_seconds", "input_grad_seconds", "weight_grad_seconds", "recompute_seconds"
        timed = []
        for stage in stages:
            blocks = tuple(replace(block, **dict.fromkeys(names, seconds)) for block in stage.blocks)
            timed.append(replace(stage, blocks=blocks, before=at_once(stage.before), after=at_once(stage.after)))
        host = replace(host, out=rate, back=rate, drag=0.0)
        return fit_measured.fitted(order, timed, links, budget, took, tied, pairs, host)

    monkeypatch.setattr(phases, "fitted", fitted)


def test_what_a_backward_takes_is_not_there_before_its_first_release(accelerator, monkeypatch):
    measured = []
    with_seconds(monkeypatch, 1e-3, 2e8)
    monkeypatch.setattr(fit_measured, "beside_of", lambda *args: measured.append(beside_of(*args)) or measured[-1])
    _, schedule = trained(NAMES[0], accelerator, 6, budget="50%", host=HOST)
    planned, (beside,), levels = schedule.plan.step, measured, schedule._phase.levels
    assert planned.moves
    of_actions = dict(zip(planned.schedule.ranks[0], highest_bytes(planned, 0, beside)))
    backwards = [action for action in of_actions if action.kind is Kind.BACKWARD]
    assert [of_actions[action] for action in backwards] == [levels[action].highest for action in backwards]


class Cast(nn.Module):
    """It saves a copy of its input in place of it, which a replay holds as well until its backward begins."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE, 2 * SIZE, dtype=torch.bfloat16)
        self.second = nn.Linear(2 * SIZE, SIZE)

    def forward(self, x):
        return x + self.second(self.first(x.bfloat16()).relu().float() * 0.5)


def test_no_backward_takes_more_than_planned_beside_what_its_replay_leaves(accelerator, monkeypatch):
    measured = []
    monkeypatch.setitem(globals(), "Block", Cast)
    monkeypatch.setattr(fit_measured, "beside_of", lambda *args: measured.append(beside_of(*args)) or measured[-1])
    _, schedule = trained(NAMES[0], accelerator, 6, budget="60%", host=HOST)
    planned, (beside,) = schedule.plan.step, measured
    assert planned.moves
    for action, highest in zip(planned.schedule.ranks[0], highest_bytes(planned, 0, beside)):
        assert schedule._phase.levels[action].highest <= highest, action


def test_blocks_that_are_away_are_not_run_again(accelerator):
    _, schedule = trained(NAMES[0], accelerator, 4, budget="50%", host=HOST)
    recomputed = sum(len(schedule.plan.step.choice((0, i)).recomputed) for i in range(MICRO_BATCHES))
    x = torch.randn(MICRO_BATCHES * ROWS, SIZE, device=accelerator)
    with count_recomputes() as replays:
        schedule.step(x, target=x)
    assert replays.total == recomputed < MICRO_BATCHES * BLOCKS


def test_a_plan_goes_to_another_run(accelerator):
    _, schedule = trained(NAMES[0], accelerator, 4, budget="50%", host=HOST)
    seen, again = trained(NAMES[0], accelerator, 3, plan=schedule.plan.to_json())
    assert again.plan.moves == schedule.plan.moves
    assert equal(seen, plain(NAMES[0], accelerator, 3))


def test_nothing_is_pinned_in_planned_steps(accelerator):
    arena = copies_of(accelerator).arena
    _, schedule = trained(NAMES[0], accelerator, 5, budget="50%", host=HOST)
    before, x = arena.bytes, torch.randn(MICRO_BATCHES * ROWS, SIZE, device=accelerator)
    schedule.step(x, target=x)
    assert arena.bytes == before


def test_pinned_memory_that_cannot_be_had_is_an_error_before_a_planned_step(accelerator, monkeypatch):
    def refuse(size):
        raise CheckpointError("the host has no pinned memory")

    _, schedule = trained(NAMES[0], accelerator, 4, budget="50%", host=HOST)
    monkeypatch.setattr(copies_of(accelerator).arena, "reserve", refuse)
    for options in ({"budget": "50%", "host": HOST}, {"plan": schedule.plan}):
        _, schedule = trained(NAMES[0], accelerator, 4 * ("budget" in options), **options)
        schedule._stages[0].submod[0].register_forward_hook(raises)
        with pytest.raises(CheckpointError, match="the host has no pinned memory"):
            schedule.step(torch.randn(MICRO_BATCHES * ROWS, SIZE, device=accelerator))


def test_the_peak_on_the_host_is_that_of_the_last_step(accelerator):
    _, schedule = trained(NAMES[0], accelerator, 4, budget="50%", host=HOST)
    arena = copies_of(accelerator).arena
    arena.give(arena.take(2**30).bytes)  # somebody else has used it before
    x = torch.randn(MICRO_BATCHES * ROWS, SIZE, device=accelerator)
    schedule.step(x, target=x)
    assert schedule.report().host_peak_bytes == schedule.plan.host_peak_bytes


def raises(*args):
    raise ValueError("in the middle")


@pytest.mark.parametrize("hook", ["register_full_backward_hook", *slow(["register_forward_pre_hook"])])
def test_a_step_that_fails_and_an_evaluation_leave_nothing_to_the_next_step(accelerator, hook):
    seen = []
    for options in ({}, {"budget": "45%", "host": HOST}):
        _, schedule = trained(NAMES[0], accelerator, 4, **options)
        torch.manual_seed(5)
        x = torch.randn(MICRO_BATCHES * ROWS, SIZE).to(accelerator)
        if options:
            stage = schedule._stages[-1].submod
            with getattr(stage[2], hook)(raises), pytest.raises(ScheduleError):
                schedule.step(x, target=x)
            schedule.eval(x, target=x)
            stage.zero_grad()
        for each in range(2):
            torch.manual_seed(each)
            losses = []
            schedule.step(x, target=x, losses=losses)
            seen.append([loss.detach() for loss in losses])
    assert equal(seen[0], seen[2])
    assert equal(seen[1], seen[3])


def test_a_budget_too_small_for_both(accelerator):
    with pytest.raises(BudgetInfeasible, match="the budget is too small"):
        trained(NAMES[0], accelerator, 4, budget="128KiB", host="64KiB")


def faults(device, **options):
    stages = stages_on(NAMES[0], device, True)
    with pytest.raises(ArgumentError) as raised:
        recompute_ahead(schedule_on(stages, NAMES[0], MICRO_BATCHES, loss_of), **options)
    return str(raised.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"host": HOST}, "a host is given without a budget"),
        ({"budget": "50%", "host": "0GB"}, "the bytes of a host are not"),
        ({"budget": "50%", "host": "lots"}, "the bytes of a host are not"),
        ({"budget": "50%", "host": ["1GB", "1GB"]}, "the bytes of a host are neither one"),
    ],
)
def test_wrong_hosts(accelerator, options, text):
    assert text in faults(accelerator, **options)


@pytest.mark.parametrize("host", ["lots", ["1GB", "1GB"]])
def test_what_works_is_a_host(accelerator, host):
    works = faults(accelerator, budget="50%", host=host).rpartition("works:")[2].partition(", or")[0]
    schedule = schedule_on(stages_on(NAMES[0], accelerator, True), NAMES[0], MICRO_BATCHES, loss_of)
    recompute_ahead(schedule, budget="50%", host=literal_eval(works.strip()))


def test_there_is_nothing_to_send_from_a_cpu():
    assert "there is nothing to send to a host" in faults(torch.device("cpu"), budget="50%", host=HOST)
