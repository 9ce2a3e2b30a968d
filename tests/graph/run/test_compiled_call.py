"""engine="inductor": a call is compiled. Here operators run in place of kernels, but for tests that need a compiler."""
from __future__ import annotations

import copy
import shutil
import threading
from functools import partial

import pytest
import torch
from torch import nn

from torchckpt import graph
from torchckpt.errors import BudgetInfeasible, CaptureError
from torchckpt.graph.private.dynamo import compile_lock
from torchckpt.graph.run import backend, calls

by_kernels = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor makes C++")


@pytest.fixture(autouse=True)
def dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def by_operators(monkeypatch):
    monkeypatch.setattr(calls, "Backend", partial(backend.Backend, inner="eager"))


class Centred(nn.Module):
    """Its forward replaces one buffer, and reads another one."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("scale", torch.randn(4))

    def forward(self, x):
        y = self.layer(x).tanh()
        self.mean = self.mean * 0.9 + 0.1 * y.detach().mean(0)
        return y * self.scale - self.mean


class Top(nn.Linear):
    def forward(self, x, top=False):
        return super().forward(x).argmax(-1) if top else super().forward(x)


def test_a_buffer_that_the_forward_replaces_is_updated_once_for_each_call(by_operators):
    model = Centred()
    plain, x = copy.deepcopy(model), torch.randn(8, 4)
    call = graph.rematerialize(model, engine="inductor")
    for _ in range(2):
        torch.testing.assert_close(call(x), plain(x))
        torch.testing.assert_close(model.mean, plain.mean)


def test_an_example_changes_no_buffer(by_operators):
    model = nn.Sequential(Centred(), nn.BatchNorm1d(4))
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    graph.rematerialize(model, torch.randn(8, 4), engine="inductor")
    assert [id(buffer) for buffer in model.buffers()] == [id(buffer) for buffer, _ in buffers]
    assert all(torch.equal(buffer, before) for buffer, before in buffers)


@pytest.mark.slow
def test_another_shape_is_compiled_while_a_graph_waits_for_its_backward(by_operators):
    model = Centred()
    call = graph.rematerialize(model, engine="inductor", keep="memory")
    losses = [call(torch.randn(batch, 4)).sum() for batch in (4, 3)]
    sum(losses).backward()
    assert model.layer.weight.grad is not None


@pytest.mark.slow
def test_each_of_many_shapes_is_compiled(by_operators):
    call = graph.rematerialize(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), engine="inductor")
    with torch._dynamo.config.patch(recompile_limit=2, accumulated_recompile_limit=2):
        for batch in range(2, 7):
            call(torch.randn(batch, 8)).sum().backward()
    assert len(call.plans) == 5


@pytest.mark.slow
def test_each_of_many_shapes_is_compiled_again_where_a_setting_has_changed(by_operators):
    call = graph.rematerialize(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), engine="inductor")
    precision = torch.get_float32_matmul_precision()
    try:
        with torch._dynamo.config.patch(recompile_limit=2, accumulated_recompile_limit=2):
            for setting in ("highest", "high"):
                torch.set_float32_matmul_precision(setting)
                for batch in range(2, 7):
                    call(torch.randn(batch, 8)).sum().backward()
    finally:
        torch.set_float32_matmul_precision(precision)


@pytest.mark.slow
@by_kernels
def test_a_share_is_of_the_plan_that_has_room_for_kernels(monkeypatch):
    # Inductor compiles a program for each kind of vectors to see what runs here. No byte depends on it.
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.valid_vec_isa_list", list)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.out = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 8)

        def forward(self, x):
            x = self.norm(self.conv(x)).relu()
            return nn.functional.gelu(self.out(self.norm(x).relu().mean((2, 3)))).square().mean()

    call = graph.rematerialize(Twice(), torch.randn(4, 3, 8, 8), budget="100%", engine="inductor")
    assert call.plan.peak_bytes <= call.plan.budget_bytes


@pytest.mark.slow
@by_kernels
def test_the_least_that_an_error_names_has_room_for_kernels(monkeypatch):
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.valid_vec_isa_list", list)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    call = partial(graph.rematerialize, model, torch.randn(64, 16), engine="inductor")
    with pytest.raises(BudgetInfeasible, match=r"(?s)received: 1, which is 1B;.*works:    budget=") as refused:
        call(budget=1)
    assert call(budget=refused.value.least_bytes).plan.peak_bytes <= refused.value.least_bytes
    with pytest.raises(BudgetInfeasible) as refused:  # of the peak in eager that it names
        call(budget="1%")
    assert "since the first plan" not in str(refused.value)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo looks at it, of each input
def test_each_of_many_layers_of_one_class_is_compiled(by_operators):
    model = nn.Sequential(*(Top(8, 8) for _ in range(5)))
    handles = [graph.rematerialize_(layer, engine="inductor") for layer in model]
    with torch._dynamo.config.patch(recompile_limit=2, accumulated_recompile_limit=2):
        model(torch.randn(4, 8)).sum().backward()
    assert [len(handle.plans) for handle in handles] == [1] * 5


def test_a_call_without_a_derivative_runs_as_it_is(by_operators):
    model, x = Top(8, 8), torch.randn(4, 8)
    call = graph.rematerialize(model, engine="inductor")
    call(x).sum().backward()
    assert torch.equal(call(x, top=True), model(x, top=True))
    assert len(call.plans) == 1


@pytest.mark.slow
@by_kernels
@pytest.mark.parametrize("frozen", [False, True])
def test_a_model_is_evaluated_by_kernels(frozen):
    model, x = Top(8, 8), torch.randn(4, 8)
    compiler = graph.backend(budget="1MB")
    call = torch.compile(model, backend=compiler, fullgraph=True, dynamic=False)
    call(x).sum().backward()
    model.requires_grad_(not frozen)
    with torch.set_grad_enabled(frozen):
        torch.testing.assert_close(call(x), model(x))
        assert torch.equal(call(x, top=True), model(x, top=True))
    assert len(compiler.plans) == 1


@pytest.mark.slow
@by_kernels
def test_a_call_without_a_derivative_needs_no_plan_of_kernels():
    model, x = Top(8, 8), torch.randn(4, 8)
    call = graph.rematerialize(model, engine="inductor")
    assert torch.equal(call(x, top=True), model(x, top=True))
    assert call.plans == ()


@by_kernels
def test_kernels_that_allocate_more_than_any_plan(monkeypatch):
    monkeypatch.setattr(backend, "_ATTEMPTS", 0)
    call, x = graph.rematerialize(nn.Linear(4, 4), engine="inductor"), torch.randn(2, 4)
    with pytest.raises(CaptureError, match=r'(?s)Inductor allocates more than.*rematerialize\(model, engine="eager"\)'):
        call(x)


def test_a_call_that_is_compiled_waits_for_other_traces_before_it_looks_at_the_generator(by_operators, monkeypatch):
    """Else it puts back what it found in the middle of another one, such as the seed of a trace."""
    fork, forks = torch.random.fork_rng, threading.Event()

    def fork_rng():
        forks.set()
        return fork()

    monkeypatch.setattr(torch.random, "fork_rng", fork_rng)
    thread = threading.Thread(
        target=lambda: graph.rematerialize(nn.Linear(3, 3), torch.ones(2, 3), engine="inductor"), daemon=True
    )
    with compile_lock():
        thread.start()
        assert not forks.wait(0.5)
        torch.manual_seed(7)
    thread.join(60)
    assert forks.is_set()
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(7).get_state())
