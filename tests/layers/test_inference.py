"""Evaluation in inference mode beside a budget: the mode that has counted a step is left, and tensors can be made."""
from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from torchckpt import Pipe, checkpoint_layers
from torchckpt.pipe import balance_by_bytes
from torchckpt.regions.private import dispatch_modes_are_active

X = torch.randn(4, 8)


def block():
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))


def of_layers():
    model = nn.Sequential(block(), block(), block())
    checkpoint_layers(model, "*", budget="1GB")
    return model


def of_pipe():
    return Pipe(nn.Sequential(block(), block()), [2], ["cpu"], 2, budget="1GB")


@pytest.mark.parametrize("make", [of_layers, of_pipe])
@pytest.mark.parametrize("trained", [1, 2, 3])
def test_an_evaluation_between_steps(make, trained):
    model = make()
    for _ in range(trained):
        mse_loss(model(X), X).backward()
    with torch.inference_mode():
        model(X)
    assert torch.empty(3).shape == (3,)  # an internal error of torch, if keys of a mode were left
    mse_loss(model(X), X).backward()
    del model
    gc.collect()
    assert dispatch_modes_are_active() == 0


@pytest.mark.parametrize("make", [of_layers, of_pipe])
def test_a_model_that_is_gone_in_inference_mode(make):
    model = make()
    mse_loss(model(X), X).backward()  # counted
    with torch.inference_mode():
        del model
        gc.collect()
    assert torch.empty(3).shape == (3,)
    other = make()
    mse_loss(other(X), X).backward()
    del other
    gc.collect()
    assert dispatch_modes_are_active() == 0


def test_a_pipe_that_is_gone_in_a_step_of_another():
    class Frees(nn.Linear):
        def forward(self, x):
            held.clear()
            gc.collect()
            return super().forward(x)

    held = [of_pipe()]
    mse_loss(held[0](X), X).backward()
    pipe = Pipe(nn.Sequential(Frees(8, 8), block()), [2], ["cpu"], 2, budget="1GB")
    pipe.step(X, X, loss_fn=mse_loss)
    assert torch.empty(3).shape == (3,)
    assert dispatch_modes_are_active() == 0


def as_layer_of_a_pipe(model):
    Pipe(nn.Sequential(model, block())).step(X, X, loss_fn=mse_loss)


def as_layer_to_be_measured(model):
    balance_by_bytes(1, nn.Sequential(model, block()), X)


@pytest.mark.parametrize("make", [of_layers, of_pipe])
@pytest.mark.parametrize("use", [as_layer_of_a_pipe, as_layer_to_be_measured])
def test_a_mode_that_is_left_in_what_turns_inference_mode_off(make, use):
    model = make()
    for _ in range(3):
        mse_loss(model(X), X).backward()  # the first and the third are counted
        use(model)
        assert torch.empty(3).shape == (3,)
