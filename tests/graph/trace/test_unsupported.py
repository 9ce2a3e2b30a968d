"""Modules that something has wrapped or compiled: an error that says what works."""
from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from tests.distributed.ranks import one_rank
from tests.graph.eager import compare
from tests.settings import with_gloo
from tests.slow import few
from torchckpt import graph
from torchckpt.errors import ArgumentError, CaptureError, CheckpointError

fsdp_of_one = pytest.mark.filterwarnings("ignore:FSDP is switching to use")


def plain():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))


def in_place(wrap):
    def wrapped(model):
        wrap(model)
        return model

    return wrapped


WRAPPED = {
    "scripted": (torch.jit.script, "the module is scripted", "the original module"),
    "traced": (lambda model: torch.jit.trace(model, torch.ones(2, 6)), "the module is scripted", "original module"),
    "compiled": (torch.compile, "the module is compiled", "graph.backend"),
    "compiled in place": (in_place(lambda model: model.compile()), "the module is compiled", "inductor"),
    "DataParallel": (nn.DataParallel, "runs copies on several devices", "DistributedDataParallel(graph.rematerialize"),
}


@pytest.fixture(params=WRAPPED)
def wrapped(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *args, **named: None)  # scripting is deprecated
        return (WRAPPED[request.param][0](plain()), *WRAPPED[request.param][1:])


def assert_refused(make, *parts):
    with pytest.raises(ArgumentError) as caught:
        make()
    assert all(part in str(caught.value) for part in parts), caught.value


def test_wrapped_module_is_refused_at_once(wrapped):
    module, *parts = wrapped
    assert_refused(lambda: graph.rematerialize(module), "rematerialize():", *parts)
    assert_refused(lambda: graph.gradient(module, torch.ones(2, 6)), "gradient():", *parts)
    assert_refused(lambda: graph.gradients(module, torch.ones(2, 6)), "gradients():", *parts)


def test_so_is_a_model_with_one_in_it(wrapped):
    module, *parts = wrapped
    assert_refused(lambda: graph.rematerialize(nn.Sequential(plain(), module)), ", as 1", *parts)


@few(1)
def test_so_is_one_that_is_put_in_later(wrapped):
    module, *parts = wrapped
    model = nn.Sequential(plain(), plain())
    step = graph.rematerialize(model)
    compare(model, step, torch.ones(2, 6))
    model[1] = module
    assert_refused(lambda: step(torch.ones(2, 6)), *parts)


