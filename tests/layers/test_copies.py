"""Copies of a model whose layers have a budget, and of the handle that it may hold itself."""
from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import torchckpt
from tests.layers.models import gradients
from tests.layers.test_steps import recomputes
from tests.slow import few
from torchckpt.testing import count_recomputes

COPIES = pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])


def test_copies_recompute_every_call(model, x):
    with torchckpt.checkpoint_layers(model, "layers.*", budget="1GiB"):
        for _ in range(2):
            recomputes(model, x)
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            with count_recomputes() as counted:
                gradients(copied, x)
            assert counted.total == 6
        assert recomputes(model, x) == 0


class Holding(nn.Module):
    """Holds its handle, as a LightningModule does."""

    def __init__(self, **options):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(4)))
        self.regions = torchckpt.checkpoint_layers(self.layers, "*", **options)

    def forward(self, x):
        return self.layers(x)


@few(1)
@COPIES
def test_the_handle_in_a_copy_is_that_of_the_copy(copied):
    model, x = Holding(budget="100%"), torch.randn(16, 8)
    assert [recomputes(model, x) for _ in range(3)] == [4, 0, 0]
    other = copied(model)
    assert other.regions.plan is None
    with pytest.raises(torchckpt.CheckpointError, match=r"(?s)in a copy of a model.*works:    handle\.remove"):
        other.regions.report()
    assert recomputes(other, x) == 4
    other.regions.remove()
    assert [recomputes(other, x), recomputes(model, x)] == [0, 0]
    assert str(other.regions).startswith("checkpoint_layers: 4 modules, removed")
    anew = torchckpt.checkpoint_layers(other.layers, "*", budget="100%")
    assert [recomputes(other, x) for _ in range(2)] == [4, 0]
    anew.remove()
    other = copied(model)
    model.regions.remove()
    assert [recomputes(model, x), recomputes(other, x)] == [0, 4]


@COPIES
def test_the_handle_in_a_copy_without_a_budget(copied):
    model, x = Holding(every=2), torch.randn(16, 8)
    other = copied(model)
    model.regions.remove()
    assert [recomputes(model, x), recomputes(other, x)] == [0, 2]
    other.regions.remove()
    assert recomputes(other, x) == 0


@few(1)
@COPIES
@pytest.mark.parametrize("inside", [True, False])
def test_copies_of_copies_have_one_hook(copied, inside):
    model, x = Holding(budget="100%"), torch.randn(16, 8)
    for _ in range(3):
        model = copied(model)
        begins_at, pattern = (model.layers, "*") if inside else (model, "layers.*")
        model.regions = torchckpt.checkpoint_layers(begins_at, pattern, budget="100%")
        assert [recomputes(model, x) for _ in range(2)] == [4, 0]
        assert sum(len(module._forward_pre_hooks) for module in model.modules()) == 1
    model.regions.remove()
    assert not any(module._forward_pre_hooks or module._forward_pre_hooks_with_kwargs for module in model.modules())


def test_a_copy_can_have_a_budget_of_its_own(model, x):
    with torchckpt.checkpoint_layers(model, "layers.*", budget="1GiB"):
        copied = copy.deepcopy(model)
        with torchckpt.checkpoint_layers(copied, "layers.*", budget="70%") as handle:
            assert [recomputes(copied, x) for _ in range(2)] == [6, 6 - len(handle.plan.kept)]
            assert [recomputes(model, x) for _ in range(2)] == [6, 0]
        assert recomputes(copied, x) == 0
        again = copy.deepcopy(model)
        torchckpt.checkpoint_layers(again, "layers.*")
        assert recomputes(again, x) == 6
        with pytest.raises(torchckpt.ArgumentError, match="checkpointed already"):
            torchckpt.checkpoint_layers(again, "layers.*")
