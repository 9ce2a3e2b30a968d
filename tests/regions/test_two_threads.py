"""Two threads use one model at once, and neither sees the other."""
from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from tests.helpers import in_threads
from tests.settings import default_dtype
from tests.slow import few
from torchckpt import RecomputationError, checkpoint, checkpoint_module, is_checkpointing, is_recomputing
from torchckpt.regions.state import substitutes


@pytest.fixture(autouse=True)
def one_core_each():
    """Two threads that each spread an operator over all cores wait for each other most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def transformer_like():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8), nn.Tanh())


def step(model, seed, device):
    """Output and gradients of one step on the input of that seed."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).to(device).requires_grad_()
    output = model(x)
    return [output.detach(), *torch.autograd.grad(output.sin().sum(), [x, *model.parameters()])]


def steps(model, seeds, device):
    return [step(model, seed, device) for seed in seeds]


@few(1)
@pytest.mark.parametrize("options", [{}, {"determinism_check": "values"}, {"early_stop": False}], ids=str)
def test_outputs_and_gradients_are_those_of_one_thread(options, device):
    model = nn.Sequential(transformer_like(), transformer_like(), transformer_like()).to(device)
    halves = (range(12), range(12, 24))
    expected = [steps(model, seeds, device) for seeds in halves]
    for block in model:
        checkpoint_module(block, **options)
    received = in_threads(*(lambda seeds=seeds: steps(model, seeds, device) for seeds in halves))
    for expected_steps, received_steps in zip(expected, received):
        for one, other in zip(expected_steps, received_steps):
            assert all(map(torch.equal, one, other))


@few(1)
def test_nested_regions_in_two_threads_are_those_of_one(device):
    model = nn.Sequential(transformer_like(), transformer_like()).to(device)
    expected = [steps(model, seeds, device) for seeds in (range(20), range(20, 40))]
    for module in (model[0][0], model[1][0], model[0], model[1], model):
        checkpoint_module(module)
    received = in_threads(lambda: steps(model, range(20), device), lambda: steps(model, range(20, 40), device))
    for expected_steps, received_steps in zip(expected, received):
        for one, other in zip(expected_steps, received_steps):
            assert all(map(torch.equal, one, other))


def test_random_numbers_of_a_named_generator_per_thread_are_those_of_one(device):
    def noisy(x, generator):
        return (x.sin() * torch.rand(x.shape, generator=generator, device=x.device)).exp().sin()

    def work(seed, call):
        generator, x = torch.Generator(device).manual_seed(seed), torch.ones(8, device=device, requires_grad=True)
        return [torch.autograd.grad(call(noisy, x, generator).sum(), x)[0] for _ in range(50)]

    def region(function, x, generator):
        return checkpoint(function, x, generator, generators=(generator,))

    expected = [work(seed, lambda function, *args: function(*args)) for seed in (1, 2)]
    received = in_threads(lambda: work(1, region), lambda: work(2, region))
    assert all(torch.equal(a, b) for one, other in zip(expected, received) for a, b in zip(one, other))


def test_two_threads_go_backward_through_one_graph(device):
    x = torch.randn(8, device=device, requires_grad=True)
    loss = checkpoint(lambda x: x.sin().exp().tanh(), x).sum()
    (expected,) = torch.autograd.grad(x.sin().exp().tanh().sum(), x)

    def backward():
        return torch.autograd.grad(loss, x, retain_graph=True)[0]

    for gradient in in_threads(backward, backward):
        assert torch.equal(gradient, expected)


class Meeting:
    """Holds a replay in one thread until the other has done its part."""

    def __init__(self):
        self.replaying, self.met = threading.Event(), threading.Event()

    def hold(self):
        if is_recomputing():
            self.replaying.set()
            assert self.met.wait(30)

    def loss(self, x):
        """Of a region that holds in the middle of its replay."""

        def function(x):
            y = x.sin()
            self.hold()
            return y.exp()

        return checkpoint(function, x).sum()

    def run(self, holding, meeting):
        """``holding()`` in a thread of its own, and ``meeting()`` in the middle of its replay."""

        def meet():
            assert self.replaying.wait(30)
            try:
                return meeting()
            finally:
                self.met.set()

        return in_threads(holding, meet)[1]


def test_flags_of_a_replay_are_not_seen_in_another_thread():
    meeting, x = Meeting(), torch.randn(4, requires_grad=True)

    loss = meeting.loss(x)
    assert meeting.run(loss.backward, lambda: (is_checkpointing(), is_recomputing())) == (False, False)


def test_saved_tensors_of_another_thread_are_not_taken_for_the_replays():
    meeting, x = Meeting(), torch.randn(4, requires_grad=True)

    loss = meeting.loss(x)
    others = meeting.run(loss.backward, lambda: torch.autograd.grad(x.cos().exp().sum(), x)[0])
    assert torch.equal(others, torch.autograd.grad(x.cos().exp().sum(), x)[0])
    assert torch.equal(x.grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])


