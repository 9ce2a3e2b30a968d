"""Autocast: by PyTorch's own lists of operators, as on CUDA."""
from __future__ import annotations

import pytest
import torch
from torch import nn

X = torch.linspace(-1, 1, 16).view(4, 4)

DTYPES = {
    "mm": (lambda x: x @ x, torch.bfloat16),
    "linear": (lambda x: nn.functional.linear(x, x), torch.bfloat16),
    "softmax": (lambda x: (x @ x).softmax(-1), torch.float32),
    "layer_norm": (lambda x: nn.functional.layer_norm(x @ x, (4,)), torch.float32),
    "sum": (lambda x: (x @ x).sum(), torch.float32),
    "exp": (lambda x: (x @ x).exp(), torch.float32),
    "relu": (lambda x: (x @ x).relu(), torch.bfloat16),
    "add": (lambda x: (x @ x) + x, torch.float32),
    "addcmul": (lambda x: torch.addcmul(x, x @ x, x @ x), torch.float32),
    "norm": (lambda x: (x @ x).norm(), torch.float32),
    "double": (lambda x: x.double() @ x.double(), torch.float64),
}


@pytest.mark.parametrize(("call", "dtype"), DTYPES.values(), ids=DTYPES)
def test_dtypes(sim, call, dtype):
    x = X.to("sim:0")
    assert call(x).dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    with torch.autocast("sim", torch.bfloat16):
        assert call(x).dtype == dtype
        with torch.autocast("sim", enabled=False):
            assert call(x).dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_half_precision_is_the_default(sim):
    with torch.autocast("sim"):
        assert (X.to("sim:0") @ X.to("sim:0")).dtype == torch.get_autocast_dtype("sim")


def test_gradients_are_those_of_casts_by_hand(sim):
    weight, x = X.to("sim:1").requires_grad_(), X.to("sim:1")
    with torch.autocast("sim", torch.bfloat16):
        loss = nn.functional.linear(x, weight).float().square().sum()
    loss.backward()
    by_hand = X.clone().requires_grad_()
    nn.functional.linear(X.bfloat16(), by_hand.bfloat16()).float().square().sum().backward()
    assert torch.equal(weight.grad.cpu(), by_hand.grad)
    assert weight.grad.dtype == torch.float32


def test_a_weight_is_cast_once(sim):
    weight, x = X.to("sim:0").requires_grad_(), X.to("sim:0").bfloat16()
    sim.synchronize()
    with sim.record() as ran, torch.autocast("sim", torch.bfloat16):
        nn.functional.linear(x, weight)
        nn.functional.linear(x, weight)
    assert [one.operator for one in ran] == ["aten::copy_", "aten::mm", "aten::mm"]


def test_autocast_of_the_cpu_does_not_touch_the_device(sim):
    with torch.autocast("cpu", torch.bfloat16):
        assert (X.to("sim:0") @ X.to("sim:0")).dtype == torch.float32


def test_a_scaled_loss(sim):
    weight = X.to("sim:0").requires_grad_()
    optimizer = torch.optim.SGD([weight], 0.1)
    scaler = torch.amp.GradScaler("sim", init_scale=8.0)
    with torch.autocast("sim", torch.float16):
        loss = (weight @ weight).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(weight.detach().cpu(), X)
