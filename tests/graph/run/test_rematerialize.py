"""rematerialize(): in place of the model everywhere, with the same bits."""
from __future__ import annotations

import copy
import gc
import inspect
import pickle
import types
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from tests.distributed.ranks import on_ranks, one_rank
from tests.graph.eager import assert_same, compare, measured_peak, step
from tests.helpers import assert_equal, in_threads, leaf
from tests.models import MODELS
from tests.settings import without_collector
from tests.slow import few
from torchckpt import graph
from torchckpt.errors import ArgumentError, BudgetInfeasible, CaptureError
from torchckpt.features import release_of
from torchckpt.graph.run.rematerialize import Rematerialized
from torchckpt.regions.flags import local


class Block(nn.Module):
    """A perceptron with a dropout, a batch norm, a buffer, and a choice of what it does."""

    def __init__(self, width=6):
        super().__init__()
        self.rise, self.norm = nn.Linear(width, 2 * width), nn.BatchNorm1d(2 * width)
        self.fall, self.drop = nn.Linear(2 * width, width), nn.Dropout(0.3)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x, mask=None, times=1, shift=None):
        h = self.drop(self.fall(nn.functional.relu_(self.norm(self.rise(x)))))
        if mask is not None:
            h = h * mask["keep"][0]
        h += x
        for _ in range(times):
            h = h.tanh() * self.scale
        return h if shift is None else h + shift


def build(cls=Block, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return cls()


@pytest.fixture
def model():
    return build()


def drop(value):
    """Keep products of matrices and embeddings alone."""
    return value.flops > 0 or value.operator == "aten.embedding"


def step_of(model, *example, **options):
    return graph.rematerialize(model, *example, keep=drop, **options)


def gradients(outputs, *tensors, **options):
    return torch.autograd.grad(outputs.sin().sum(), tensors, **options)


# a module in place of the model ---------------------------------------------------------------------------------------


def test_parameters_and_buffers_are_the_same_objects(model):
    step = step_of(model)
    assert [*map(id, step.parameters())] == [*map(id, model.parameters())]
    assert [*map(id, step.buffers())] == [*map(id, model.buffers())]
    assert [name for name, _ in step.named_modules() if name] == [name for name, _ in model.named_modules() if name]


def test_state_dict_goes_both_ways(model):
    step, other = step_of(model), build(seed=1)
    assert list(step.state_dict()) == list(model.state_dict())
    step.load_state_dict(other.state_dict())
    assert_equal(dict(model.state_dict()), dict(other.state_dict()))
    build(seed=2).load_state_dict(step.state_dict())


def test_attributes_are_those_of_the_model(model):
    step = step_of(model)
    assert step.rise is model.rise
    assert step.scale is model.scale
    model.note = "a note"
    assert step.note == "a note"
    with pytest.raises(AttributeError, match="'Block' object has no attribute 'nothing'"):
        step.nothing  # noqa: B018


def test_model_itself_is_left_as_it_is(model):
    attributes = {name: dict(child.__dict__) for name, child in model.named_modules()}
    step_of(model, torch.randn(4, 6))
    assert {name: dict(child.__dict__) for name, child in model.named_modules()} == attributes


def test_parameter_that_is_put_in_place_of_another_is_used(model):
    step, x = step_of(model), torch.randn(4, 6)
    compare(model, step, x)
    model.fall.weight = nn.Parameter(torch.randn(6, 12))
    compare(model, step, x)


SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def trained(call, model, steps=2, seed=0, make=SGD):
    """The state of ``model`` after steps of an optimizer."""
    optimizer = make(call.parameters())
    torch.manual_seed(seed)
    for _ in range(steps):
        call(torch.randn(4, 6)).sin().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("make", [SGD, partial(torch.optim.AdamW, lr=0.01)], ids=["sgd", "adamw"])
def test_three_steps_of_an_optimizer(make):
    received, expected = build(), build()
    assert_equal(*(trained(*pair, 3, make=make) for pair in ((step_of(received), received), (expected, expected))))


def test_mode_is_one_for_both(model, traces):
    step, x = step_of(model), torch.randn(4, 6)
    assert step.training
    compare(model, step, x)
    model.eval()
    assert not step.training
    compare(model, step, x)
    step.train()
    assert model.training
    assert model.norm.training
    compare(model, step, x)
    model.norm.eval()
    compare(model, step, x)
    assert len(traces) == 3


def test_dtype_is_one_for_both(model):
    step, x = step_of(model), torch.randn(4, 6)
    compare(model, step, x)
    step.to(torch.float64)
    assert model.rise.weight.dtype == torch.float64
    compare(model, step, x.double())
    assert len(step.plans) == 2


def test_copy_has_parameters_of_its_own(model):
    step, x = step_of(model, torch.randn(4, 6)), torch.randn(4, 6)
    twin = copy.deepcopy(step)
    assert isinstance(twin, Rematerialized)
    assert not {*map(id, twin.parameters())} & {*map(id, model.parameters())}
    compare(twin.original, twin, x)
    assert len(twin.plans) == 1


def test_pickle_has_the_model_and_its_options():
    model, x = build(), torch.randn(4, 6)
    step = pickle.loads(pickle.dumps(graph.rematerialize(model, x, keep="speed")))
    assert_equal(dict(step.state_dict()), dict(model.state_dict()))
    compare(step.original, step, x)


@few(1)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda step: pickle.loads(pickle.dumps(step))])
def test_copy_has_the_hooks_of_the_step(copied, model):
    step, x = step_of(model, torch.randn(4, 6)), torch.randn(4, 6)
    step.register_forward_hook(_doubled)
    twin = copied(step)
    torch.manual_seed(1)
    doubled = twin(x)
    torch.manual_seed(1)
    assert_equal(doubled, 2 * model(x))


