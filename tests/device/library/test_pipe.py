"""``torchckpt.Pipe`` on simulated devices: the same bits with and without recomputation, and whatever the delays."""
from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

import torchckpt
from tests.slow import few

MODES = ["always", "except_last", "never"]


def block(width=16):
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.3), nn.LayerNorm(width))


def two_stages():
    torch.manual_seed(0)
    return nn.Sequential(block(), block())


def gradients(module, checkpoint, devices=("sim:0", "sim:1"), balance=(1, 1), chunks=4, lookahead=1, step=False):
    """Those of a mini-batch of eight rows, and the loss."""
    module = copy.deepcopy(module)
    pipe = torchckpt.Pipe(module, list(balance), list(devices), chunks, checkpoint, lookahead)
    torch.manual_seed(1)
    x, target = torch.randn(8, 16), torch.randn(8, 16)
    if step:
        loss = pipe.step(x, target, loss_fn=nn.functional.mse_loss)
    else:
        output = pipe(x)
        loss = nn.functional.mse_loss(output, target.to(output.device))
        loss.backward()
    return [loss.detach().cpu(), *(parameter.grad.cpu() for parameter in pipe.parameters())]


def assert_equal(received, expected):
    assert all(torch.equal(*pair) for pair in zip(received, expected, strict=True))


@few(1)
@pytest.mark.parametrize("step", [False, True], ids=["backward", "step"])
@pytest.mark.parametrize("checkpoint", MODES)
def test_two_stages_on_two_devices(sim, checkpoint, step):
    expected = gradients(two_stages(), "never", step=step)
    sim.reset_counts()
    received = gradients(two_stages(), checkpoint, step=step)
    assert sim.counts().queued > 100
    assert sim.counts().synchronous == {}
    assert_equal(received, expected)
    for seed in range(3):
        with sim.delays(seed):
            assert_equal(gradients(two_stages(), checkpoint, step=step), expected)


def test_two_stages_have_the_bits_of_the_plain_sequential_on_one_device(sim):
    module = copy.deepcopy(two_stages()).to("sim:2").eval()  # no dropout: the devices would draw other numbers
    torch.manual_seed(1)
    x, target = torch.randn(8, 16).to("sim:2"), torch.randn(8, 16).to("sim:2")
    output = torch.cat([module(part) for part in x.chunk(4)])
    loss = nn.functional.mse_loss(output, target)
    loss.backward()
    received = gradients(two_stages().eval(), "always")
    assert torch.equal(received[0], loss.detach().cpu())
    for ours, parameter in zip(received[1:], module.parameters()):
        torch.testing.assert_close(ours, parameter.grad.cpu())  # four micro-batches are added up in another order


class DropPath(nn.Module):
    """Drops whole rows, by numbers of the CPU's generator."""

    def __init__(self, width=16):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(width, width), nn.GELU())

    def forward(self, x):
        kept = torch.rand(x.shape[0], 1) > 0.4
        return self.block(x) * kept.to(x.device)


@few(1)
@pytest.mark.parametrize(
    ("module", "devices"),
    [
        (two_stages, ("cpu", "sim:0")),
        (two_stages, ("sim:0", "cpu")),
        (lambda: nn.Sequential(DropPath(), block()), ("sim:0", "sim:1")),
    ],
    ids=["cpu-first", "cpu-last", "rows-dropped"],
)
def test_a_stage_that_draws_from_the_generator_of_the_cpu_draws_the_same_in_its_replay(sim, module, devices):
    torch.manual_seed(0)
    module = module()
    expected = gradients(module, "never", devices)
    for _ in range(8):
        assert_equal(gradients(module, "always", devices), expected)


def test_replays_of_two_devices_that_draw_from_the_generator_of_the_cpu_take_turns(sim):
    inside, drawn = threading.Event(), threading.Event()

    def first(x):
        if torchckpt.is_recomputing():
            thread.start()
            inside.wait(0.5)  # without a turn the second replay begins here, and puts its own state into the generator
        mask = torch.rand(4)
        drawn.set()
        return (x * mask.to(x.device)).exp()

    def second(x):
        if torchckpt.is_recomputing():
            inside.set()
            drawn.wait(10)
        return (x * torch.rand(4).to(x.device)).exp()

    inputs = [torch.ones(4, device=device, requires_grad=True) for device in ("sim:0", "sim:1")]
    regions = [torchckpt.Checkpointing(body, x * 2) for body, x in zip((first, second), inputs)]
    thread = threading.Thread(target=regions[1].prefetch)
    outputs = [region.checkpoint() for region in regions]
    regions[0].prefetch()
    thread.join()
    for x, output in zip(inputs, outputs):
        output.sum().backward()
        mask = output.detach().log() / 2
        torch.testing.assert_close(x.grad, 2 * mask * output.detach())  # log() and exp() round
