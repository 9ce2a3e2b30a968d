"""The helpers of torchckpt.testing count what there is, and find what differs."""
from __future__ import annotations

import threading
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn

from tests.helpers import in_thread
from torchckpt import ArgumentError, Checkpointing, checkpoint, checkpoint_module, is_checkpointing, is_recomputing
from torchckpt.testing import assert_transparent, count_recomputes, flops, saved_bytes


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def block(x):
    return x.sin().exp().sin()


# count_recomputes -----------------------------------------------------------------------------------------------------


def test_recomputes_are_counted_by_region():
    linear = nn.Linear(4, 4)
    checkpoint_module(linear)
    with count_recomputes() as recomputes:
        for _ in range(3):
            checkpoint(block, linear(leaf(2, 4))).sum().backward()
        checkpoint(torch.sin, leaf(2)).sum().backward()
    assert recomputes.total == 7
    assert recomputes.by_region == {"'block'": 3, "'Linear.forward'": 3, name_of_sin(): 1}


def name_of_sin():
    return f"'{torch.sin.__qualname__}'"


def test_forwards_and_replays_outside_the_block_are_not_counted():
    loss, other = checkpoint(block, leaf(2)).sum(), checkpoint(block, leaf(2)).sum()
    with count_recomputes() as recomputes:
        checkpoint(block, leaf(2))
        assert recomputes.total == 0
        loss.backward()
        assert recomputes.total == 1
    other.backward()
    assert recomputes.total == 1


def test_replay_that_is_prefetched_counts_once():
    with count_recomputes() as recomputes:
        region = Checkpointing(block, leaf(2))
        loss = region.recompute(region.checkpoint()).sum()
        region.prefetch()
        region.prefetch()
        loss.backward()
    assert recomputes.by_region == {"'block'": 1}


def test_replay_that_fails_does_not_count():
    def failing(x):
        y = x.sin()
        if is_recomputing():
            raise ValueError("the pump is off")
        return y.exp()

    with count_recomputes() as recomputes, pytest.raises(ValueError, match="the pump is off"):
        checkpoint(failing, leaf(2)).sum().backward()
    assert recomputes.total == 0


def test_counters_may_overlap():
    with count_recomputes() as outer:
        checkpoint(block, leaf(2)).sum().backward()
        with count_recomputes() as inner:
            checkpoint(block, leaf(2)).sum().backward()
    assert (outer.total, inner.total) == (2, 1)


def test_replays_in_other_threads_are_counted():
    loss = checkpoint(block, leaf(2)).sum()
    with count_recomputes() as recomputes:
        in_thread(loss.backward)
    assert recomputes.total == 1


def test_counter_ends_when_its_block_raises():
    with pytest.raises(ValueError, match="the pump is off"), count_recomputes() as recomputes:
        raise ValueError("the pump is off")
    checkpoint(block, leaf(2)).sum().backward()
    assert recomputes.total == 0


# flops ----------------------------------------------------------------------------------------------------------------


def test_flops_of_a_forward_a_backward_and_a_replay():
    linear, x = nn.Linear(16, 32, bias=False), leaf(8, 16)
    product = 2 * 8 * 16 * 32
    with flops() as counted:
        loss = checkpoint(lambda x: linear(x).sin().exp(), x).sum()
        assert counted.total == product
        loss.backward()
    assert counted.total == product + product + 2 * product


def test_flops_of_nothing_are_zero():
    with flops() as counted:
        leaf(4)
    assert counted.total == 0


# assert_transparent ---------------------------------------------------------------------------------------------------


class WithBuffer(nn.Module):
    def __init__(self, step):
        super().__init__()
        self.register_buffer("counter", torch.zeros(()))
        self.linear, self.step = nn.Linear(4, 4), step

    def forward(self, x):
        if not (is_recomputing() and self.step == "guarded"):
            self.counter += 1
        return self.linear(x).sin()

    def method(self, x):
        return self(x)


def test_transparent_function_passes_and_nothing_is_touched():
    x, module = leaf(3, 4), WithBuffer("guarded")
    assert_transparent(module, x)
    assert x.grad is None
    assert all(parameter.grad is None for parameter in module.parameters())
    assert module.counter == 1


def test_generators_are_afterwards_as_after_one_call():
    x = leaf(3, 4)
    torch.manual_seed(3)
    nn.functional.dropout(x)
    expected = torch.get_rng_state()
    torch.manual_seed(3)
    assert_transparent(nn.functional.dropout, x)
    assert torch.equal(torch.get_rng_state(), expected)


def test_arguments_by_keyword_and_in_containers_are_passed():
    def function(pair, *, scale):
        return {"sum": pair[0] + pair[1] * scale, "count": 2}

    assert_transparent(function, (leaf(3), leaf(3)), scale=2.0)


def test_function_without_gradients_passes():
    assert_transparent(torch.sin, torch.randn(3))


def test_output_that_is_a_leaf_passes():
    x = leaf(3)
    assert_transparent(lambda x: (x, x.sin()), x)


def test_complex_and_integer_outputs_pass():
    assert_transparent(lambda x: (torch.complex(x, x).sin(), x.argsort()), leaf(3))