def _doubled(module, inputs, output):
    return 2 * output


def test_sequential_is_called_as_one():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    step = step_of(model)
    compare(model, step, torch.randn(5, 3))


def test_wrapped_twice(model):
    compare(model, step_of(step_of(model)), torch.randn(4, 6))


# signatures -----------------------------------------------------------------------------------------------------------


def test_signature_is_that_of_the_model(model):
    step = graph.rematerialize(model)
    assert inspect.signature(step.forward) == inspect.signature(model.forward)
    assert inspect.signature(type(step).forward) == inspect.signature(Block.forward)
    assert inspect.signature(step) == inspect.signature(model)
    assert step.forward.__wrapped__ is Block.forward
    assert type(step) is type(graph.rematerialize(build()))
    twice = graph.rematerialize(step)
    assert inspect.signature(twice.forward) == inspect.signature(model.forward)


def test_signature_of_a_forward_that_is_set_on_the_instance(model):
    plain = model.forward
    model.forward = lambda x, *, times=1: plain(x, times=times)
    step = graph.rematerialize(model)
    assert str(inspect.signature(step.forward)) == "(x, *, times=1)"
    assert inspect.signature(graph.rematerialize(build()).forward) == inspect.signature(build().forward)
    x = torch.randn(4, 6)
    compare(model, step, x, times=2)


def test_forward_that_is_put_around_the_steps_own_stays_with_it(model):
    """As accelerate does for mixed precision: on the model, it would call itself without end."""
    step, calls = graph.rematerialize(model), []

    def around(self, *args, **kwargs):
        calls.append(len(args))
        return self._original_forward(*args, **kwargs)

    step._original_forward = step.forward
    step.forward = types.MethodType(around, step)
    step(torch.randn(4, 6)).sum().backward()
    assert calls == [1]
    assert not {"forward", "_original_forward"} & {*model.__dict__}
    assert len(step.plans) == 1


def test_keywords_in_any_order_are_one_call(model, traces):
    mask = {"keep": [torch.ones(4, 6)]}
    step = graph.rematerialize(model, torch.randn(4, 6), example_kwargs={"mask": mask, "times": 2})
    x = torch.randn(4, 6)
    for kwargs in ({"times": 2, "mask": mask}, {"mask": mask, "times": 2}):
        compare(model, step, x, **kwargs)
    step(times=2, mask=mask, x=x)
    assert len(traces) == 2


def test_keywords_that_the_forward_does_not_name_keep_their_order():
    class Named(nn.Linear):
        def forward(self, **named):
            first, second = named.values()
            return super().forward(first).sum() + second.sum()

    step = graph.rematerialize(Named(2, 2))
    ones, zeros = torch.ones(1, 2), torch.zeros(1, 2)
    for named in ({"a": ones, "b": zeros}, {"b": zeros, "a": ones}):
        assert torch.equal(step(**named), step.original(**named))


