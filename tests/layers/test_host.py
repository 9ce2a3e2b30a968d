"""A budget with a host beside the device: calls are kept, recomputed, or sent there and back."""
from __future__ import annotations

import copy
import gc
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from tests.slow import few, slow
from torchckpt import ArgumentError, CheckpointError, checkpoint_layers
from torchckpt.layers import known
from torchckpt.layers.away import Away, best_away, with_away
from torchckpt.layers.follow import Steps
from torchckpt.layers.known import KnownStep, KnownSteps, Limit, measured
from torchckpt.layers.plan import LayersPlan, kept_within
from torchckpt.layers.took import Call, Took, of_another_size
from torchckpt.measuring.link import MeasuredLink
from torchckpt.regions.moved.copies import copies_of
from torchckpt.testing import count_recomputes

HOST = "1GiB"


@pytest.fixture(autouse=True)
def fast_link(request, monkeypatch):
    """A GPU recomputes such small layers sooner than it copies what they keep."""
    if "accelerator" in request.fixturenames and torch.cuda.is_available():
        monkeypatch.setattr(known, "measured_link", lambda *_: (1e15, 1e15, 0.0))


class Block(nn.Module):
    """Its input skips two linear layers of a width of its own."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(size, width), nn.Linear(width, size)

    def forward(self, x):
        return x + nn.functional.dropout(self.second(nn.functional.gelu(self.first(x))), 0.1, self.training)


def model_of(seed):
    chosen = random.Random(seed)
    torch.manual_seed(seed)
    return nn.Sequential(*(Block(16, 16 * chosen.choice((1, 1, 2, 3))) for _ in range(chosen.randint(3, 8))))


def steps_of(model, device, count=5):
    """Gradients of each step, and what each took above what was there before it."""
    gradients, peaks = [], []
    generator = torch.Generator().manual_seed(1)
    for number in range(count):
        x = torch.randn(16384, 16, generator=generator).to(device)
        torch.manual_seed(number)
        model.zero_grad()
        torch.accelerator.synchronize()
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        model(x).square().mean().backward()
        torch.accelerator.synchronize()
        peaks.append(torch.accelerator.max_memory_allocated() - before)
        gradients += [parameter.grad.clone() for parameter in model.parameters()]
    return gradients, peaks


@few(1)
@pytest.mark.accelerator
@pytest.mark.parametrize("seed", [*range(1, 4), *slow([0, *range(4, 12)])])
def test_the_devices_own_peak_is_the_planned_one(accelerator, seed):
    model = model_of(seed).to(accelerator)
    expected, peaks = steps_of(copy.deepcopy(model), accelerator)
    budget = int(max(peaks) * random.Random(seed).uniform(0.7, 0.95))
    handle = checkpoint_layers(model, "*", budget=budget, host=HOST)
    received, taken = steps_of(model, accelerator)
    assert all(map(torch.equal, received, expected))
    plan = handle.report()
    assert plan.away
    assert taken[3] == taken[4] == plan.peak_bytes == plan.measured_peak_bytes <= budget  # others are counted
    assert f"{len(plan.away)} are on the host" in str(plan)
    assert " kept  away " in str(plan)
    assert f"{plan.everything_kept_bytes / 1e6:.2f} MB" in handle.draw().partition("in place of ")[2][:12]


@pytest.mark.accelerator
def test_calls_that_are_away_are_not_run_again(accelerator):
    model = model_of(1).to(accelerator)
    handle = checkpoint_layers(model, "*", budget="80%", host=HOST)
    steps_of(model, accelerator, 3)
    with count_recomputes() as replays:
        steps_of(model, accelerator, 1)
    plan = handle.report()
    assert replays.total == len(model) - len(plan.kept) - len(plan.away)


@pytest.mark.accelerator
def test_forwards_that_wait_for_python_hide_no_copies(accelerator):
    _, handle = planned_on(accelerator)
    speed = handle.plan.took.calls[0].moved_bytes / 2  # a copy takes two replays
    found = []
    for forward in (1.1, 3.3):
        calls = (each._replace(forward_seconds=forward, replay_seconds=1.0, backward_seconds=2.0)
                 for each in handle.plan.took.calls)  # fmt: skip
        took, within = handle.plan.took._replace(calls=tuple(calls)), partial(kept_within, handle.plan.budget_bytes)
        found.append(best_away(took, MeasuredLink(speed, speed, 0.0), 2**30, within))
    assert found[0] == found[1] is not None


@pytest.mark.accelerator
def test_no_host_memory_no_call_goes(accelerator):
    model = model_of(1).to(accelerator)
    handle = checkpoint_layers(model, "*", budget="80%", host="1kB")
    steps_of(model, accelerator, 2)
    assert not handle.report().away


def test_on_a_cpu_nothing_goes():
    model = model_of(1)
    handle = checkpoint_layers(model, "*", budget="80%", host=HOST)
    model(torch.randn(16384, 16)).sum().backward()
    with pytest.warns(UserWarning, match="there is nothing to send to a host"):
        model(torch.randn(16384, 16)).sum().backward()
    assert not handle.report().away


class Tanh(nn.Module):
    """It saves what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return torch.tanh(self.second(torch.tanh(self.first(x))))


