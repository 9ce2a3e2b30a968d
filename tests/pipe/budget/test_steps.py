"""Steps within a budget: the numbers of a pipe that keeps everything, and the bytes that were planned."""
from __future__ import annotations

import copy
import gc
import pickle
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from tests.helpers import FullDevice, by_hand, prefetched
from tests.pipe.budget.models import MODELS, SIZE, WAYS, Raises, Wide, budgeted, pair, state, step, wide
from tests.slow import few, slow, slow_but
from torchckpt import ArgumentError, BudgetInfeasible, CheckpointError, Pipe, checkpoint
from torchckpt.planning import Kind
from torchckpt.regions.private import dispatch_modes_are_active


@pytest.fixture(autouse=True)
def no_mode_is_left():
    yield
    gc.collect()
    assert dispatch_modes_are_active() == 0


def equal(found, expected):
    assert len(found) == len(expected)
    return all(one is other is None or torch.equal(one, other) for one, other in zip(found, expected))


def planned(name, way, share, chunks=4):
    """After five steps beside those of a pipe that keeps everything."""
    plain, pipe = budgeted(name, way, share, chunks)
    for seed in range(5):
        x = torch.randn(16, SIZE)
        expected = step(plain, x, way, seed), state(plain)
        found = step(pipe, x, way, seed), state(pipe)
        assert equal(found[0], expected[0])
        assert equal(found[1], expected[1])
    return pipe


def halved(cases):
    """Each case in both ways, of which the second one in turn is slow."""
    quick = {(*case, WAYS[number % 2]) for number, case in enumerate(cases)}
    return slow_but(quick, [(*case, way) for case in cases for way in WAYS])


@few(1)
@pytest.mark.parametrize(("name", "way"), halved([(name,) for name in MODELS]))
def test_a_step_is_that_of_the_pipe_without_a_budget(name, way):
    pipe = planned(name, way, "65%")
    assert pipe.plan.recomputed_share > 0


@few(1)
@pytest.mark.parametrize(("rows", "way"), halved([((64, 64, 8, 8, 64, 8),), ((8, 8, 64, 8, 64, 8),)]))
def test_a_share_is_one_of_the_largest_step_that_is_known(rows, way):
    _, pipe = pair("wide", "90%")
    budgets = []
    for at, count in enumerate(rows):
        step(pipe, torch.randn(count, SIZE), way)
        budgets += [pipe.plan.whole_step.budget_bytes] if at > 3 else []
    assert budgets[0] == budgets[1]
    assert pipe.plan.recomputed_share == 0  # the small one keeps all


SHARES = [("50%", 2), ("35%", 8), ("80%", 4), ("90%", 3), ("100%", 4)]


@few(1)
@pytest.mark.parametrize(("share", "chunks", "way"), halved(SHARES))
def test_a_step_takes_what_is_planned(share, chunks, way):
    report = planned("wide", way, share, chunks).report()
    for measured, foretold, budget in zip(
        report.measured_peak_bytes, report.planned_peak_bytes, report.budget_bytes
    ):
        assert 0.75 * foretold <= measured <= 1.001 * foretold <= 1.002 * budget
    assert (report.plan.recomputed_share == 0) == (share == "100%")


def test_a_plan_that_took_more_is_reported_until_another_one_was_counted(monkeypatch):
    monkeypatch.setattr("torchckpt.measuring.remembered.NEAR", 0.0)
    pipe = planned("wide", "step", "65%")
    step(pipe, torch.randn(16, SIZE), "step")
    assert pipe.plan is None  # which this sixth step found too large; the fourth one was counted anew
    assert pipe.report().plan.recomputed_share > 0


def test_the_order_of_the_plan_runs_as_it_is():
    pipe = planned("wide", "step", "75%")
    order = pipe.timeline().schedule
    assert order == pipe.plan.schedule
    assert any(action.kind is Kind.RECOMPUTE for actions in order.ranks for action in actions)


@pytest.mark.parametrize("share", ["60%", *slow(["90%"])])
def test_one_stage_is_the_loop_over_micro_batches(share):
    """With dropout: here both draw in one order."""
    _, pipe = budgeted("one stage", "step", share)
    plain = nn.Sequential(*copy.deepcopy(pipe))
    for seed in range(4):
        x = torch.randn(16, SIZE)
        found = step(pipe, x, "step", seed)
        torch.manual_seed(seed)
        for part in x.chunk(4):
            (mse_loss(plain(part), part) / 4).backward()
        assert equal(found[1:], [one.grad for one in plain.parameters()])
        plain.zero_grad()