# plans ----------------------------------------------------------------------------------------------------------------


def test_example_is_planned_for_and_not_run(model, traces):
    before = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    x = torch.randn(4, 6)
    torch.set_rng_state(before[1])
    step = step_of(model, x)
    assert_equal((dict(model.state_dict()), torch.get_rng_state()), (dict(before[0]), before[1]))
    assert x.grad is None
    assert len(traces) == 1
    step(x)
    assert len(traces) == 1


def test_no_plan_before_there_are_inputs(model):
    step = step_of(model)
    assert step.plans == ()
    works = r"(?s)plan: there is no plan yet: it needs inputs.*no example, and no call.*rematerialize\(mod"
    with pytest.raises(ArgumentError, match=works):
        step.plan  # noqa: B018


def test_another_batch_size_has_a_plan_of_its_own(model, traces):
    step, small, large = step_of(model), torch.randn(4, 6), torch.randn(8, 6)
    for x in (small, large, small, large):
        compare(model, step, x)
    assert len(traces) == 2
    first, second = step.plans
    assert step.plan is second
    step(small)
    assert step.plan is first
    assert second.peak_bytes > first.peak_bytes


def test_prepare_plans_a_call_with_keywords(model, traces):
    step, x, shift = step_of(model), torch.randn(4, 6), torch.randn(6)
    plan = step.prepare(x, shift=shift)
    step(x, shift=shift)
    assert step.plan is plan
    assert len(traces) == 1


def test_parameter_that_is_frozen(model, traces):
    step, x = step_of(model), torch.randn(4, 6)
    compare(model, step, x)
    model.rise.requires_grad_(False)
    compare(model, step, x)
    model.rise.requires_grad_(True)
    compare(model, step, x)
    assert len(traces) == 2


@few(1)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_model_itself_runs_where_nothing_is_differentiated(model, context, traces):
    step, x = step_of(model.eval()), torch.randn(4, 6)
    with context():
        assert torch.equal(step(x), model(x))
    assert step(x).grad_fn is not None
    model.requires_grad_(False)
    assert step(x).grad_fn is None
    assert len(traces) == 1


def test_autocast(model, traces):
    step, x = step_of(model), torch.randn(4, 6)

    class Under(nn.Module):
        """Called under autocast; its backward is outside, as torch wants it."""

        def __init__(self, dtype, call):
            super().__init__()
            self.dtype, self.call = dtype, call

        def forward(self, x):
            with torch.autocast("cpu", self.dtype):
                return self.call(x)

    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype):
            assert step(x).dtype == dtype
        compare(Under(dtype, model), Under(dtype, step), x)
    compare(model, step, x)
    assert len(traces) == 3


# inputs and outputs ---------------------------------------------------------------------------------------------------


def test_keywords_constants_and_nested_inputs(model):
    step, x = step_of(model), leaf(4, 6)
    compare(model, step, x, times=3)
    compare(model, step, x, {"keep": [torch.ones(6), None]}, shift=2.5)
    compare(model, step, x, mask={"keep": (leaf(6),)}, shift=leaf(6))
    assert len(step.plans) == 3


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, a, b):
        return self.linear(a).tanh() * b.sin()


def test_one_tensor_as_two_inputs():
    """The trace of one does for the other, in either order."""
    model = build(Product)
    for first in (True, False):
        step, x, y = step_of(model), leaf(2, 3), leaf(2, 3)
        for second in ((x, x), (x, y)) if first else ((x, y), (x, x)):
            leaves = dict.fromkeys(second)
            assert_equal(gradients(step(*second), *leaves), gradients(model(*second), *leaves))


def test_input_that_is_a_parameter():
    model = build(Product)
    step, weight = step_of(model), model.linear.weight
    received, expected = step(weight, weight), model(weight, weight)
    assert_equal(gradients(received, weight), gradients(expected, weight))


def test_sparse_input():
    class Mixed(nn.Linear):
        def forward(self, mixing, x):
            return super().forward(torch.sparse.mm(mixing, x))

    model, mixing = Mixed(3, 3), torch.eye(4).to_sparse()
    compare(model, graph.rematerialize(model), mixing, torch.randn(4, 3))


