"""Autograd: a thread for each device, and each backward on the stream of its forward, as for CUDA."""
from __future__ import annotations

import threading

import pytest
import torch

from tests.helpers import Probe


def where(seen):
    """Writes down the thread, the device and the stream."""

    def look():
        stream = torch.accelerator.current_stream()
        seen.append((threading.get_ident(), torch.accelerator.current_device_index(), stream.stream_id))

    return look


def leaf(device, value=1.0):
    x = torch.full((3,), value, device=device, requires_grad=True)
    torch.accelerator.synchronize()
    return x


def test_each_device_has_a_thread_of_its_own(sim):
    seen = []
    x = leaf("sim:0")
    y = Probe.apply(x, where(seen))
    z = Probe.apply(y.to("sim:1"), where(seen))
    Probe.apply(z.to("sim:2"), where(seen)).sum().backward()
    threads, devices, streams = zip(*seen)
    assert devices == (2, 1, 0)
    assert len({*threads, threading.get_ident()}) == 4
    assert streams == (0, 0, 0)
    assert x.grad.tolist() == [1, 1, 1]


def test_a_backward_runs_on_the_stream_of_its_forward(sim):
    seen, side = [], torch.Stream("sim:1")
    x = leaf("sim:1")
    with side:
        y = Probe.apply(x, where(seen))
    torch.accelerator.current_stream(1).wait_stream(side)
    y.sum().backward()
    assert [(device, stream) for _, device, stream in seen] == [(1, side.stream_id)]
    torch.accelerator.synchronize(1)
    assert x.grad.tolist() == [1, 1, 1]


def forked(x, side):
    """A sum of what two streams made of ``x``."""
    here = torch.accelerator.current_stream(x.device)
    side.wait_stream(here)
    with side:
        y = x.exp()
        y.record_stream(here)
    z = x.sin()
    here.wait_stream(side)
    return y + z


def test_the_engine_lets_gradients_wait_for_the_streams_that_made_them(sim):
    # Gradients of two streams meet in one sum, for which nobody but the engine waits.
    expected = leaf("cpu", 0.5)
    (expected.exp() + expected.sin()).sum().backward()
    side = torch.Stream("sim:0")
    for seed in range(10):
        x = leaf("sim:0", 0.5)
        with sim.delays(seed, most_seconds=0.002, share=0.8):
            forked(x.clone(), side).sum().backward()
            assert torch.equal(x.grad.cpu(), expected.grad)


def test_the_caller_of_backward_sees_the_gradient_without_a_wait_of_its_own(sim):
    side, x = torch.Stream("sim:0"), leaf("sim:0")
    with side:
        side.wait_stream(torch.sim.default_stream(0))
        y = x * 2
    with sim.durations(seconds={"aten::mul": 0.02}):
        with side:
            loss = (y * 3).sum()
        torch.accelerator.current_stream(0).wait_stream(side)
        loss.backward()
        assert x.grad.tolist() == [6, 6, 6]


def test_backward_returns_while_the_streams_still_work(sim):
    x = leaf("sim:0")
    with sim.held():
        (x * 2).sum().backward()
        assert not torch.accelerator.current_stream().query()
    assert x.grad.tolist() == [2, 2, 2]


def test_a_gradient_of_the_cpu_waits_for_the_device(sim):
    x = torch.ones(3, requires_grad=True)
    y = x.to("sim:1") * 2
    with sim.durations(seconds={"aten::mul": 0.02}):
        (y * 3).sum().backward()
        assert x.grad.tolist() == [6, 6, 6]


def test_double_backward(sim):
    def second(device):
        x = leaf(device, 0.5)
        (first,) = torch.autograd.grad(x.sin().exp().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0].cpu()

    assert torch.equal(second("sim:3"), second("cpu"))


def test_gradcheck(sim):
    x = torch.randn(3, 4, dtype=torch.double, device="sim:0", requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: torch.nn.functional.layer_norm(x, (4,)).softmax(-1), x)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_torchs_checkpoint_has_the_same_random_numbers_in_its_replay(sim, use_reentrant):
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 8)).to("sim:1")

    def gradients(call):
        torch.manual_seed(1)
        x = torch.ones(4, 8, device="sim:1", requires_grad=True)
        layer.zero_grad()
        call(x).sum().backward()
        return [x.grad.cpu(), *(parameter.grad.cpu() for parameter in layer.parameters())]

    plain = gradients(layer)
    again = gradients(lambda x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=use_reentrant))
    assert all(torch.equal(*pair) for pair in zip(plain, again))