def planned_on(device, layer=lambda: Block(16, 32), **options):
    """A model that has a plan with calls that are away, and its handle."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer() for _ in range(8))).to(device)
    handle = checkpoint_layers(model, "*", **{"budget": "60%", "host": HOST} | options)
    steps_of(model, device, 2)
    return model, handle


@pytest.mark.accelerator
def test_calls_leave_and_come_back_where_the_plan_has_it(accelerator):
    model, handle = planned_on(accelerator)
    known = handle._steps._followed
    known.plan = replace(known.plan, away=tuple(each._replace(release=8) for each in known.plan.away))
    known.steps = 9  # no step is counted, so the peak is the device's
    _, peaks = steps_of(model, accelerator, 1)
    assert peaks == [known.plan.peak_bytes]


@pytest.mark.slow
@pytest.mark.accelerator
def test_only_calls_that_go_and_where_they_leave_and_come_back_are_looked_at(accelerator, monkeypatch):
    model = nn.Sequential(*(Block(16, 32) for _ in range(20))).to(accelerator)
    handle = checkpoint_layers(model, "*", budget="90%", host=HOST)
    steps_of(model, accelerator, 4)
    looked_at, run = [], Steps.run
    monkeypatch.setattr(Steps, "run", lambda steps, layer, *args: looked_at.append(layer) or run(steps, layer, *args))
    steps_of(model, accelerator, 1)
    places = {0, 19}.union(*handle.plan.away) & {*range(20)}
    assert handle.plan.away
    assert sorted(places) == looked_at != [*range(20)]


@pytest.mark.accelerator
def test_what_a_layer_returns_stays_and_is_not_copied(accelerator):
    model, handle = planned_on(accelerator, Tanh)
    arena = copies_of(accelerator).arena
    arena.begin_peak()
    _, peaks = steps_of(model, accelerator, 2)
    assert arena.peak_bytes == handle.report().host_bytes > 0
    assert peaks[1] <= handle.report().peak_bytes


class Seen(nn.Module):
    """The last one that was called leaves what is inside of it where it can be seen."""

    def __init__(self, seen) -> None:
        super().__init__()
        self.seen, self.first, self.second = seen, nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        self.seen[:] = [torch.tanh(self.first(x))]
        return x + nn.functional.dropout(self.second(nn.functional.gelu(self.seen[0])), 0.1)


@pytest.mark.accelerator
def test_what_others_hold_until_the_next_call_does_not_go(accelerator):
    seen: list[torch.Tensor] = []
    model = nn.Sequential(*(Seen(seen) for _ in range(8))).to(accelerator)
    model.register_forward_hook(lambda *_: seen.clear())
    handle = checkpoint_layers(model, "*", budget="60%", host=HOST)
    _, peaks = steps_of(model, accelerator)
    plan = handle.report()
    assert plan.away
    assert peaks[1] <= plan.budget_bytes
    assert peaks[3] == peaks[4] == plan.measured_peak_bytes <= plan.peak_bytes


@few(1)
@pytest.mark.accelerator
@pytest.mark.parametrize("host_bytes", [3 * 2**20, 5 * 2**20])
def test_the_link_is_measured_within_the_bytes_of_the_host(accelerator, host_bytes):
    arena = copies_of(accelerator).arena
    arena.begin_peak()
    planned_on(accelerator, host=host_bytes)
    assert arena.peak_bytes <= host_bytes


@pytest.mark.accelerator
def test_nothing_goes_where_backwards_come_in_another_order(accelerator):
    model = nn.Sequential(*(Block(16, 32) for _ in range(6))).to(accelerator)
    handle = checkpoint_layers(model, "*", budget="60%", host=HOST)
    for _ in range(4):
        losses = [model(torch.randn(16384, 16, device=accelerator)).square().mean() for _ in range(2)]
        for loss in losses:
            loss.backward()
    plan = handle.report()
    assert not plan.away
    assert plan.measured_peak_bytes <= plan.budget_bytes


@pytest.mark.accelerator
def test_pinned_memory_that_cannot_be_had_is_an_error_before_a_step(accelerator, monkeypatch):
    real = torch.empty

    def empty(*args, **kwargs):
        if "pin_memory" in kwargs:
            raise RuntimeError("the driver has none")
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(copies_of(accelerator), "arena", type(copies_of(accelerator).arena)(accelerator))
    ran = []
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(16, 32) for _ in range(8))).to(accelerator)
    checkpoint_layers(model, "*", budget="60%", host=HOST)
    model[0].register_forward_hook(lambda *args: ran.append("a layer"))
    with pytest.raises(CheckpointError, match="the host has no pinned memory"):
        steps_of(model, accelerator, 2)
    assert ran == ["a layer"]


def test_nothing_goes_where_ranks_communicate_inside_of_layers():
    steps = KnownSteps(("0", "1", "2", "3"), Limit(20.0, None, HOST))
    steps._device = torch.device("cpu")
    with pytest.warns(UserWarning, match="ranks communicate inside of the chosen layers, so nothing is sent"):
        steps.plan([KnownStep(key=(), tooks={(): took(4)}, limit_bytes=20.0)], lambda wish: frozenset())


def away_alone():
    """A known step that recomputes one call, and keeps none on the device."""
    step = KnownStep(key=(), tooks={(): took(2)})
    step.follow(LayersPlan(step.took, ("0", "1"), 10.0, frozenset(), (Away(0, 1, 0),)))
    return step


def test_a_plan_that_keeps_nothing_here_is_made_again_too():
    exceeded, out_of_memory = away_alone(), away_alone()
    measured(exceeded, 20.0)
    assert (exceeded.plan, exceeded.share) == (None, 0.5)
    with pytest.warns(UserWarning, match="the next plan takes 90%"):
        assert "budget=9 or less" in KnownSteps(("0", "1"), Limit(10.0, None)).ran_out([out_of_memory])
    assert out_of_memory.plan is None


def backward(model, x):
    model(x).square().mean().backward()


def twice(model, x):
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def penalised(model, x):
    loss = model(x).square().mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + sum(gradient.square().sum() for gradient in gradients)).backward()


def evaluated(model, x):
    with torch.no_grad():
        model.eval()(x)
    model.train()(x)  # and a forward without a backward
    backward(model, x)


def half(model, x):
    with pytest.raises(ValueError, match="in the middle"):
        fails_in(model[6], model, x)
    backward(model, x)


def fails(*args):
    raise ValueError("in the middle")


def fails_in(layer, model, x, register="register_forward_pre_hook"):
    with getattr(layer, register)(fails):
        backward(model, x)


def half_a_backward(model, x):
    with pytest.raises(ValueError, match="in the middle"):
        fails_in(model[3], model, x, "register_full_backward_hook")
    model.zero_grad()
    backward(model, x)


def accumulated(model, x):
    for part in x.chunk(2):
        backward(model, torch.cat((part, part)))


def changed(model, x):
    y = model[:4](x)
    model[4:](y).square().mean().backward()
    backward(model, x)


@few(1)
@pytest.mark.accelerator
@pytest.mark.parametrize(
    "step", [twice, penalised, half, changed, *slow([evaluated, half_a_backward, accumulated])],
    ids=lambda step: step.__name__,
)
def test_whatever_a_planned_step_does_gradients_are_those_of_the_plain_model(accelerator, step):
    model, handle = planned_on(accelerator)
    assert handle.plan.away
    plain = copy.deepcopy(model)
    for each in (plain, model):
        for number in range(3):
            torch.manual_seed(number)
            each.zero_grad()
            (step if number == 1 else backward)(each, torch.randn(16384, 16, device=accelerator))
    pairs = zip(model.parameters(), plain.parameters())
    assert all(torch.equal(parameter.grad, other.grad) for parameter, other in pairs)
    gc.collect()
    copies_of(accelerator).arena.begin_peak()
    assert copies_of(accelerator).arena.used_bytes == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"host": HOST}, "a host is given without a budget"),
        ({"budget": "50%", "host": 0}, "host is not bytes above 0"),
        ({"budget": "50%", "host": "50%"}, "host is not bytes above 0"),
        ({"budget": "50%", "host": "lots"}, "host is not bytes above 0"),
    ],
)
def test_wrong_hosts(options, text):
    with pytest.raises(ArgumentError, match=text):
        checkpoint_layers(model_of(1), "*", **options)


def took(calls, inner=4.0, moved=3.0, seconds=1.0):
    """A step of equal calls, in which the bytes of each moment are those of what is held alone."""
    call = Call(0, seconds, seconds, 2 * seconds, 1.0, inner, *[0.0] * 6, moved)
    boundaries = [float(place) for place in range(calls + 1)]
    each = [call._replace(forward_most=at + 5, kept_most=at + 5, replay_most=at + 5, backward_most=at + 5)
            for at in boundaries[:-1]]
    return Took(tuple(each), tuple(boundaries))


def test_bytes_go_at_the_release_and_come_at_the_issue():
    away = with_away(took(4), [Away(0, release=2, issue=1)])
    plain = took(4)
    rises = [call.forward_most - before.forward_most for call, before in zip(away.calls, plain.calls)]
    assert rises == [0.0, 3.0, 0.0, 0.0]  # until the forward of call 2 begins
    rises = [call.backward_most - before.backward_most for call, before in zip(away.calls, plain.calls)]
    assert rises == [0.0, 3.0, 0.0, 0.0]  # from the backward of call 1 on
    assert away.calls[0].inner_bytes == 1.0
    assert [call.forward_left for call in away.calls] == [3.0, 3.0, 0.0, 0.0]
    assert [call.backward_left for call in away.calls] == [0.0, 3.0, 0.0, 0.0]


def test_of_a_smaller_size_it_is_not_known_what_can_go():
    sizes = {size: ((((size,),),), took(1, inner=4.0 * size, moved=3.0 * size)) for size in (8, 16)}
    for size, moved in ((4, 0.0), (12, 36.0)):
        foretold = of_another_size(sizes[8], sizes[16], ((size,),))
        assert foretold is None or foretold[1].calls[0].moved_bytes == moved


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 0.9])
def test_a_fast_link_leaves_nothing_to_recompute_and_a_slow_one_is_not_used(share):
    step = took(12)
    limit = step.peak_bytes(range(12)) * share
    kept, away = best_away(step, MeasuredLink(6.0, 6.0, 0.0), 1e9, lambda each, must: kept_within(limit, each, must))
    assert len(kept) + len(away) == 12 or share == 0.3
    assert with_away(step, away).peak_bytes(kept.union(each.call for each in away)) <= limit
    assert best_away(step, MeasuredLink(0.1, 0.1, 0.0), 1e9, lambda each, must: kept_within(limit, each, must)) is None


@pytest.mark.parametrize("calls", [12, 40, 100])
def test_a_host_with_room_for_few_of_many_calls_has_them(calls):
    step, link = took(calls, moved=4.0), MeasuredLink(8.0, 8.0, 0.0)
    within = partial(kept_within, step.peak_bytes(range(calls)) * 0.5)
    assert [len(best_away(step, link, 4.0 * room, within)[1]) for room in (1, 2, 5)] == [1, 2, 5]
    assert best_away(step, link, 3.9, within) is None


def test_calls_behind_one_that_has_no_room_go():
    step = took(6)
    first = step.calls[0]._replace(inner_bytes=11.0, moved_bytes=10.0)
    step, link = step._replace(calls=(first, *step.calls[1:])), MeasuredLink(30.0, 30.0, 0.0)
    within = partial(kept_within, step.peak_bytes(()) + 6.0)
    found = [best_away(step, link, host, within) for host in (4.0, 9.0, 100.0)]
    assert [[each.call for each in away] for _, away in found] == [[1], [1, 2], [1, 2]]
    assert best_away(step, link, 2.0, within) is None