EXPANDED = pytest.mark.skipif(
    release_of(torch.__version__) == (2, 12),
    reason="torch 2.12 alone: AOTAutograd cannot copy the gradient of an expanded output",
)


@few(1)
@pytest.mark.parametrize(
    "function",
    [
        lambda x, h: (x, h),
        lambda x, h: (h, h),
        lambda x, h: (h, h[0], h.t()),
        lambda x, h: (x[0], h),
        lambda x, h: {"h": h, "n": 3, "none": None, "many": [h.sum(), h.detach()]},
        lambda x, h: (h, h.argmax()),
        lambda x, h: (h.relu_(), x.detach()),
        pytest.param(lambda x, h: h.expand(2, 4, 3), marks=EXPANDED),
    ],
    ids=["input", "repeated", "views", "view of an input", "nested", "integer", "detached", "expanded"],
)
def test_outputs_of_every_kind(function):
    class Model(nn.Linear):
        def forward(self, x):
            return function(x, super().forward(x).sin())

    model, x = Model(3, 3), leaf(4, 3)
    step = step_of(model, x)

    def loss(outputs):
        tensors = [t for t in torch.utils._pytree.tree_leaves(outputs) if getattr(t, "requires_grad", False)]
        return sum((place + 1) * tensor.sin().sum() for place, tensor in enumerate(tensors))

    compare(model, step, x, loss=loss)


def test_input_that_is_returned_is_the_input():
    class Model(nn.Linear):
        def forward(self, x):
            return x, super().forward(x)

    model, x = Model(3, 3), torch.randn(4, 3)
    assert graph.rematerialize(model)(x)[0].data_ptr() == x.data_ptr()


def test_unused_outputs_give_no_gradients():
    case = MODELS["nested_outputs"]()
    rematerialized = graph.rematerialize(case.model, *case.inputs)
    received = step(case.model, case.inputs, case.loss, call=rematerialized)
    assert [name for name, gradient in received.gradients.items() if gradient is None] == ["spare.weight", "spare.bias"]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        return self.head(self.words(tokens).tanh())


def test_tied_weights_and_untied_ones():
    model, tokens = build(Tied), torch.randint(7, (5,))
    step = step_of(model)
    assert len(list(step.parameters())) == 1
    compare(model, step, tokens)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    compare(model, step, tokens)


def test_operations_in_place_inside():
    class Model(nn.Linear):
        def forward(self, x):
            h = super().forward(x)
            h.mul_(2).add_(1)
            h[0] = h[1]
            h += x
            return h.sigmoid_()

    model = Model(3, 3)
    compare(model, step_of(model), leaf(4, 3))


# backwards ------------------------------------------------------------------------------------------------------------


def test_gradients_accumulate_over_two_backwards(model):
    def accumulated(call):
        torch.manual_seed(5)
        model.zero_grad()
        for _ in range(2):
            call(torch.randn(4, 6)).sin().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    model.norm.eval()
    assert_equal(accumulated(step_of(model)), accumulated(model))


def test_two_forwards_then_their_backwards(model):
    model.eval()
    step, x, y = step_of(model), torch.randn(4, 6), torch.randn(4, 6)
    weight = model.rise.weight
    first, second = step(x), step(y)
    assert_equal(gradients(second, weight), gradients(model(y), weight))
    assert_equal(gradients(first, weight), gradients(model(x), weight))


def test_graph_may_be_retained(model):
    model.eval()
    x, weight = leaf(4, 6), model.rise.weight
    outputs = step_of(model)(x)
    once = gradients(outputs, x, weight, retain_graph=True)
    assert_equal(gradients(outputs, x, weight, retain_graph=True), once)
    assert_equal(gradients(outputs, x, weight), once)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        outputs.sum().backward()


def test_gradients_of_some_inputs_alone(model):
    model.eval()
    step, x = step_of(model), leaf(4, 6)
    assert_equal(gradients(step(x), x), gradients(model(x), x))
    assert_equal(gradients(step(x), model.fall.bias), gradients(model(x), model.fall.bias))


