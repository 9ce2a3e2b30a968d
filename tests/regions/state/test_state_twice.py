"""State that is there twice, comes later, or is of another kind: a replay finds it as its forward did."""
from __future__ import annotations

import gc
import threading
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from tests.helpers import plain
from torchckpt import checkpoint
from torchckpt.errors import RecomputationError
from torchckpt.regions.state import layout, substitutes


def both(run):
    """What ``run`` returns with plain calls, and with regions."""
    found = []
    for call in (plain, checkpoint):
        torch.manual_seed(0)
        found.append(run(call))
    return found


def assert_equal(run):
    expected, actual = both(run)
    assert len(expected) == len(actual)
    for one, other in zip(expected, actual):
        assert torch.equal(one, other)


class Counting(nn.Module):
    def __init__(self, buffer):
        super().__init__()
        self.register_buffer("b", buffer)

    def forward(self, x):
        self.b.add_(1)
        return x


class Adding(nn.Module):
    def __init__(self, buffer):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.register_buffer("b", buffer)

    def forward(self, x):
        return (x * self.w + self.b).pow(2)


def test_buffer_of_two_layers_stays_one():
    def run(call):
        buffer = torch.zeros(2)
        model, x = nn.Sequential(Counting(buffer), Adding(buffer)), torch.randn(3, 2)
        call(model, x).sum().backward()
        return [model[1].w.grad, model[0].b]

    assert_equal(run)


def test_buffer_that_is_a_view_of_another_is_an_error_where_it_is_read():
    buffer = torch.zeros(2)
    model = nn.Sequential(Counting(buffer), Adding(buffer[:]))
    output = checkpoint(model, torch.randn(3, 2))
    with pytest.raises(RecomputationError, match=r"reads Sequential\.1\.b, .* changed in place"):
        output.sum().backward()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.h, self.dice = nn.Linear(2, 2), None, None

    def forward(self, x):
        h = self.linear(x) if self.h is None else self.linear(x) + self.h
        if self.dice is not None:
            h = h * torch.rand(2, generator=self.dice)
        h = h.tanh()
        self.h = h.detach()
        return h


@pytest.mark.parametrize("has_dice", [False, True])
def test_attribute_that_is_none_at_first(has_dice):
    def run(call):
        model = Recurrent()
        for step in range(3):
            if step and has_dice:
                model.dice = torch.Generator().manual_seed(step)
            call(model, torch.randn(3, 2)).sum().backward()
        return [model.linear.weight.grad, model.linear.bias.grad, model.h]

    assert_equal(run)


class Aux(nn.Module):
    def __init__(self, is_there):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        if is_there:
            self.aux = None

    def forward(self, x):
        h = self.linear(x)
        self.aux = h.pow(2).mean()
        return h.sin()


@pytest.mark.parametrize("is_there", [False, True])
def test_loss_on_the_module_is_that_of_the_forward(is_there):
    def run(call):
        model, x = Aux(is_there), torch.randn(3, 2, requires_grad=True)
        output = call(model, x * 1)
        aux = model.aux
        output.sum().backward(retain_graph=True)
        assert model.aux is aux
        aux.backward()
        return [x.grad, model.linear.weight.grad]

    assert_equal(run)


@pytest.mark.parametrize("read", ["T", "mT", "H", "data", "real"])
def test_weight_changed_in_place_and_read_by_a_property_is_an_error(read):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(2, 2))
            self.v = nn.Parameter(torch.randn(2, 2))

        def forward(self, x):
            return (x @ getattr(self.w, read) @ self.v).tanh()

    model = Model()
    output = checkpoint(model, torch.randn(3, 2))
    with torch.no_grad():
        model.w.add_(1)
    with pytest.raises(RecomputationError, match=r"reads Model\.w, "):
        output.sum().backward()


def test_looks_at_a_changed_weight_are_none_of_its_values():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.v = nn.Parameter(torch.randn(2, 2)), nn.Parameter(torch.randn(2, 2))

        def forward(self, x):
            assert (self.w.shape, self.w.grad, self.w.requires_grad) == ((2, 2), None, True)
            return (x @ self.v).tanh()

    model = Model()
    output = checkpoint(model, torch.randn(3, 2))
    with torch.no_grad():
        model.w.add_(1)
    output.sum().backward()


def test_compiled_module_whose_weight_changed_is_an_error():
    compiled = torch.compile(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)), backend="eager")
    output = checkpoint(compiled, torch.randn(3, 2))
    with torch.no_grad():
        compiled.get_parameter("_orig_mod.0.weight").add_(1)
    with pytest.raises(RecomputationError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.filterwarnings(r"ignore:`torch\.jit\.:DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    "make", [torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(3, 2))], ids=["script", "trace"]
)
def test_scripted_modules_are_layers_as_others(make):
    def run(call):
        model = nn.Sequential(make(nn.Sequential(nn.Linear(2, 2), nn.Tanh())), nn.Tanh())
        call(model, torch.randn(3, 2)).sum().backward()
        call(model[0], torch.randn(3, 2)).sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    assert_equal(run)


def test_mode_is_that_of_the_forward():
    def run(call):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4))
        output = call(model, torch.randn(8, 4))
        model.eval()
        output.sum().backward()
        assert not any(module.training for module in model.modules())
        return [*(parameter.grad for parameter in model.parameters()), *model.buffers()]

    assert_equal(run)


