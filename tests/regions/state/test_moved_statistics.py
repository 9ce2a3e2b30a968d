"""Running statistics that move between a forward in eval mode and its backward: the replay finds those of the forward.

A plain call keeps the statistics themselves for its backward, and gets wrong gradients without a word. So a region is
compared with a plain call of a copy of the module, as it was.
"""
from __future__ import annotations

import copy
from collections import OrderedDict
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from tests.helpers import assert_equal, by_hand, plain, prefetched
from tests.slow import few
from torchckpt import Pipe, RecomputationError, checkpoint
from torchckpt.pipe import DeferredBatchNorm
from torchckpt.regions.state import layout


class Own(nn.Module):
    """A norm layer that is none of torch's classes."""

    def __init__(self, size):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(size))
        self.register_buffer("running_var", torch.ones(size))
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def forward(self, x):
        if self.training:
            self.num_batches_tracked += 1
        return nn.functional.batch_norm(x, self.running_mean, self.running_var, training=self.training)


class OfSubclass(nn.BatchNorm1d):
    pass


def uncounted(layer):
    layer.num_batches_tracked = None
    return layer


LAYERS = {
    "BatchNorm1d": nn.BatchNorm1d,
    "of many channels": lambda _: nn.BatchNorm1d(2048),
    "cumulative average": lambda size: nn.BatchNorm1d(size, momentum=None),
    "without weights": lambda size: nn.BatchNorm1d(size, affine=False),
    "SyncBatchNorm": nn.SyncBatchNorm,
    "InstanceNorm1d": lambda size: nn.Sequential(
        nn.Unflatten(1, (size, 1)), nn.ConstantPad1d((0, 1), 0.5), nn.InstanceNorm1d(size, track_running_stats=True),
        nn.Flatten(), nn.Linear(2 * size, size),
    ),
    "DeferredBatchNorm": lambda size: DeferredBatchNorm.convert(nn.BatchNorm1d(size)),
    "a subclass": OfSubclass,
    "no class of torch's": Own,
    "without a count": lambda size: uncounted(nn.BatchNorm1d(size)),
    "a subclass without a count": lambda size: uncounted(OfSubclass(size)),
}


def model(make=nn.BatchNorm1d, size=4):
    layer = make(size)
    size = getattr(layer, "num_features", size)
    return nn.Sequential(nn.Linear(4, size), layer, nn.Tanh(), nn.Linear(size, 4), nn.Tanh())


def gradients(output, module):
    return torch.autograd.grad(output.square().mean(), list(module.parameters()))


def assert_each_is_of_its_own_statistics(module, modes, call, between=checkpoint):
    """Calls of ``module``, in "eval" by ``call`` and in "train" by ``between``, and then the backwards of all."""
    each = []
    for mode in modes:
        x = torch.randn(6, 4)
        module.train(mode == "train")
        twin = copy.deepcopy(module)
        with DeferredBatchNorm.mini_batch(module) if mode == "train" else nullcontext():
            output = (between if mode == "train" else call)(module, x)
        if output.requires_grad:
            each.append((output, gradients(twin(x), twin)))
    statistics = [buffer.clone() for buffer in module.buffers()]
    for output, expected in each:
        assert all(map(torch.equal, gradients(output, module), expected))
    assert all(map(torch.equal, statistics, module.buffers()))


@few(7)
@pytest.mark.parametrize("modes", [["eval", "train"], ["train", "eval"], ["eval", "train", "eval", "train", "eval"]])
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_layer(make, modes):
    assert_each_is_of_its_own_statistics(model(make), modes, checkpoint)


@few(9)
@pytest.mark.parametrize("way", ["plain", "without gradients"])
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_layer_that_trains_outside_of_regions(make, way):
    def between(module, x):
        with torch.set_grad_enabled(way == "plain"):
            return module(x).detach()

    assert_each_is_of_its_own_statistics(model(make), ["eval", "train", "eval", "train"], checkpoint, between)



WAYS = {
    "by hand": by_hand,
    "by values": lambda module, x: checkpoint(module, x, determinism_check="values"),
    "a region in a region": lambda module, x: checkpoint(lambda module, x: checkpoint(module, x), module, x),
    "compiled": lambda module, x: checkpoint(torch.compile(module, backend="eager"), x),
}


@pytest.mark.parametrize("call", WAYS.values(), ids=WAYS)
def test_each_way_to_a_region(call):
    assert_each_is_of_its_own_statistics(model(), ["eval", "train", "eval", "train"], call)


def test_discriminator_that_scores_in_eval_mode_and_trains_before_both_backwards():
    generator, discriminator = nn.Linear(2, 4), model()
    noise, real = torch.randn(6, 2), torch.randn(6, 4)

    def gradients(scores, trains, call):
        score = call(scores.eval(), generator(noise)).mean()
        loss = call(trains.train(), real).mean()
        return [
            *torch.autograd.grad(score, [*generator.parameters(), *scores.parameters()]),
            *torch.autograd.grad(loss, list(trains.parameters())),
        ]

    expected = gradients(copy.deepcopy(discriminator), copy.deepcopy(discriminator), plain)  # two of them
    assert all(map(torch.equal, gradients(discriminator, discriminator, checkpoint), expected))


@pytest.mark.parametrize("chunks", [1, 3])
def test_pipe(chunks):
    layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4))
    twin, x = copy.deepcopy(layers).eval(), torch.randn(6, 4)
    expected = gradients(twin(x), twin)
    pipe = Pipe(layers, [2, 2], chunks=chunks, checkpoint="always")
    output = pipe.eval()(x)
    pipe.train()(torch.randn(6, 4)).detach()
    for received, wanted in zip(gradients(output, pipe), expected):
        torch.testing.assert_close(received, wanted)  # sums over micro-batches have other last bits