def test_gradient_of_a_gradient_is_refused(model):
    """No wrong number comes out."""
    model.eval()
    x = leaf(4, 6)
    loss = step_of(model)(x).sum()
    for backward in (lambda: torch.autograd.grad(loss, x, create_graph=True), lambda: loss.backward(create_graph=True)):
        with pytest.raises(CaptureError, match="a backward with create_graph=True"):
            backward()
    assert_equal(torch.autograd.grad(loss, x), torch.autograd.grad(model(x).sum(), x))


def test_graph_may_be_retained_in_a_later_call(model):
    """AOTAutograd would refuse where the first backward was one that frees."""
    model.eval()
    step, x = step_of(model), leaf(4, 6)
    expected = gradients(model(x), x)
    assert_equal(gradients(step(x), x), expected)
    outputs = step(x)
    assert_equal(gradients(outputs, x, retain_graph=True), expected)
    assert_equal(gradients(outputs, x), expected)


# hooks, threads, memory -----------------------------------------------------------------------------------------------


def test_hooks_of_parameters_and_of_inputs_fire(model):
    model.eval()
    step, x, fired = step_of(model), leaf(4, 6), []
    model.rise.weight.register_hook(lambda gradient: fired.append("parameter"))
    x.register_hook(lambda gradient: gradient * 2)
    step(x).sum().backward()
    received = x.grad
    model(x.detach().requires_grad_()).sum().backward()
    assert fired == ["parameter", "parameter"]
    assert_equal(received, 2 * torch.autograd.grad(model(y := x.detach().requires_grad_()).sum(), y)[0])


def test_forward_hooks_of_the_result_fire_and_those_of_the_model_are_in_the_trace(model):
    model.eval()
    x, seen = torch.randn(4, 6), []
    model.fall.register_forward_hook(lambda module, args, output: output * 3)
    step = step_of(model, x)
    step.register_forward_hook(lambda module, args, output: seen.append(output))
    received = step(x)
    assert torch.equal(received, model(x))
    assert seen[0] is received


def test_no_hook_is_left(model):
    def hooks():
        tables = [torch.nn.modules.module._global_forward_hooks, torch.nn.modules.module._global_forward_pre_hooks]
        for child in model.modules():
            tables += [child._forward_hooks, child._forward_pre_hooks, child._backward_hooks]
        return [*map(len, tables)]

    before = hooks()
    step_of(model, torch.randn(4, 6))(torch.randn(4, 6)).sum().backward()
    assert hooks() == before == [0] * len(before)


class Failing(nn.Linear):
    fails = True

    def forward(self, x):
        h = super().forward(x)
        if self.fails:
            raise KeyError("of the model")
        return h


def test_error_of_the_model_passes_and_leaves_nothing():
    model, x = Failing(3, 3), torch.randn(2, 3)
    step = graph.rematerialize(model)
    for _ in range(2):
        with pytest.raises(KeyError, match="of the model"):
            step(x)
    assert local.thread.tracing is None
    assert not torch.compiler.is_compiling()
    assert len(torch.nn.modules.module._global_forward_hooks) == 0
    assert step.plans == ()
    model.fails = False
    compare(model, step, x)


@pytest.mark.filterwarnings("ignore")  # torch hides warnings of its own by catch_warnings(), which is not by thread
def test_threads_that_call_at_once():
    """Each traces a model of its own, with regions and names, then all share one."""
    class Regions(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))

        def forward(self, x):
            return graph.sequential(self.body, 2, x)

    models = [build(Regions, seed) for seed in range(3)]
    x = torch.randn(2, 3)
    shared = graph.rematerialize(models[0])

    def work(model):
        step = graph.rematerialize(model)
        received = step(x)
        received.sum().backward()
        return received, model.body[0].weight.grad, step.plan.recomputed, {*step.plan.paths}, shared(x)

    results = in_threads(*(lambda model=model: work(model) for model in models))
    for model, (received, gradient, recomputed, paths, other) in zip(models, results):
        weight = model.body[0].weight
        assert torch.equal(received, model(x))
        assert torch.equal(gradient, torch.autograd.grad(model(x).sum(), weight)[0])
        assert recomputed == ("addmm", "addmm_1")
        assert paths == {"", *(f"body.{place}" for place in range(4))}
        assert torch.equal(other, models[0](x))