def test_nan_is_equal_to_nan():
    assert_transparent(lambda x: (x * float("nan")).sin(), leaf(3))


def broken_in_three_places(x):
    return [x.sin() * (2 if is_checkpointing() else 1), x.cos(), x.detach() + is_checkpointing()]


def test_differences_are_all_listed_under_the_name_of_the_function():
    with pytest.raises(AssertionError) as caught:
        assert_transparent(broken_in_three_places, leaf(3))
    assert str(caught.value) == (
        "checkpoint('broken_in_three_places') is not the plain call; "
        "different: output 0, output 2, gradient 0, of shape (3,)"
    )


def test_gradient_of_a_tensor_closed_over_is_compared():
    weight = leaf(3)
    with pytest.raises(AssertionError, match=r"different: gradient 0, of shape \(3,\)$"):
        assert_transparent(lambda x: (weight * (2 if is_recomputing() else 1)).sin() + x, torch.randn(3))


def test_gradient_that_is_missing_is_a_difference():
    weight = leaf(3)

    def function(x):
        return x.sin() + (weight.detach() if is_checkpointing() else weight)

    with pytest.raises(AssertionError, match="different: gradient"):
        assert_transparent(function, leaf(3))


@pytest.mark.parametrize(
    "broken",
    [
        lambda x: x.double() if is_checkpointing() else x,
        lambda x: x[:2] if is_checkpointing() else x,
        lambda x: x * (0.0 if is_checkpointing() else float("nan")),
        lambda x: x.abs() * (torch.finfo(x.dtype).max if is_checkpointing() else float("inf")),
        lambda x: x.detach() if is_checkpointing() else x * 1,
    ],
    ids=["dtype", "shape", "zero for nan", "largest for infinity", "requires_grad"],
)
def test_output_of_another_kind_is_a_difference(broken):
    with pytest.raises(AssertionError, match="is not the plain call; different: "):
        assert_transparent(broken, torch.ones(3, requires_grad=True))


def test_buffers_of_the_module_of_a_method_and_of_named_modules_are_watched():
    module, x = WithBuffer("unguarded"), leaf(3, 4)
    with pytest.raises(AssertionError, match=r"different: buffer WithBuffer\.counter$"):
        assert_transparent(lambda x: module(x), x, modules=[module])
    for function in module, module.method:  # which a region restores
        assert_transparent(function, x)
        before = module.counter.clone()
        assert_transparent(function, x)
        assert module.counter == before + 1


def test_buffers_of_two_modules_of_one_class_are_watched_apart():
    first, second = WithBuffer("unguarded"), WithBuffer("guarded")
    for modules in ([first, second], [second, first]):
        with pytest.raises(AssertionError, match="counter"):
            assert_transparent(lambda x: first(second(x)), leaf(3, 4), modules=modules)


def test_the_graph_of_an_input_stays():
    ran, x = [], leaf(3, 4)
    given = x.exp()
    given.grad_fn.register_hook(lambda *_: ran.append("backward"))
    assert_transparent(nn.Linear(4, 4), given)
    assert not ran
    assert_transparent(lambda x: x, given)
    assert_transparent(lambda values, more: values["x"] * more, {"x": given}, more=given)
    given.sum().backward()
    assert ran == ["backward"]
    with pytest.raises(AssertionError, match=r"different: gradient 0, of shape \(3, 4\)$"):
        assert_transparent(WrongGradient.apply, x.exp())


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x * (2 if is_recomputing() else 1))
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]


@pytest.mark.parametrize("is_given", [True, False])
def test_the_graph_of_a_tensor_that_is_closed_over_stays(is_given):
    x = leaf(3, 4)
    before = x.exp()
    given = before.exp() if is_given else leaf(3, 4)
    assert_transparent(lambda given: given * before, given)
    (before.sum() + given.sum()).backward()
    assert x.grad is not None


def test_the_graph_of_an_input_whose_leaf_is_used_too_stays():
    x = leaf(3, 4)
    given = x.exp()
    for function in (lambda given: given * x, lambda given: given.exp() * given):
        assert_transparent(function, given)
    assert_transparent(torch.mul, given, given.exp())
    given.sum().backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_code_keeps_no_graph_for_an_input_that_is_no_leaf():
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))  # torch refuses to retain a graph of this
    given = leaf(3, 4).exp()
    assert_transparent(torch.compile(model, backend="aot_eager"), given)
    given.sum().backward()


LAYOUTS = ["to_sparse", "to_sparse_csr", "to_sparse_csc", "to_sparse_bsr", "to_sparse_bsc"]


def test_sparse_gradients_are_compared():
    assert_transparent(nn.Embedding(10, 4, sparse=True), torch.tensor([1, 2, 1]))
    embedding = nn.Embedding(10, 4, sparse=True)
    with pytest.raises(AssertionError, match=r"different: gradient 0, of shape \(10, 4\)$"):
        assert_transparent(lambda i: embedding(i + 1 if is_recomputing() else i), torch.tensor([1, 2]))


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_sparse_outputs_are_compared(layout, requires_grad):
    def sparse(x):
        return getattr(x, layout)(*[(2, 2)] * ("_bs" in layout))

    x = torch.eye(4, requires_grad=requires_grad and "_bs" not in layout)  # autograd has no formula for blocks
    assert_transparent(sparse, x)
    with pytest.raises(AssertionError, match="different: output 0"):
        assert_transparent(lambda x: sparse(x * 2 if is_checkpointing() else x), x)


