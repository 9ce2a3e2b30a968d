"""Models: forwards, gradients and steps of an optimizer have the CPU's bits, and no operator is waited for."""
from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.helpers import in_threads
from tests.slow import few


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A block of a GPT."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.first, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.second = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attention(self.first(x))
        return x + self.narrow(nn.functional.gelu(self.wide(self.second(x))))


class Residual(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return x + self.body(x)


def mlp():
    body = [nn.Linear(8, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.RMSNorm(64)]
    return nn.Sequential(*body, nn.Linear(64, 3))


def convolutions():
    block = Residual(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1)))
    head = nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    return nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), block, nn.MaxPool2d(2), *head)


def gpt():
    return nn.Sequential(nn.Embedding(11, 32), Block(), Block(), nn.LayerNorm(32), nn.Linear(32, 11), nn.Flatten(0, 1))


MODELS = {
    "mlp": (mlp, lambda: torch.randn(16, 8), 3),
    "convolutions": (convolutions, lambda: torch.randn(4, 3, 17, 17), 3),
    "gpt": (gpt, lambda: torch.randint(11, (2, 7)), 11),
}


@pytest.fixture(params=MODELS)
def model(request):
    make, sample, classes = MODELS[request.param]
    torch.manual_seed(0)
    module, x = make(), sample()
    rows = module(x).shape[0]
    return module, x, torch.randint(classes, (rows,))


def trained(module, x, target, device, optimizer, steps=3):
    module, x, target = copy.deepcopy(module).to(device), x.to(device), target.to(device)
    step = optimizer(module.parameters())
    losses = []
    for _ in range(steps):
        step.zero_grad()
        loss = nn.functional.cross_entropy(module(x), target)
        loss.backward()
        step.step()
        losses.append(loss.detach())
    return [tensor.cpu() for tensor in (*losses, *(p.grad for p in module.parameters()), *module.state_dict().values())]


OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 0.01, foreach=False),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_training_has_the_cpus_bits(sim, model, optimizer):
    expected = trained(*model, "cpu", optimizer)
    sim.reset_counts()
    received = trained(*model, "sim:1", optimizer)
    assert all(torch.equal(*pair) for pair in zip(received, expected))
    assert sim.counts().synchronous == {}


@few(3)
@pytest.mark.parametrize("seed", range(3))
def test_training_is_the_same_whatever_the_delays(sim, model, seed):
    expected = trained(*model, "cpu", OPTIMIZERS["SGD"])
    with sim.delays(seed, most_seconds=0.001, share=0.3):
        received = trained(*model, "sim:2", OPTIMIZERS["SGD"])
    assert all(torch.equal(*pair) for pair in zip(received, expected))


def test_training_in_two_threads(sim, model):
    expected = trained(*model, "cpu", OPTIMIZERS["SGD"])
    calls = [lambda device=device: trained(*model, device, OPTIMIZERS["SGD"]) for device in ("sim:0", "sim:3")]
    for received in in_threads(*calls):
        assert all(torch.equal(*pair) for pair in zip(received, expected))


def test_a_model_comes_back_to_the_cpu(sim, model):
    module = model[0]
    there = copy.deepcopy(module).to("sim:0")
    back = copy.deepcopy(there).to("sim:1").cpu()
    assert all(torch.equal(*pair) for pair in zip(back.state_dict().values(), module.state_dict().values()))


def test_a_state_is_saved_and_loaded(sim, tmp_path):
    x = torch.randn(3, device="sim:1")
    torch.save({"x": x}, tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt")["x"]
    assert loaded.device == x.device
    assert torch.equal(loaded.cpu(), x.cpu())
    assert torch.equal(torch.load(tmp_path / "x.pt", map_location="cpu")["x"], x.cpu())