@few(1)
@pytest.mark.parametrize("backward", [True, False])
def test_inputs_and_outputs_die(model, backward):
    step = step_of(model)
    gc.collect()
    with without_collector():
        for _ in range(2):
            x, mask = leaf(4, 6), torch.ones(6)
            outputs = step(x, mask={"keep": [mask]})
            if backward:
                outputs.sum().backward()
            alive = [weakref.ref(x), weakref.ref(mask), weakref.ref(outputs)]
            del x, mask, outputs
            assert [reference() for reference in alive] == [None] * 3


class Tanh(nn.Module):
    def forward(self, x):
        for _ in range(4):
            x = x.tanh()
        return x


HELD = pytest.mark.skipif(
    release_of(torch.__version__) < (2, 13), reason="torch before 2.13 holds the gradient of an output to the end"
)


@pytest.mark.parametrize("holds", [pytest.param(True, marks=HELD), False])
def test_gradient_of_an_output_dies_when_eager_would_free_it(holds):
    """All is as large as the input: what eager has at its peak, this has."""
    model, x = Tanh(), leaf(1000)
    step = graph.rematerialize(model, x)

    def backward(call):
        outputs = [call(x)]
        loss = (outputs[0] if holds else outputs.pop()).mul(2).sum()
        loss.backward()
        x.grad = None

    backward(model)
    assert measured_peak(lambda: backward(step)) == measured_peak(lambda: backward(model))


def test_example_dies(model):
    x = torch.randn(4, 6)
    step = step_of(model, x)
    alive = weakref.ref(x)
    del x
    gc.collect()
    assert alive() is None
    assert step.plan


def test_model_dies_with_the_result():
    model = build()
    step = step_of(model, torch.randn(4, 6))
    alive = weakref.ref(model)
    del model, step
    gc.collect()
    assert alive() is None


# data parallel --------------------------------------------------------------------------------------------------------


OF_DDP = inspect.signature(nn.parallel.DistributedDataParallel).parameters
NO_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in OF_DDP else "broadcast_buffers"


def data_parallel(rank: int):
    """With the result inside of DDP, and with the model there; no buffer is sent, as each rank has its own."""
    replicas = []
    for wrap in (step_of, lambda model: model):
        model = build()
        call = nn.parallel.DistributedDataParallel(wrap(model), **{NO_BUFFERS: False})
        replicas.append(trained(call, model, seed=rank))
    return replicas


def test_ddp_on_one_rank():
    with one_rank():
        assert_equal(*data_parallel(0))


@pytest.mark.slow
def test_ddp_on_two_ranks(tmp_path):
    """Gradients are averages: the parameters of both ranks are equal, and those of eager."""
    (first, expected), (second, _) = on_ranks(data_parallel, tmp_path)
    assert_equal(first, expected)
    parameters = [name for name in first if not name.startswith("norm.running")]
    assert_equal(*({name: state[name] for name in parameters} for state in (first, second)))


# faults ---------------------------------------------------------------------------------------------------------------


def test_faults_of_the_call_are_listed_at_once():
    with pytest.raises(ArgumentError) as caught:
        graph.rematerialize(lambda x: x, engine="triton")
    text = str(caught.value)
    assert text.startswith("rematerialize(): 2 faults\nthe first argument is not a module\n  received: <function")
    assert "works:    graph.rematerialize(model, inputs), of a module whose forward calls the function" in text
    assert 'engine is neither "eager" nor "inductor"\n  received: \'triton\'\n  works:    engine="eager"' in text