@few(1)
@pytest.mark.parametrize("way", WAYS)
def test_two_shapes_have_two_plans(way):
    plain, pipe = pair("wide", "80%")
    plans = []
    for seed, rows in enumerate([16, 32, 16, 32, 16, 32, 14]):
        x = torch.randn(rows, SIZE)
        assert equal(step(pipe, x, way, seed), step(plain, x, way, seed))
        plans.append(pipe.plan)
    small, large = plans[2], plans[3]
    assert plans == [None, None, small, large, small, large, None]
    assert max(large.peak_bytes) > max(small.peak_bytes)


def test_both_ways_have_plans_of_their_own():
    _, pipe = pair("wide", "80%")
    x = torch.randn(16, SIZE)
    for way in (*WAYS, *WAYS):
        step(pipe, x, way)
    assert pipe.plan.schedule.name == "gpipe"
    step(pipe, x, "step")
    assert pipe.plan.schedule.name == "1f1b"


@few(1)
@pytest.mark.parametrize("way", WAYS)
def test_an_exception_in_a_planned_step(way):
    torch.manual_seed(0)
    model = nn.Sequential(*(Raises(32) for _ in range(4)))
    plain = Pipe(copy.deepcopy(model), [2, 2], ["cpu"] * 2, 4, checkpoint="never")
    pipe = Pipe(model, [2, 2], ["cpu"] * 2, 4, budget="80%")
    x = torch.randn(16, SIZE)
    for at in range(4):
        if at:  # in a counted step, before the plan, and in planned ones
            model[3].fails = RuntimeError("no")
            with pytest.raises(RuntimeError, match="no"):
                step(pipe, x, way)
            model[3].fails = None
            pipe.zero_grad()
        assert equal(step(pipe, x, way, at), step(plain, x, way, at))
    assert pipe.plan is not None


def test_out_of_memory_in_a_planned_step_has_the_next_plan_take_less():
    model = nn.Sequential(*(Raises(64) for _ in range(4)))
    pipe = Pipe(model, [2, 2], ["cpu"] * 2, 4, budget="95%")
    x = torch.randn(32, SIZE)
    for _ in range(2):
        step(pipe, x, "step")
    before = pipe.plan.peak_bytes
    model[3].fails = torch.OutOfMemoryError("none left")
    with pytest.raises(torch.OutOfMemoryError, match=r"none left\nPipe: the next plan takes 90% of its budget"):
        step(pipe, x, "step")
    model[3].fails = None
    step(pipe, x, "step")
    assert max(pipe.plan.peak_bytes) < max(before)


@few(1)
@pytest.mark.parametrize(
    ("where", "is_held", "is_twice"),
    [(0, False, False), (3, True, False), ("loss", False, False), ("loss", True, False), (0, False, True)],
)
def test_out_of_memory_in_the_backward_of_a_graph_has_the_next_plan_take_less(where, is_held, is_twice, monkeypatch):
    device = FullDevice()
    monkeypatch.setattr("torchckpt.pipe.budget.within.ooms_of", lambda _: device.ooms)
    model = nn.Sequential(*(Wide(64) for _ in range(4)))
    pipe, x, held = Pipe(model, [2, 2], ["cpu"] * 2, 4, budget="95%"), torch.randn(32, SIZE), []

    def said(run):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run()
        return [str(each.message) for each in caught]

    def graph_step():
        step(pipe, x, "graph")

    def with_two_forwards():
        loss = pipe(x).square().mean()
        pipe(x)
        loss.backward()

    def fail():
        place = pipe if where == "loss" else model[where].parts[0].weight
        hook = (place.register_forward_hook if where == "loss" else place.register_hook)(device.fail)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            (with_two_forwards if is_twice else graph_step)()
        hook.remove()
        pipe.zero_grad()
        held.extend([caught] * is_held)

    for _ in range(3):
        assert said(graph_step) == []
    before = pipe.plan.peak_bytes
    hook = model[3].parts[0].weight.register_hook(device.recover)
    assert said(graph_step) == []
    hook.remove()
    device.recover()  # of something else, between steps
    assert said(graph_step) == []
    assert pipe.plan.peak_bytes == before
    assert bool(said(fail)) == is_twice  # of the second forward
    told = said(graph_step)
    assert "Pipe: a device was out of memory in a planned step, so the next plan takes 90% of its budget" in told
    held.clear()
    assert said(graph_step) == []
    assert max(pipe.plan.peak_bytes) < max(before)
    said(fail)
    assert "so the next plan takes 90% of its budget" in " ".join(said(graph_step))


