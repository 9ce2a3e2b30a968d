"""A budget with a host beside the device: calls are kept, recomputed, or sent there and back."""
from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn

from torchckpt import ArgumentError, checkpoint_layers
from torchckpt.layers.away import Away, HostLink, best_away, with_away
from torchckpt.layers.plan import kept_within
from torchckpt.layers.took import Call, Took
from torchckpt.testing import count_recomputes

HOST = "1GiB"


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


@pytest.mark.accelerator
@pytest.mark.parametrize("seed", range(12))
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
    assert "<svg" in handle.draw()


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
def test_no_host_memory_no_call_goes(accelerator):
    model = model_of(1).to(accelerator)
    handle = checkpoint_layers(model, "*", budget="80%", host="1kB")
    steps_of(model, accelerator, 2)
    assert not handle.report().away


def test_on_a_cpu_nothing_goes():
    model = model_of(1)
    handle = checkpoint_layers(model, "*", budget="80%", host=HOST)
    for _ in range(2):
        model(torch.randn(16384, 16)).sum().backward()
    assert not handle.report().away


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


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 0.9])
def test_a_fast_link_leaves_nothing_to_recompute_and_a_slow_one_is_not_used(share):
    step = took(12)
    limit = step.peak_bytes(range(12)) * share
    kept, away = best_away(step, HostLink(1e9, 6.0, 6.0), lambda each, must: kept_within(limit, each, must))
    assert len(kept) + len(away) == 12 or share == 0.3
    assert with_away(step, away).peak_bytes(kept.union(each.call for each in away)) <= limit
    assert best_away(step, HostLink(1e9, 0.1, 0.1), lambda each, must: kept_within(limit, each, must)) is None