def test_forward_of_a_norm_layer_counts_while_another_thread_replays_it():
    norm, meeting, x = nn.BatchNorm1d(4), Meeting(), torch.randn(3, 4, requires_grad=True)

    def function(x):
        y = norm(x.sin())
        meeting.hold()
        return y.exp()

    loss = checkpoint(function, x).sum()
    meeting.run(loss.backward, lambda: norm(x))
    assert norm.num_batches_tracked == 2


def test_norm_layer_replayed_by_two_threads_keeps_its_statistics():
    norm, meeting, x = nn.BatchNorm1d(4), Meeting(), torch.randn(3, 4, requires_grad=True)

    def function(x):
        y = norm(x.sin())
        meeting.hold()
        return y.exp()

    losses = [checkpoint(function, x).sum(), checkpoint(lambda x: norm(x).sin().exp(), x).sum()]
    buffers = {name: (id(buffer), buffer.tolist()) for name, buffer in norm.named_buffers()}
    meeting.run(losses[0].backward, losses[1].backward)
    assert {name: (id(buffer), buffer.tolist()) for name, buffer in norm.named_buffers()} == buffers


# settings of the process ----------------------------------------------------------------------------------------------


class Replay:
    """That of a region whose forward had a default dtype of its own, which its function reads behind a ``hold``."""

    def __init__(self, dtype, hold=lambda: None):
        self.has_begun, self.hold, self.read = threading.Event(), hold, []
        x = torch.ones(4, dtype=torch.float64, requires_grad=True)
        with default_dtype(dtype):
            self._loss = checkpoint(self._function, x).sum()

    def _function(self, x):
        y = x.sin()
        if is_recomputing():
            self.has_begun.set()
            self.hold()
        self.read.append(torch.get_default_dtype())
        return (y * torch.ones(4)).exp()

    def run(self):
        self._loss.backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_replay_that_begins_while_another_has_changed_the_default_dtype_waits(dtype):
    second = Replay(dtype)
    first = Replay(torch.float64, lambda: second.has_begun.wait(0.3))

    def run_second():
        first.has_begun.wait(30)
        second.run()
        assert first.read[1:]  # it had ended

    in_threads(first.run, run_second)
    assert [first.read, second.read] == [[torch.float64] * 2, [dtype] * 2]
    assert torch.get_default_dtype() == torch.float32


def test_a_replay_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(substitutes, "_LOCK_TIMEOUT_SECONDS", 0.1)
    has_failed, second = threading.Event(), Replay(torch.float32)
    first = Replay(torch.float64, lambda: has_failed.wait(30))

    def run_second():
        first.has_begun.wait(30)
        with pytest.raises(RecomputationError, match="a default dtype or stance of torch"):
            second.run()
        has_failed.set()

    in_threads(first.run, run_second)
    assert first.read == [torch.float64] * 2
    second.run()  # now nobody needs another
    assert second.read == [torch.float32] * 2


def test_a_model_beside_keeps_the_weights_that_another_thread_updates_meanwhile():
    """They were lent to the replay as they had been after the forward, and the other thread found these."""
    models, found = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}, []
    weight = models["b"].weight

    def update():
        with torch.no_grad():
            weight.mul_(2)

    def function(x):
        found.append(models["b"]._parameters["weight"])
        if not is_recomputing():
            in_threads(update)
        return models["a"](x).sin()

    for _ in range(2):
        checkpoint(function, torch.rand(2, 4, requires_grad=True)).sum().backward()
    assert [each is weight for each in found] == [True] * 4


def test_a_forward_does_not_wait_for_ever(monkeypatch):
    """The outer region waits for threads that need its lock."""
    monkeypatch.setattr(substitutes, "_LOCK_TIMEOUT_SECONDS", 0.1)
    model, x = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), torch.rand(2, 4, requires_grad=True)

    def in_a_thread(x):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(checkpoint, model, x).result()

    checkpoint(model, x).sum().backward()  # now its buffers are known to change
    with pytest.raises(RecomputationError, match=r"the forward of region 'Parametri.* waiting for this forward"):
        checkpoint(in_a_thread, x)


def test_a_backward_in_a_replay_has_the_default_dtype_of_its_own_forward():
    inner = Replay(torch.float32)
    outer = Replay(torch.float64, inner.run)
    outer.run()
    assert [outer.read, inner.read] == [[torch.float64] * 2, [torch.float32] * 2]
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.accelerator
def test_devices_replay_under_the_default_dtype_of_their_forwards(two_accelerators):
    """Each device has a thread for its backward."""

    def function(x):
        for _ in range(3):
            x = (x * torch.ones(4, device=x.device)).sin().exp()
        return x

    for _ in range(10):
        leaves = [torch.ones(4, device=device, dtype=torch.float64) for device in two_accelerators]
        outputs = [leaf.requires_grad_() for leaf in leaves]
        with default_dtype(torch.float64):
            for _ in range(6):
                outputs = [checkpoint(function, output) for output in outputs]
        torch.autograd.backward([output.sum() for output in outputs])
        assert torch.get_default_dtype() == torch.float32