class CountingNorm(nn.BatchNorm1d):
    def __init__(self):
        super().__init__(2)
        self.register_buffer("k", torch.zeros(()))

    def forward(self, x):
        self.k += 1
        return super().forward(x) * self.k + self.running_mean


def test_norm_layer_of_ones_own_with_a_buffer_of_its_own():
    def run(call):
        model = nn.Sequential(nn.Linear(2, 2), CountingNorm(), nn.Tanh())
        for _ in range(2):
            call(model, torch.randn(5, 2)).sum().backward()
        return [*(parameter.grad for parameter in model.parameters()), *model.buffers()]

    assert_equal(run)


def applied(x, module=None, modules=()):
    return (module or modules[0])(x).sin()


@pytest.mark.parametrize(
    "region",
    [
        lambda call, m, x: call(applied, x, module=m),
        lambda call, m, x: call(applied, x, modules=[m]),
        lambda call, m, x: call(partial(applied, module=m), x),
    ],
    ids=["keyword", "list", "partial"],
)
def test_modules_among_the_arguments_are_looked_at(region):
    def run(call):
        module = spectral_norm(nn.Linear(8, 8))
        region(call, module, torch.randn(3, 8)).sum().backward()
        return [*(parameter.grad for parameter in module.parameters()), *module.buffers()]

    assert_equal(run)


def layouts_of_tensors():
    dense = torch.tensor([[1.0, 0.0], [2.0, 3.0]])
    return {"coo": lambda x: x.to_sparse(), "csr": lambda x: x.to_sparse_csr()}, dense


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("is_alive", [False, True])
@pytest.mark.parametrize("name", ["coo", "csr"])
def test_sparse_input_with_a_gradient_of_its_own(name, is_alive):
    makes, dense = layouts_of_tensors()

    def run(call):
        x, w = dense.clone().requires_grad_(), torch.randn(2, 2, requires_grad=True)
        sparse = makes[name](x)
        output = call(lambda a, b: torch.sparse.mm(a, b).tanh(), sparse, w).sum()
        if not is_alive:
            del sparse
        output.backward()
        return [x.grad.to_dense(), w.grad]

    assert_equal(run)


def test_attribute_of_an_input_is_that_of_the_forward():
    def run(call):
        x = torch.randn(3, requires_grad=True)
        x.scale = 2.0
        output = call(lambda x: (x * x.scale).tanh(), x)
        x.scale = 5.0
        output.sum().backward()
        assert x.scale == 5.0
        return [x.grad]

    assert_equal(run)


# memory ---------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weights_that_each_forward_makes_do_not_hold_one_another():
    layer, x, seen = nn.utils.weight_norm(nn.Linear(4, 4)), torch.randn(2, 4), []
    for _ in range(5):
        checkpoint(layer, x)
        seen.append(weakref.ref(layer.weight))
    gc.collect()
    assert sum(reference() is not None for reference in seen) == 1


def test_no_copy_of_a_large_buffer_stays_when_a_forward_raises():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("b", torch.zeros(10**4))
            self.w, self.fails = nn.Parameter(torch.ones(10**4)), True

        def forward(self, x):
            if self.fails:
                raise ValueError
            return (x * self.w + self.b).sin()

    model = Model()
    with pytest.raises(ValueError, match=r"^$"):
        checkpoint(model, torch.ones(()))
    model.fails = False
    checkpoint(model, torch.ones(())).sum().backward()
    (found,) = layout.known_of(model).layouts.values()
    assert [copy.values for copy in found.copies.values()] == [None]


def test_layouts_go_with_their_modules():
    gc.collect()
    finalizers = len(weakref.finalize._registry)
    lasting = nn.Linear(2, 2)
    for _ in range(5):
        short = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        checkpoint(lambda x, one, other: one(other(x)), torch.ones(2), lasting, short).sum().backward()
        short[1] = nn.Tanh()
        checkpoint(short, torch.ones(2)).sum().backward()
    del short
    gc.collect()
    assert len(weakref.finalize._registry) == finalizers
    assert not layout.known_of(lasting).layouts


def test_replay_that_waits_for_a_forward_that_waits_for_it_is_an_error(monkeypatch):
    monkeypatch.setattr(substitutes, "_LOCK_TIMEOUT_SECONDS", 0.1)
    inner, raised = spectral_norm(nn.Linear(4, 4)), []

    class Outer(Counting):
        def forward(self, x):
            super().forward(x)
            if threads:
                output = checkpoint(inner, x)
                inner(x)  # so that the replay is to be lent what was

                def backward():
                    try:
                        output.sum().backward()
                    except RecomputationError as error:
                        raised.append(str(error))

                thread = threading.Thread(target=backward)
                thread.start()
                thread.join()
            return x * 2

    outer, x, threads = Outer(torch.zeros(2)), torch.randn(3, 4), False
    checkpoint(outer, x)
    threads = True
    checkpoint(outer, x)
    assert ["it may be waiting for this backward" in text for text in raised] == [True]