@pytest.mark.parametrize(
    ("example", "options", "text"),
    [
        (({"x": torch.ones(4, 6)},), {}, "works:    graph.rematerialize(model, example_kwargs=example)"),
        (((torch.ones(4, 6),),), {}, "works:    graph.rematerialize(model, *example)"),
        ((torch.ones(4, 6), "50%"), {}, "works:    graph.rematerialize(model, inputs, budget='50%')"),
        (((4, 6),), {}, "works:    graph.rematerialize(model, torch.randn(4, 6))"),
        ((), {"example_kwargs": [1]}, "example_kwargs is not a dict of the keywords that the model is called with\n"
                                      "  received: list"),
        ((), {"example_kwargs": {1: 2}}, "example_kwargs is not a dict of the keywords"),
    ],
)
def test_examples_that_are_given_another_way(model, example, options, text):
    with pytest.raises(ArgumentError) as caught:
        graph.rematerialize(model, *example, **options)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"budget": "6 gigs"}, r"rematerialize\(\): the budget is not bytes above 0.*received: budget='6 gigs'"),
        ({"keep": "sped"}, r'rematerialize\(\): keep is not one of.*received: \'sped\'.*keep="speed"'),
        ({"costs": "guess"}, r'rematerialize\(\): costs is not "roofline", "profile".*received: \'guess\''),
        ({"rng": "draw"}, r'rematerialize\(\): rng is neither "keep" nor "replay".*received: \'draw\''),
        ({"exact": True}, r"rematerialize\(\): exact=True is given without a budget.*received: budget=None"),
    ],
)
def test_faults_are_found_without_an_example(model, options, text):
    with pytest.raises(ArgumentError, match=f"(?s){text}"):
        graph.rematerialize(model, **options)


def test_result_does_not_change_its_input():
    class Model(nn.Linear):
        def forward(self, x, more=None):
            (x if more is None else more["y"]).add_(1)
            return super().forward(x)

    step, x = step_of(Model(3, 3)), torch.randn(2, 3)
    with pytest.raises(CaptureError, match=r"(?s)changes an input in place.*received: args\[0\] is changed in pl"):
        step(x)
    with pytest.raises(CaptureError, match=r"received: kwargs\['more'\]\['y'\] is changed in place"):
        step(x, more={"y": torch.ones(3)})


def test_assert_same_of_a_model_with_all_of_it():
    case = MODELS["gpt6"](layers=1)
    rematerialized = graph.rematerialize(case.model, keep="memory")
    assert_same(step(case.model, case.inputs, case.loss, call=rematerialized), step(case.model, case.inputs, case.loss))


def test_share_becomes_bytes_once():
    """Of a smaller batch, the gradients of the weights alone are more than the share."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)), nn.Linear(16, 1))
    step = graph.rematerialize(model, budget="70%")
    with graph.rematerialize_(copy.deepcopy(model), budget="70%") as handle:
        for rows in (512, 512, 3):
            step(torch.randn(rows, 16)).sum().backward()
            handle.prepare(torch.randn(rows, 16))
        for holder in (step, handle):
            first, second = holder.plans
            assert first.budget_bytes == second.budget_bytes
            assert second.peak_bytes == second.eager_peak_bytes > 0.7 * second.eager_peak_bytes
    with pytest.raises(BudgetInfeasible, match=r"70%, which is .* since the first plan; no schedule"):
        step(torch.randn(4096, 16))
    other = graph.rematerialize(model, torch.randn(1024, 16), budget="70%")
    assert other.plan.budget_bytes > step.plans[0].budget_bytes


def test_share_of_a_call_that_fits_no_plan_is_no_share():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)), nn.Linear(16, 1))
    step = graph.rematerialize(model, budget="70%")
    with pytest.raises(BudgetInfeasible):
        step(torch.randn(3, 16))
    step(torch.randn(512, 16))


def test_same_data_in_two_places_is_a_call_like_any_other(traces):
    class Net(nn.Linear):
        def forward(self, x, y):
            return super().forward(x) * y

    net, x = Net(4, 4), torch.randn(3, 4)
    step = graph.rematerialize(net, x, x)
    for pair in ((x, torch.randn(3, 4)), (x, x), (torch.randn(3, 4), x)):
        compare(net, step, *pair)
    assert len(traces) == 1
    data = torch.randn(3, 4, requires_grad=True)
    for pair in ((data, data), (data, torch.randn(3, 4, requires_grad=True))):  # gradients are added in eager's order
        compare(net, step, *pair)
    assert len(traces) == 3


def test_other_traces_take_the_module_itself(model):
    x = torch.randn(4, 6)
    step = graph.rematerialize(model.eval(), x)
    assert_equal(torch.export.export(step, (x,)).module()(x), model(x))
    weight = model.get_parameter(next(iter(dict(model.named_parameters()))))
    derivative = make_fx(lambda x: torch.autograd.grad(step(x).sin().sum(), weight))
    torch.testing.assert_close(derivative(x)(x), torch.autograd.grad(model(x).sin().sum(), weight))
