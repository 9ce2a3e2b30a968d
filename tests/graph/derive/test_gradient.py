"""gradient(): the module, its code, what it shares, what it refuses; test_relax and test_relay have what it keeps."""
from __future__ import annotations

import copy
import pickle
from collections import OrderedDict, namedtuple

import pytest
import torch
from torch import fx, nn

from tests.graph.allocations import measured_peak
from tests.graph.eager import Result, assert_same, step
from tests.graph.executed import backward, counted, repeats
from tests.helpers import assert_equal
from tests.models import MODELS
from tests.slow import few, slow
from torchckpt import graph
from torchckpt.errors import ArgumentError, CaptureError
from torchckpt.graph import mark, region
from torchckpt.graph.derive.gradient import gradient
from torchckpt.graph.derive.simplify import simplify
from torchckpt.graph.inspect import simulate

Pair = namedtuple("Pair", "loss rest")


@pytest.fixture
def x():
    return torch.randn(3, 4)


class Step(nn.Module):
    """A case's model and its loss."""

    def __init__(self, case):
        super().__init__()
        self.model, self._case = case.model, [case]

    def forward(self, *inputs):
        outputs = self.model(*inputs)
        return self._case[0].loss(outputs), outputs


def ran(case, adjoint, asked, seed=0):
    """What a call of ``adjoint`` gives, as a step in eager gives it; buffers are afterwards as they were."""
    buffers = dict(case.model.named_buffers())
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        (_, outputs), gradients = adjoint(*case.inputs)
        states = [torch.get_rng_state()]
    after = {name: buffer.clone() for name, buffer in buffers.items()}
    for name, buffer in buffers.items():
        buffer.copy_(before[name])
    return Result(outputs, dict(zip(asked, gradients)), after, states)


@few(1)
@pytest.mark.parametrize("checkpoints", [None, "memory"])
@pytest.mark.parametrize(
    "name",
    ["nested_outputs", "sparse_embedding", "moe", *slow(["mlp24", "gpt6", "resnet20", "unet"])],
)
def test_all_bits_are_those_of_eager_and_all_bytes_those_of_the_simulation(name, checkpoints):
    case = MODELS[name]()
    expected = step(case.model, case.inputs, case.loss)
    asked = [name for name, grad in expected.gradients.items() if grad is not None]
    names = [f"model.{name}" if "inputs[" not in name else int(name[7:-1]) for name in asked]
    adjoint = gradient(Step(case), *case.inputs, require_grads=names, checkpoints=checkpoints)
    expected = expected._replace(
        outputs=torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, expected.outputs),
        gradients={name: expected.gradients[name] for name in asked},
        rng_states=expected.rng_states[:1],
    )
    assert_same(ran(case, adjoint, asked), expected)
    assert measured_peak(lambda: ran(case, adjoint, asked)) >= simulate(adjoint).peak_bytes
    inputs = case.inputs
    with torch.random.fork_rng():
        assert measured_peak(lambda: adjoint(*inputs)) == simulate(adjoint).peak_bytes


# the module -----------------------------------------------------------------------------------------------------------


def test_code_is_what_one_would_write(x):
    adjoint = gradient(lambda x, w: (x @ w).sum(), x, torch.randn(4, 2), require_grads=["w"])
    calls = [line.strip().split(";")[0].replace("torch.ops.aten.", "") for line in adjoint.code.strip().splitlines()]
    assert calls == [
        "@unrecorded",
        "def forward(self, x, w):",
        "mm = mm.default(x, w)",
        "sum_1 = sum.default(mm)",
        "ones_like = ones_like.default(sum_1, pin_memory = False)",
        "t = t.default(x)",
        "expand = expand.default(ones_like, [3, 2])",
        "mm_1 = mm.default(t, expand)",
        "return (sum_1, (mm_1,))",
    ]


def test_parameters_and_buffers_are_those_of_the_module(x):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Sum())
    adjoint = gradient(model, x)
    assert adjoint.get_parameter("0.weight") is model[0].weight
    assert adjoint.get_buffer("1.running_mean") is model[1].running_mean


