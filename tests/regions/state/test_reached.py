"""What is looked through to find modules, and what is remembered of them."""
from __future__ import annotations

import copy
import gc
import pickle
import weakref
from functools import partial
from time import process_time

import pytest
import torch
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks

from tests.helpers import leaf, plain
from tests.settings import without_collector
from torchckpt import checkpoint
from torchckpt.regions.flags import local
from torchckpt.regions.state import reached
from torchckpt.regions.state.layout import known_of
from torchckpt.testing import count_recomputes


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.linear(x)).sin()


class Hooked(Block):
    def __init__(self):
        super().__init__()
        self.linear.register_forward_hook(self.look)

    def look(self, *_):
        pass


def itself(module):
    return module


def closing_over(module):
    return lambda x: module(x)


@pytest.mark.parametrize("function_of", [itself, closing_over])
def test_a_module_that_is_held_from_inside_is_freed(function_of):
    module = Hooked()
    gone = weakref.ref(module)
    checkpoint(function_of(module), leaf(5, 4)).sum().backward()
    del module
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("function_of", [itself, closing_over])
def test_weights_go_at_once_with_their_module(function_of):
    module = Block()
    weight = weakref.ref(module.linear.weight)
    checkpoint(function_of(module), leaf(5, 4)).sum().backward()
    with without_collector():
        del module
        assert weight() is None


@pytest.mark.parametrize("is_first", [False, True])
def test_modules_that_are_made_in_each_step_are_freed(is_first):
    model = Block()
    checkpoint(closing_over(model), leaf(5, 4)).sum().backward()
    made = []
    for _ in range(3):
        fast = Hooked()
        made.append(weakref.ref(fast))
        one, two = (fast, model) if is_first else (model, fast)
        checkpoint(lambda x, one=one, two=two: two(one(x)), leaf(5, 4)).sum().backward()
        del fast, one, two
    gc.collect()
    assert not any(gone() for gone in made)


class Calls(nn.Module):
    def forward(self, x, held):
        return held[0](x.exp()).sin()


@pytest.mark.parametrize("function", [lambda x, held: held[0](x.exp()).sin(), Calls()])
def test_what_a_partial_holds_in_a_list_is_reached(function):
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    given, x = partial(function, held=[layer]), leaf(5, 4)
    assert reached.reached_by(given) == ([layer], [])
    assert reached.reached_by(partial(function, held=layer)) == ([], [])  # as an argument it is the region's own
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    (received,) = torch.autograd.grad(checkpoint(given, x).sum(), x)
    layer.load_state_dict(before, strict=False)
    assert torch.equal(received, torch.autograd.grad(given(x).sum(), x)[0])


def test_a_module_and_what_is_inside_of_it_are_one():
    model = nn.Sequential(Block(), Block())
    assert reached.reached_by(lambda x, block=model[0]: model[1](block(x))) == ([model], [])


def test_copies_start_with_nothing_known():
    module = Block()
    checkpoint(module, leaf(5, 4)).sum().backward()
    assert known_of(module).layouts
    shallow = copy.copy(module)
    shallow._modules = {"norm": nn.BatchNorm1d(4), "linear": module.linear}
    for other in copy.deepcopy(module), pickle.loads(pickle.dumps(module)), shallow:
        before = other.norm.num_batches_tracked.item()
        for function in other, closing_over(other):
            checkpoint(function, leaf(5, 4)).sum().backward()
        assert other.norm.num_batches_tracked == before + 2
    assert module.norm.num_batches_tracked == 1
    assert b"torchckpt" not in pickle.dumps(nn.Linear(2, 2))
    assert b"torchckpt.regions" not in pickle.dumps(module)  # can be read where torchckpt is not


class Unbound:
    """A proxy of something that is not there yet."""

    @property
    def __class__(self):
        raise LookupError


class Box:
    def __init__(self, held):
        self.held = held


def test_proxies_are_not_asked_what_they_are():
    proxy, block = Unbound(), Block()
    checkpoint(lambda x, box: (proxy, block(x))[1], leaf(5, 4), Box(proxy)).sum().backward()
    assert block.norm.num_batches_tracked == 1


def test_deep_data_is_no_recursion():
    deep = ()
    for _ in range(10**4):
        deep = (deep, deep)
    block = Block()
    checkpoint(lambda x: (deep, block(x))[1], leaf(5, 4)).sum().backward()
    assert block.norm.num_batches_tracked == 1


class Trainer:
    def __init__(self):
        self.data = [[object() for _ in range(900)] for _ in range(900)]
        self.block = Block()

    def step(self, x):
        return self.block(x)


def test_the_data_beside_a_model_is_not_walked_through():
    trainer = Trainer()
    assert reached.reached_by(trainer.step) == ([trainer.block], [])
    start = process_time()
    for _ in range(10):
        reached.reached_by(trainer.step)
    assert process_time() - start < 0.2  # all of the data: seconds


def test_hooks_that_are_disabled_leave_nothing_behind():
    with disable_saved_tensors_hooks("none here"), pytest.raises(RuntimeError, match="none here"):
        checkpoint(torch.sin, leaf(4))
    assert local.thread.norms is None


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_lazy_layer_that_the_function_closes_over(call):
    """Its first call draws the weights, which a replay would not: the masks behind them would be others."""

    def steps(call):
        torch.manual_seed(1)
        model = nn.Sequential(nn.LazyLinear(4), nn.Dropout(0.5), nn.LazyBatchNorm1d(), nn.LazyLinear(4))
        xs = [leaf(5, 4) for _ in range(3)]
        for x in xs:
            call(lambda x: model(x).sin(), x).sum().backward()
        return [*(x.grad for x in xs), *(p.grad for p in model.parameters()), *model.buffers(), torch.rand(2)]

    expected = steps(plain)
    with count_recomputes() as recomputes:
        assert all(map(torch.equal, steps(call), expected))
    assert recomputes.total == 2  # not in the first


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_lazy_layer_that_is_given_weights_is_lazy_no_more():
    model = nn.Sequential(nn.LazyLinear(4, bias=False), nn.Tanh())
    checkpoint(lambda x: model[1](x), leaf(5, 4)).sum().backward()  # looks at the model
    model[0].weight = nn.Parameter(torch.rand(4, 4))
    with count_recomputes() as recomputes:
        checkpoint(lambda x: model(x).sin(), leaf(5, 4)).sum().backward()
        checkpoint(lambda x: model(x).sin(), leaf(5, 4)).sum().backward()
    assert recomputes.total == 2