@with_gloo
@fsdp_of_one
def test_ddp_and_replicate_and_both_kinds_of_fsdp_are_refused():
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def on_the_cpu(model):
        return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))

    with one_rank():
        for wrap, *parts in (
            (DistributedDataParallel, "prepares the sum of gradients", "DistributedDataParallel(graph.rematerialize("),
            (on_the_cpu, "gathers its parameters", "checkpoint_module"),
            (lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")), "gathers its parameters"),
            (replicate, "prepares the sum of gradients", "replicate(graph.rematerialize("),
        ):
            assert_refused(lambda: graph.rematerialize(wrap(plain())), *parts)  # noqa: B023
            assert_refused(lambda: graph.rematerialize(nn.Sequential(plain(), wrap(plain()))), ", as 1")  # noqa: B023


@with_gloo
@fsdp_of_one
@pytest.mark.parametrize("original", [False, True])
def test_first_kind_of_fsdp_around_a_traced_module_is_refused(original):
    from torch.distributed.fsdp import FullyShardedDataParallel

    with one_rank():
        step = graph.rematerialize(plain())
        model = FullyShardedDataParallel(step, device_id=torch.device("cpu"), use_orig_params=original)
        assert_refused(lambda: model(torch.ones(2, 6)), "has merged the module", "fully_shard(")


def test_data_parallel_around_a_traced_module_is_refused():
    step = graph.rematerialize(plain())
    with pytest.raises(ArgumentError, match=r"DataParallel copies the module for each device[\s\S]*DistributedData"):
        step._replicate_for_data_parallel()


def test_compile_of_a_traced_module_is_refused():
    model = plain()
    with pytest.raises(ArgumentError, match='engine="inductor"'):
        graph.rematerialize(model).compile()
    compare(model, graph.rematerialize(model), torch.ones(2, 6))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_traced_module_in_compiled_code_runs_by_its_own_graphs():
    model = plain()
    step = graph.rematerialize(model, keep="speed")
    compare(model, torch.compile(lambda x: step(x.sin().asin()), backend="eager"), torch.ones(2, 6) / 2)
    assert len(step.plans) == 1
    with pytest.raises(Exception, match=r"graph.backend\(budget=...\) instead"):
        torch.compile(lambda x: step(x), backend="eager", fullgraph=True)(torch.ones(2, 6))


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_function_in_a_forward_is_traced_as_what_it_was_made_of():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.rise, self.function = nn.Linear(6, 6), torch.compile(lambda x: (x.sin() * x).cos())

        def forward(self, x):
            return self.function(self.rise(x))

    model = Model()
    received = graph.rematerialize(model)
    expected = Model()
    expected.load_state_dict(model.state_dict())
    expected.function = lambda x: (x.sin() * x).cos()
    received(torch.ones(2, 6)).sum().backward()
    expected(torch.ones(2, 6)).sum().backward()
    assert torch.equal(model.rise.weight.grad, expected.rise.weight.grad)


@pytest.mark.parametrize("parentheses", [tuple, list])
def test_example_in_parentheses_of_its_own(parentheses):
    x = torch.ones(2, 6)
    for make in (graph.rematerialize, graph.frontier):
        with pytest.raises(ArgumentError, match=r"one after the other[\s\S]*rematerialize\(model, \*example"):
            make(plain(), parentheses([x]))


def test_example_in_parentheses_that_the_model_takes():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.rise = nn.Linear(6, 6)

        def forward(self, pair):
            return self.rise(pair[0] + pair[1])

    model, x = Sum(), torch.ones(2, 6)
    assert graph.rematerialize(model, (x, x)).plan.peak_bytes


def test_error_of_the_model_on_its_example_passes():
    with pytest.raises(RuntimeError, match="must have same reduction dim") as caught:
        graph.rematerialize(plain(), torch.ones(2, 5))
    assert not isinstance(caught.value, CheckpointError)


class Mute(Exception):
    def __str__(self):
        raise NotImplementedError("no text")


@pytest.mark.parametrize("error", [AssertionError(), Mute()])
def test_error_without_a_text_passes(error):
    class Fails(nn.Linear):
        def forward(self, x):
            raise error

    with pytest.raises(type(error)) as caught:
        graph.rematerialize(Fails(6, 6), torch.ones(2, 6))
    assert caught.value is error
    with pytest.raises(ArgumentError, match=r"rematerialize\(model, \*example"):
        graph.rematerialize(Fails(6, 6), (torch.ones(2, 6),))


class Draws(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        return (x * self.draw(x * 1)).sum()


@pytest.mark.parametrize(
    "draw",
    [
        nn.Dropout(0.5, inplace=True),
        nn.AlphaDropout(0.5),
        lambda x: torch.empty_like(x).bernoulli_(0.5),
        lambda x: torch.zeros(8, 64)[:, ::2].normal_().sum(),
    ],
)
def test_numbers_drawn_into_memory_of_another_order_are_refused(draw):
    x = torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
    with pytest.raises(CaptureError, match=r"into a tensor that is not contiguous.*\n.*strides.*\n.*x.contiguous"):
        graph.rematerialize(Draws(draw), x)
    if isinstance(draw, nn.Module):
        x, losses = x.detach().contiguous(), []
        for model in (Draws(draw), graph.rematerialize(Draws(draw))):
            torch.manual_seed(0)
            losses.append(model(x))
        assert torch.equal(*losses)


@pytest.mark.parametrize("as_one", [False, True])
def test_an_example_that_fails_dies_with_its_error(as_one):
    """From Python 3.12 on, frames of generators hold those that catch the error."""
    class Decides(nn.Linear):
        def forward(self, x):
            return x if x.sum() > 0 else super().forward(x)

    def alive_after_an_error():
        x = torch.ones(2, 6)
        try:
            graph.rematerialize(Decides(6, 6), (x,) if as_one else x, budget="50%")
        except CheckpointError:
            return weakref.ref(x)

    gc.collect()
    gc.disable()
    try:
        assert alive_after_an_error()() is None
    finally:
        gc.enable()