def test_what_a_function_closes_over_is_shared(x):
    linear = nn.Linear(4, 4)
    adjoint = gradient(lambda x: linear(x).sum(), x)
    assert {id(parameter) for parameter in adjoint.parameters()} == {id(linear.weight), id(linear.bias)}


class Sum(nn.Module):
    def forward(self, x):
        return x.sum()


def test_buffers_are_written_once_a_call_and_not_by_the_trace(x):
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.Tanh(), Sum())
    plain = copy.deepcopy(model)
    adjoint = gradient(in_region(model), x, require_grads=["0.model.0.weight"])
    assert_equal(dict(model.named_buffers()), dict(plain.named_buffers()))
    adjoint(x)
    plain(x)
    assert_equal(dict(model.named_buffers()), dict(plain.named_buffers()))


class Last(nn.Module):
    """Writes into a buffer without reading it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x):
        loss = x.sin().sum()
        torch.mul(loss.detach(), 2, out=self.last)
        return loss


def test_buffer_that_is_written_and_never_read(x):
    model = Last()
    loss, _ = gradient(model, x)(x)
    assert torch.equal(model.last, 2 * loss)


def in_region(model):
    """The module in a region, so that it is recomputed."""

    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return region(self.model)(x)

    return nn.Sequential(Inside())


def test_nothing_is_recorded_for_autograd(x):
    outputs, gradients = gradient(lambda x: (x**2).sum(), x)(x.requires_grad_())
    assert not outputs.requires_grad
    assert not gradients[0].requires_grad


def test_random_numbers_are_those_of_eager_and_none_is_drawn_by_the_trace(x):
    def function(x):
        return region(lambda x: nn.functional.dropout(x.sin(), 0.5).sin())(x).sum()

    before = torch.get_rng_state()
    adjoint = gradient(function, x)
    assert torch.equal(torch.get_rng_state(), before)
    _, (received,) = adjoint(x)
    torch.set_rng_state(before)
    leaf = x.clone().requires_grad_()
    assert torch.equal(received, torch.autograd.grad(function(leaf), leaf)[0])


@pytest.mark.parametrize(
    "structure",
    [
        lambda a, b: a,
        lambda a, b: (a, [b, {"b": b, "n": 3, "s": "text", "none": None}]),
        lambda a, b: [a],
        lambda a, b: OrderedDict(a=a, b=b),
        lambda a, b: Pair(a, [b, 2.5]),
    ],
    ids=["tensor", "nested", "list", "OrderedDict", "namedtuple"],
)
def test_outputs_have_the_structure_that_the_function_returns(structure, x):
    outputs, _ = gradient(lambda x: structure(x.sum(), x * 2), x)(x)
    assert_equal(outputs, structure(x.sum(), x * 2))


def test_can_be_copied_pickled_and_simplified(x):
    def function(x, a, b):
        return ((x @ a.T) @ b.T).sum()

    inputs = x, torch.randn(5, 4), torch.randn(6, 5)
    adjoint = gradient(function, *inputs)
    expected = adjoint(*inputs)
    assert_equal(copy.deepcopy(adjoint)(*inputs), expected)
    assert_equal(pickle.loads(pickle.dumps(adjoint))(*inputs), expected)
    simple = simplify(adjoint)
    assert counted(simple)["t"] < counted(adjoint)["t"]
    torch.testing.assert_close(simple(*inputs), expected)


def test_repeats_have_values_of_their_own(x):
    adjoint = gradient(lambda x: region(lambda: x.sin().sin().view(-1).sin())().sum(), x)
    assert repeats(adjoint) == ["sin", "sin_1"]
    values = [node.meta["val"] for node in adjoint.graph.nodes if node.op == "call_function"]
    storages = [value.untyped_storage()._cdata for value in values]
    views = sum(counted(adjoint)[name] for name in ("view", "expand"))
    assert len(set(storages)) == len(storages) - views


# what it takes --------------------------------------------------------------------------------------------------------


def test_takes_a_graph_module_and_names_of_its_nodes(x):
    module = fx.symbolic_trace(lambda x, y: (x.sin() * y).sum())
    assert_equal(gradient(module, x, x, require_grads=["sin", "y"])(x, x)[1], (x, x.sin()))


def test_marks_in_a_graph_module_are_marks(x):
    traced = gradient(lambda x: mark(x.sin(), "h").sin().sum(), x)
    assert_equal(gradient(traced, x, require_grads=["h"])(x)[1], (x.sin().cos(),))


def test_of_a_gradient_is_the_second_derivative(x):
    first = gradient(lambda x: (x**3).tanh().sum(), x)
    leaf = x.clone().requires_grad_()
    slope, = torch.autograd.grad((leaf**3).tanh().sum(), leaf, create_graph=True)
    expected, = torch.autograd.grad(slope.sum(), leaf)
    _, (received,) = gradient(lambda x: first(x)[1][0].sum(), x)(x)
    torch.testing.assert_close(received, expected)


def test_all_floating_inputs_are_asked_for_by_default(x):
    index = torch.tensor([0, 2])
    _, gradients = gradient(lambda x, index, y: (x[index] * y).sum(), x, index, torch.ones(4))(x, index, torch.ones(4))
    assert [grad.shape for grad in gradients] == [(3, 4), (4,)]


def test_inputs_of_a_variable_number_are_named_by_their_places(x):
    assert_equal(gradient(lambda *xs: (xs[0] * xs[1]).sum(), x, x, require_grads=["xs_1"])(x, x)[1], (x,))


def test_parameter_that_is_frozen_may_be_asked_for(x):
    linear = nn.Linear(4, 1).requires_grad_(False)
    _, gradients = gradient(nn.Sequential(linear, Sum()), x, require_grads=["0.weight"])(x)
    torch.testing.assert_close(gradients[0], x.sum(0, keepdim=True))
    assert not linear.weight.requires_grad


def test_policy_says_what_is_kept_instead_of_regions(x):
    adjoint = gradient(lambda x: mark(x.sin(), "h").sin().sin().sum(), x, checkpoints=["h"])
    assert "sin" not in repeats(adjoint)
    assert backward(adjoint)[0] == "ones_like"


# what it refuses ------------------------------------------------------------------------------------------------------


def several(x, i):
    mark((x, x), "pair")
    return x.sum(), x, i.sum(), "text"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"require_grads": ["y"]}, r"a name in require_grads is that of no input.*'y'.*mark\(value, \"y\"\)"),
        ({"require_grads": [0, "x"]}, r"a gradient is asked for twice.*'x' twice.*require_grads=\['x'\]"),
        ({"require_grads": ["i"]}, "a value in require_grads has no floating dtype.*'i': torch.int64"),
        ({"require_grads": [2]}, r"an int is the position of none of the 2 inputs.*received: 2.*require_grads=\[1\]"),
        ({"require_grads": [-1]}, "an int is the position of none of the 2 inputs.*received: -1"),
        ({"require_grads": [None]}, "an entry of require_grads is neither the position of an input"),
        ({"require_grads": ["pair"]}, "a mark in require_grads is on several tensors.*2 marked 'pair'"),
        ({"target_index": 1}, r"the target is not a scalar.*output 1 of shape \(3, 4\).*graph.gradients"),
        ({"target_index": 2}, "the target has no floating dtype.*output 2: torch.int64"),
        ({"target_index": 3}, "the target has no floating dtype.*output 3: 'text'"),
        ({"target_index": 4}, "target_index is the index of none of the 4 outputs.*received: 4"),
        ({"checkpoints": "sped"}, "checkpoints is not one of.*checkpoints=\"speed\""),
        ({"target_index": 9, "require_grads": [7, "z"]}, "3 faults"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_argument_is_refused(options, message, x):
    with pytest.raises(ArgumentError, match=f"(?s){message}"):
        gradient(several, x, torch.arange(3), **options)


@pytest.mark.parametrize(
    ("function", "inputs", "message"),
    [
        (3, (torch.ones(1),), "the first argument is neither a function nor a module.*graph.gradient"),
        (torch.sum, (3,), "an input is not a tensor.*input 0: 3"),
        (sum, ((torch.ones(1), torch.ones(1)),), r"(?s)an input is not a tensor.*lambda a, b: fn\(\(a, b\)\)"),
        (torch.sum, (torch.arange(3),), "no input has a floating dtype, and require_grads names no value"),
    ],
)
def test_call_is_refused(function, inputs, message):
    with pytest.raises(ArgumentError, match=f"(?s){message}"):
        gradient(function, *inputs)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x.add_(1).sum(), "changes an input in place.*in-place operation.*x = x \\+ 1"),
        (lambda x: x.sum() if x.sum() > 0 else x.mean(), "depends on the values of its tensors.*torch.where"),
    ],
)
def test_function_that_cannot_be_traced_is_refused(function, message, x):
    with pytest.raises(CaptureError, match=f"(?s){message}"):
        gradient(function, x)


def _behind(x):
    h = x.sin()
    return (graph.mark(h, "h") * h.mul_(2)).sum()


def _view(x):
    base = x.sin()
    h = graph.mark(base[:2], "h")
    base.mul_(2)
    return h.exp().sum()


def _itself(x):
    return graph.mark(x.sin(), "h").mul_(2).exp().sum()


@few(1)
@pytest.mark.parametrize("function", [_behind, _view, _itself])
def test_gradient_of_what_is_written_to_after_its_mark_is_refused(function, x):
    with pytest.raises(ArgumentError, match=r"(?s)is changed in place after its mark.*'h' is changed in place"):
        graph.gradient(function, x, require_grads=["h"])
    (slope,) = graph.gradient(function, x)(x)[1]
    with torch.enable_grad():
        other = x.detach().requires_grad_()
        assert_equal(slope, torch.autograd.grad(function(other), other)[0])


def test_function_that_writes_to_what_it_closes_over_is_refused(x):
    norm = nn.BatchNorm1d(4)
    with pytest.raises(CaptureError, match=r"(?s)a module may change its own buffers.*aten\.add_.*the module itself"):
        gradient(lambda x: norm(x).sum(), x)
    assert norm.num_batches_tracked == 0


def test_error_of_the_function_is_its_own(x):
    with pytest.raises(ZeroDivisionError):
        gradient(lambda x: x.sum() * (1 / 0), x)


# inputs of another kind -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("others", [
    (torch.ones(1), torch.ones(4)), (torch.ones(2, 4), torch.ones(2, 4)), (torch.ones(4), torch.ones(4).double()),
    (torch.ones(4, 1), torch.ones(4)), (torch.ones(()), torch.ones(())),
])
def test_sizes_are_those_of_the_trace(others):
    """A mean divides by the number of elements of the trace, and an expanded gradient has its shape."""
    adjoint = gradient(lambda x, w: (x * w).mean(), torch.ones(4), torch.ones(4))
    for module in (adjoint, copy.deepcopy(adjoint), simplify(adjoint)):
        with pytest.raises(ArgumentError, match="has another shape or dtype than in the trace: "):
            module(*others)
        assert torch.equal(module(torch.ones(4), torch.ones(4))[1][0], torch.full((4,), 0.25))


def test_strides_count_where_an_operation_looks_past_the_shape():
    x = torch.arange(12.0).view(3, 4)
    assert torch.equal(gradient(lambda x: (x * x).sum(), x)(x.T.contiguous().T)[1][0], 2 * x)
    adjoint = gradient(lambda x: x.as_strided((2, 2), (1, 2)).sum(), x)
    with pytest.raises(ArgumentError, match=r"in the trace: \(3, 4\), torch.float32, \(4, 1\)\n  received: .*\(1, 3\)"):
        adjoint(x.T.contiguous().T)


def test_other_sizes_are_refused_under_compile():
    adjoint = gradient(lambda x: (x * x).mean(), torch.ones(4))
    compiled = torch.compile(adjoint, backend="eager")
    assert torch.equal(compiled(torch.ones(4))[1][0], torch.full((4,), 0.5))
    with pytest.raises(ArgumentError, match="has another shape or dtype than in the trace"):
        compiled(torch.ones(8))