def test_a_forward_without_a_backward_is_not_counted_and_leaves_nothing():
    plain, pipe = pair("wide", "80%")
    x = torch.randn(16, SIZE)
    for seed in range(3):
        pipe(x)  # freed at once
        assert equal(step(pipe, x, "graph", seed), step(plain, x, "graph", seed))
    assert pipe.plan is not None
    with torch.no_grad():
        torch.manual_seed(0)
        expected = plain(x)
        torch.manual_seed(0)
        assert torch.equal(pipe(x), expected)


def test_two_forwards_before_a_backward():
    plain, pipe = pair("wide", "80%")
    x, losses = torch.randn(16, SIZE), []
    for _ in range(2):
        step(pipe, x, "graph")
    with pytest.warns(UserWarning, match="Pipe: a forward begins while another waits"):  # noqa: PT031
        for each in (pipe, plain):
            torch.manual_seed(0)
            losses.append(each(x).sum() + each(2 * x).sum())
    for loss in losses:
        loss.backward()
    assert equal([one.grad for one in pipe.parameters()], [one.grad for one in plain.parameters()])


@few(1)
@pytest.mark.parametrize("call", [checkpoint, by_hand, prefetched])
def test_a_forward_inside_of_a_region_has_no_plan(call):
    """The replay of a region made by hand comes before the backward of the forward."""
    plain, pipe = pair("wide", "80%")
    x, wide = torch.randn(16, SIZE), nn.Linear(SIZE, SIZE)
    for _ in range(2):
        step(pipe, x, "graph")
    pipe.zero_grad()
    assert pipe.plan is not None
    for each in (pipe, plain):
        torch.manual_seed(0)
        said = pytest.warns(match="Pipe: a forward is inside of a region") if each is pipe else nullcontext()
        with said:
            wide(call(each, wide(x))).sum().backward()
    assert equal([one.grad for one in pipe.parameters()], [one.grad for one in plain.parameters()])


class Stops(Wide):
    def forward(self, x):
        return super().forward(x.detach())


def test_a_backward_that_does_not_reach_all_stages_is_said_to_have_no_plan():
    pipe = Pipe(nn.Sequential(Wide(16), Stops(16)), [1, 1], ["cpu"] * 2, 4, budget="80%")
    for _ in range(3):
        step(pipe, torch.randn(16, SIZE), "graph")
    with pytest.warns(UserWarning, match="does not reach all micro-batches"):
        step(pipe, torch.randn(16, SIZE), "graph")
    assert pipe.plan is None


def test_frozen_layers_in_front():
    plain, pipe = pair("wide", "98%")
    for each in (plain, pipe):
        for layer in list(each)[:3]:
            layer.requires_grad_(False)
    x = torch.randn(16, SIZE)
    for way in WAYS:
        for seed in range(4):
            assert equal(step(pipe, x, way, seed), step(plain, x, way, seed))
        assert pipe.report().plan is pipe.plan


def test_a_graph_that_is_kept_for_a_second_backward():
    plain, pipe = pair("wide", "95%")
    for seed in range(4):
        found = []
        for each in (pipe, plain):
            torch.manual_seed(seed)
            loss = each(torch.ones(16, SIZE)).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
            found.append([one.grad for one in each.parameters()])
            each.zero_grad()
        assert equal(*found)
    assert pipe.plan is not None


@few(1)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
def test_a_copy_has_the_budget_and_no_plan(copied):
    _, pipe = pair("wide", "80%")
    x = torch.randn(16, SIZE)
    for _ in range(3):
        step(pipe, x, "step")
    other = copied(pipe)
    assert other.plan is None
    for seed in range(3):
        assert equal(step(other, x, "step", seed), step(pipe, x, "step", seed))
    assert other.plan is not None


# what users see -------------------------------------------------------------------------------------------------------


def test_report_and_picture(tmp_path):
    _, pipe = pair("wide", "80%")
    x = torch.randn(16, SIZE)
    for _ in range(2):
        step(pipe, x, "step")
        with pytest.raises(CheckpointError, match="no step of a plan was counted yet: that is the third step"):
            pipe.report()
    step(pipe, x, "step")
    text = str(pipe.report())
    assert "planned peak  measured peak" in text
    assert "kept/early/late by micro-batch" in text
    assert pipe.draw(tmp_path / "plan.svg").startswith("<svg")
    assert (tmp_path / "plan.svg").read_text() == pipe.draw()


@few(1)
@pytest.mark.parametrize("way", WAYS)
def test_too_small(way):
    _, pipe = pair("wide", 1000)
    x = torch.randn(16, SIZE)
    step(pipe, x, way)
    for _ in range(2):  # also the next time
        with pytest.raises(BudgetInfeasible, match=r"^Pipe.*: the budget is too small: rank \d takes \d+ b") as error:
            step(pipe, x, way)
    budgets = [1e9, 1e9]
    budgets[error.value.rank] = error.value.least_bytes  # is enough
    _, pipe = pair("wide", budgets)
    for _ in range(2):
        step(pipe, x, way)
    assert pipe.plan is not None