def test_error_of_the_function_passes_through():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        assert_transparent(nn.Linear(3, 3), leaf(2, 4))


# messages -------------------------------------------------------------------------------------------------------------


def test_what_was_counted_can_be_printed():
    with count_recomputes() as recomputes:
        checkpoint(block, leaf(2)).sum().backward()
    assert repr(recomputes) == """<Recomputes: 1, {"'block'": 1}>"""
    with flops() as counted:
        leaf(2, 3) @ leaf(3, 4)
    assert repr(counted) == f"<Flops: {counted.total}>"
    with saved_bytes() as saved:
        kept = leaf(2).sin()
    assert repr(saved) == f"<SavedBytes: {saved.total}>" == "<SavedBytes: 8>"
    del kept


@pytest.mark.parametrize(
    ("function", "modules", "text"),
    [
        (torch.ones(2), (), "the function is not callable\n  received: Tensor"),
        (block, nn.Linear(2, 2), "modules is not a list of modules\n  received: Linear"),
        (block, [nn.Linear], "modules is not a list of modules\n  received: a list that holds the class Linear"),
    ],
)
def test_what_cannot_be_checked(function, modules, text):
    with pytest.raises(ArgumentError) as caught:
        assert_transparent(function, leaf(2), modules=modules)
    works = "\n  works:    assert_transparent(block, x, modules=[block])"
    assert str(caught.value) == f"assert_transparent(): {text}{works}"


def test_modules_may_be_any_iterable():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    for modules in (model, model.modules(), iter([model]), {model}):
        assert_transparent(lambda x: model(x), leaf(4, 2), modules=modules)


def drawn(x, generator):
    return (x * torch.bernoulli(torch.full(x.shape, 0.5), generator=generator)).sin()


class Drawing(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x):
        return drawn(x, self.generator)


@pytest.mark.parametrize("form", ["argument", "keyword", "partial", "module", "inner module", "method"])
def test_generators_of_the_call_start_where_they_were(form):
    own, x, module = torch.Generator().manual_seed(0), leaf(4, 8), Drawing()
    own = own if form in ("argument", "keyword", "partial") else module.generator
    calls = {
        "argument": lambda: assert_transparent(drawn, x, own),
        "keyword": lambda: assert_transparent(drawn, x, generator=own),
        "partial": lambda: assert_transparent(partial(drawn, generator=own), x),
        "module": lambda: assert_transparent(module, x),
        "inner module": lambda: assert_transparent(nn.Sequential(module), x),
        "method": lambda: assert_transparent(module.forward, x),
    }
    calls[form]()
    after_one = torch.Generator().manual_seed(0)
    drawn(x, after_one)
    assert torch.equal(own.get_state(), after_one.get_state())


def test_jagged_outputs_are_compared():
    rows = [0]

    def ragged(x, broken=0):
        rows[0] += broken
        return torch.nested.as_nested_tensor([x[:1] * x[:1], x[1:3] * (2 + rows[0])], layout=torch.jagged)

    assert_transparent(ragged, leaf(3, 4))
    with pytest.raises(AssertionError, match="different: output 0"):
        assert_transparent(ragged, leaf(3, 4), broken=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64], ids=str)
def test_zeros_of_two_signs_are_different(dtype):
    signs = iter([1.0, -1.0, 1.0, 1.0])

    def zeros(x):
        return (x.detach() * 0.0).abs().mul(next(signs)).to(dtype)

    with pytest.raises(AssertionError, match="different: output 0"):
        assert_transparent(zeros, leaf(3))
    assert_transparent(zeros, leaf(3))


def test_nothing_to_compare_is_an_error():
    with pytest.raises(ArgumentError) as caught:
        assert_transparent(lambda x: 3, leaf(2))
    assert str(caught.value) == (
        "assert_transparent(): the function returns no tensor, so nothing is compared\n"
        "  received: int\n"
        "  works:    assert_transparent(block, x), whose block returns tensors"
    )


def test_parameters_do_not_count_in_a_backward_that_makes_a_graph():
    layers = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 64, bias=False))
    x = leaf(1, 64)
    with saved_bytes() as saved:
        (gradient,) = torch.autograd.grad(layers(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()
    assert saved.total < 64 * 64 * 4


def test_replays_of_two_threads_are_both_counted():
    class Slow(Counter):
        """Where the other thread comes in between."""

        def __missing__(self, region):
            other.start()
            other.join(0.3)
            return 0

    with count_recomputes() as recomputes:
        other = threading.Thread(target=recomputes._seen, args=("block",))
        recomputes.by_region = Slow()
        recomputes._seen("block")
        other.join(30)
    assert recomputes.total == 2