def test_statistics_are_copied_once_for_each_time_that_they_move():
    module, x = model(), torch.randn(6, 4)
    copies = layout.layout_of(module)[0].copies
    seen = []
    for mode in ["eval", "eval", "train", "train", "eval", "eval"]:
        checkpoint(module.train(mode == "train"), x)
        seen.append(list(copies.values()))
    assert list(map(len, seen)) == [3] * 6
    assert seen[0] == seen[1] == seen[2] == seen[3]  # the same objects
    assert seen[4] == seen[5]
    assert not any(copy in seen[0] for copy in seen[4])


@pytest.mark.parametrize("is_inner", [False, True])
@pytest.mark.parametrize("make", [nn.BatchNorm1d, LAYERS["InstanceNorm1d"]])
def test_statistics_of_a_module_that_a_function_closes_over(make, is_inner):
    module, x = model(make).eval(), torch.randn(6, 4)

    class Around(nn.Module):
        def forward(self, module, x):
            return checkpoint(lambda x: module(x), x).sin()

    def call():
        return checkpoint(Around(), module, x) if is_inner else checkpoint(lambda x: module(x), x)

    unmoved, output = call(), call()
    expected = gradients(unmoved, module)
    with torch.no_grad():
        module.train()(x)
        module.eval()
    assert all(map(torch.equal, gradients(output, module), expected))


@pytest.mark.parametrize("make", [nn.BatchNorm1d, LAYERS["InstanceNorm1d"]])
def test_statistics_of_a_layer_in_a_list_of_a_module(make):
    """Nothing finds what they were, so it is an error."""

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = [model(make).eval()]

        def forward(self, x):
            return self.parts[0](x)

    around, x = Around(), torch.randn(6, 4)
    unmoved, output = (checkpoint(around, x) for _ in range(2))
    gradients(unmoved, around.parts[0])
    with torch.no_grad():
        around.parts[0].train()(x)
        around.parts[0].eval()
    with pytest.raises(RecomputationError, match=r"reads \w+1d.running_mean, .* changed in place after the forward"):
        gradients(output, around.parts[0])


def test_function_that_sets_the_mode_itself_and_trains_reads_no_statistics():
    module, x = model(), torch.randn(6, 4)

    def trained(x):
        output = module.train()(x)
        module.eval()
        return output

    outputs = [checkpoint(trained, x) for _ in range(2)]
    expected = gradients(module.train()(x), module)
    assert all(torch.equal(one, other) for output in outputs for one, other in zip(gradients(output, module), expected))


def test_forward_that_reads_statistics_and_then_moves_them():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model()

        def forward(self, x):
            return self.model.eval()(x) * self.model.train()(x)

    module, x = Both(), torch.randn(6, 4)
    twin = copy.deepcopy(module)
    eval_model, train_model = copy.deepcopy(module.model), module.model
    expected = [
        torch.autograd.grad((eval_model.eval()(x) * train_model.train()(x)).square().mean(), list(m.parameters()))
        for m in (eval_model, train_model)
    ]
    received = gradients(checkpoint(twin.eval(), x), twin)
    for one, *others in zip(received, *expected):
        torch.testing.assert_close(one, sum(others))


class Distilled(nn.Module):
    """Compares a call in evaluation, without a graph, with one in training."""

    def __init__(self, is_first: bool) -> None:
        super().__init__()
        self.net, self.is_first = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)), is_first

    def target(self, x):
        self.net.eval()
        with torch.no_grad():
            target = self.net(x)
        self.net.train()
        return target

    def forward(self, x):
        target = self.target(x) if self.is_first else None
        return (self.net(x) - (self.target(x) if target is None else target)).pow(2)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("call", [checkpoint, by_hand, prefetched], ids=lambda call: call.__name__)
def test_a_forward_that_evaluates_its_norm_layers_and_trains_them(call, is_first):
    """The replay evaluated them with statistics that had moved: other gradients in silence."""
    found = []
    for way in (plain, call):
        torch.manual_seed(1)
        module, inputs = Distilled(is_first), [torch.randn(5, 4, requires_grad=True) for _ in range(4)]
        outputs = [way(module, x) for x in inputs]
        for output in reversed(outputs):
            output.sum().backward()
        found.append([*outputs, *(x.grad for x in inputs), *module.buffers(), *(p.grad for p in module.parameters())])
    assert_equal(found[1], found[0])


def test_layer_that_one_forward_calls_in_training_and_then_in_evaluation():
    class Settling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x):
            y = self.norm.train()(x)
            return self.norm.eval()(y.sin())

    module, x = Settling(), torch.randn(6, 4)
    twin = copy.deepcopy(module)
    expected, received = gradients(module(x), module), gradients(checkpoint(twin, x), twin)
    assert all(torch.equal(one, other) for one, other in zip(received, expected))
    assert all(torch.equal(one, other) for one, other in zip(twin.buffers(), module.buffers()))


class Both(nn.Sequential):
    def forward(self, x):
        return self.train().net(x) * self.eval().net(x)


@pytest.mark.parametrize("call", [checkpoint, by_hand, prefetched], ids=lambda call: call.__name__)
def test_a_forward_that_trains_its_norm_layers_and_evaluates_them_with_a_graph(call):
    """The statistics of the replay had other versions: an error. Torch saves those that the next forward moves: so the
    backward comes before."""
    found = []
    for way in (plain, call):
        torch.manual_seed(1)
        module = Both(OrderedDict(net=nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3))))
        inputs = [torch.randn(5, 4, requires_grad=True) for _ in range(3)]
        for x in inputs:
            way(module, x).sum().backward()
        found.append([*(x.grad for x in inputs), *module.buffers(), *(p.grad for p in module.parameters())])
    assert_equal(found[1], found[0])