@few(1)
@pytest.mark.parametrize("way", WAYS)
def test_what_is_enough_is_enough_for_all_steps_that_are_known(way):
    _, pipe = pair("wide", 1000)
    small, large = torch.randn(16, SIZE), torch.randn(64, SIZE)
    step(pipe, large, way)
    step(pipe, small, way)
    with pytest.raises(BudgetInfeasible) as error:
        step(pipe, small, way)
    _, pipe = pair("wide", error.value.least_bytes)
    for _ in range(3):
        step(pipe, small, way)
        step(pipe, large, way)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"budget": "6"}, "it has no unit"),
        ({"budget": 0.5}, 'budget="50%"'),
        ({"budget": 0}, "not bytes above 0"),
        ({"budget": True}, "neither one for every rank nor a list of 2|not bytes above 0"),
        ({"budget": ["50%"]}, "1 budgets"),
        ({"budget": "50%", "checkpoint": "never"}, "checkpoint is given, but a budget decides what is recomputed"),
        ({"budget": "50%", "checkpoint": "always"}, "checkpoint is given, but a budget decides"),
    ],
)
def test_bad_input(options, said):
    with pytest.raises(ArgumentError, match=said):
        Pipe(wide(), [3, 3], ["cpu"] * 2, **options)


def test_checkpoint_that_is_set_afterwards():
    _, pipe = pair("wide", "80%")
    pipe.checkpoint = "never"
    with pytest.raises(ArgumentError, match="checkpoint is given, but a budget decides"):
        pipe(torch.randn(16, SIZE))


def test_the_budget_is_shown():
    assert repr(pair("wide", "80%")[1]).startswith("Pipe(chunks=4, budget='80%', lookahead=1")


@few(1)
@pytest.mark.parametrize("options", [{"lookahead": 2}, {"chunks": 1}, {"chunks": 5, "preserve_rng_state": True}])
@pytest.mark.parametrize("way", WAYS)
def test_options(way, options):
    plain, pipe = pair("three stages", "90%", **options)
    for seed in range(4):
        x = torch.randn(16, SIZE)
        assert equal(step(pipe, x, way, seed), step(plain, x, way, seed))
    assert pipe.report().plan is pipe.plan


def test_no_budget_no_plan():
    pipe = Pipe(nn.Sequential(Wide(16)), chunks=2)
    assert pipe.plan is None
    with pytest.raises(ArgumentError, match=r"Pipe.report\(\): there is no plan, for the pipe has no budget"):
        pipe.draw()


def test_a_list_of_budgets_is_one_for_each_stage():
    _, pipe = pair("wide", ["100%", "70%"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            step(pipe, torch.randn(16, SIZE), "graph")
    report = pipe.report()
    assert report.budget_bytes[1] == pytest.approx(0.7 * report.budget_bytes[0])
    assert report.plan.recompute_seconds[0] == 0 < report.plan.recompute_seconds[1]


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


@pytest.mark.parametrize("drops", [True, False])
def test_a_step_of_a_plan_is_reported_as_it_was(drops):
    """One that finds its gradients takes less than one that makes them, which the plan is for."""
    torch.manual_seed(0)
    pipe = Pipe(nn.Sequential(Residual(), Residual()), balance=[1, 1], devices=["cpu"] * 2, chunks=4, budget="1GB")
    for _ in range(3):
        pipe.step(*torch.randn(2, 64, 64), loss_fn=nn.functional.mse_loss)
        if drops:
            pipe.zero_grad()
    report = pipe.report()
    gradients = sum(x.numel() * 4 for x in pipe.parameters()) // 2  # of a stage
    for measured, planned in zip(report.measured_peak_bytes, report.planned_peak_bytes):
        assert (measured <= planned - gradients / 2) != drops
        assert measured <= planned


@pytest.mark.parametrize("drops", [True, False])
def test_gradients_that_are_there_count_once(drops):
    """In one backward of all micro-batches autograd adds up their gradients beside those that are there."""
    blocks = nn.Sequential(*(Residual() for _ in range(6)))
    pipe = Pipe(blocks, balance=[3, 3], devices=["cpu", "cpu"], chunks=4, budget=940_000)
    for _ in range(6):
        pipe(torch.randn(64, 64)).square().mean().backward()
        if drops:
            pipe.zero_grad()
    assert pipe.plan.recomputed_share == 0
    assert max(pipe.report().measured_peak_bytes) <= max(pipe.report().budget_bytes)
