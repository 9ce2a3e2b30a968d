"""What a forward does after its last saved tensor: a kept call does it while it holds what it saves, a replay never."""
from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from torch import nn

import torchckpt
from tests.layers.models import Model, gradients
from tests.slow import few
from torchckpt.regions.private import running_node
from torchckpt.testing import count_recomputes, peak_bytes


class Tailed(nn.Module):
    """A block that puts ``wide`` outputs side by side, and adds them. It saves nothing of them."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.up, self.down, self.wide = nn.Linear(16, 64), nn.Linear(64, 16), wide

    def inner(self, x):
        return self.down(nn.functional.gelu(self.up(x)))

    def forward(self, x):
        outputs = [self.inner(x), self.inner(x)] * (self.wide // 2)
        return torch.cat(outputs, -1).unflatten(-1, (self.wide, 16)).sum(-2)


class Nested(Tailed):
    """It has a region inside."""

    def forward(self, x):
        wide = torch.cat([torchckpt.checkpoint(self.inner, x.tanh())] * self.wide, -1)
        return wide.unflatten(-1, (self.wide, 16)).sum(-2)


class Several(Tailed):
    """It returns a tensor that it has before its tail, and two that it makes there."""

    def forward(self, x):
        early = self.inner(x).tanh()
        wide = torch.cat([early + self.inner(early)] * self.wide, -1)
        return early, wide.unflatten(-1, (self.wide, 16)).sum(-2), wide[..., :16].clone()


class Blocks(nn.Module):
    """Nothing but blocks, so that the forward of the last one takes the most bytes."""

    def __init__(self, block, wide: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block(wide) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            y = layer(x)
            x = y if isinstance(y, torch.Tensor) else sum(y)
        return x


def taken(model, budget, options):
    """The plan, the peak of a plain step, and those of three steps with the plan."""
    x = torch.randn(512, 16)

    def step():
        model(x).sum().backward()
        model.zero_grad()

    plain = peak_bytes(step, "cpu")
    with torchckpt.checkpoint_layers(model, "layers.*", budget=budget, **options) as handle:
        step()
        peaks = [peak_bytes(step, "cpu") for _ in range(3)]
        return handle.plan, plain, peaks


@few(1)
@pytest.mark.parametrize("options", [{}, {"early_stop": False}], ids=["", "to the end"])
@pytest.mark.parametrize(("block", "wide", "budget"), [
    *((Tailed, wide, budget) for wide in (2, 8, 24) for budget in ("70%", "80%", "90%", "100%")), (Nested, 24, "100%"),
])
def test_a_plan_has_what_it_takes_beside_what_is_kept(block, wide, budget, options):
    plan, _, peaks = taken(Blocks(block, wide), budget, options)
    assert max(peaks) <= plan.budget_bytes
    assert peaks == [pytest.approx(plan.peak_bytes, rel=0.02)] * 3
    assert plan.measured_peak_bytes == pytest.approx(plan.peak_bytes, rel=0.02)
    assert plan.kept


@few(1)
@pytest.mark.parametrize("options", [{}, {"early_stop": False}], ids=["", "to the end"])
@pytest.mark.parametrize("wide", [2, 24])
def test_outputs_from_before_it_and_from_it_count_once(wide, options):
    plan, plain, peaks = taken(Blocks(Several, wide), "100%", options)
    assert len(plan.kept) == 3
    assert [plain, *peaks] == [pytest.approx(plan.peak_bytes, rel=0.02)] * 4


def test_a_replay_takes_the_seconds_until_it_could_stop(monkeypatch):
    now = [0.0]

    class Slow(Tailed):
        def forward(self, x):
            now[0] += 1.0
            inner = self.inner(x)
            now[0] += 10.0
            return torch.cat([inner] * 2, -1)[..., :16]

    clock = mock.Mock(stamp=lambda: now[0], reader=lambda: float)
    monkeypatch.setattr("torchckpt.layers.count.Clock", lambda device: clock)
    model, x = Model([Slow(2) for _ in range(3)]), torch.randn(32, 16)
    with torchckpt.checkpoint_layers(model, "layers.*", budget="70%") as handle:
        gradients(model, x)
        now[0] = 0.0
        gradients(model, x)
        assert [call[1:3] for call in handle.plan.took.calls] == [(11.0, 1.0)] * 3
        recomputed = 3 - len(handle.plan.kept)
        assert now[0] == 33 + recomputed  # no other step runs to the end


class Drawing(Tailed):
    """Its tail changes a buffer, draws a random number, and raises errors in replays."""

    def __init__(self, wide: int, fails: bool) -> None:
        super().__init__(wide)
        self.register_buffer("calls", torch.zeros(()))
        self.fails = fails

    def forward(self, x):
        y = nn.functional.dropout(self.inner(x), 0.5)
        self.calls += 1
        y = y + torch.rand(())
        if self.fails and running_node() is not None:
            raise ValueError("not in a replay")
        return y


@pytest.mark.parametrize("fails", [False, True], ids=["", "that raises an error"])
def test_whatever_it_does_in_a_replay_changes_nothing(fails):
    model, x = Model([Drawing(2, fails) for _ in range(3)]), torch.randn(32, 16)
    plain = copy.deepcopy(model)
    torchckpt.checkpoint_layers(model, "layers.*", budget="75%")
    for most in (3, 2):
        expected, drawn = gradients(plain, x), torch.rand(())
        with count_recomputes() as counted:
            found = gradients(model, x)
        assert torch.equal(torch.rand(()), drawn)
        assert all(map(torch.equal, found, expected))
        assert all(map(torch.equal, model.buffers(), plain.buffers()))
        assert 0 < counted.total <= most
