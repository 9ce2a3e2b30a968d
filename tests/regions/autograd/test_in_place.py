"""Changes in place: where eager PyTorch would raise, a region gives the right gradient or raises; never a wrong one."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.helpers import plain
from torchckpt import Checkpointing, checkpoint

IN_PLACE = "modified by an inplace operation"


def shift(x):
    return x.add_(1)


def shift_a_view(x):
    return x[0].zero_()


def shift_without_grad(x):
    with torch.no_grad():
        return x.mul_(2)


CHANGES = [shift, shift_a_view, shift_without_grad]


@pytest.mark.parametrize("change", CHANGES)
def test_input_changed_after_the_forward_is_an_error_in_eager(change, device):
    x = torch.ones(4, device=device, requires_grad=True) * 1
    loss = plain(lambda x: x * x, x).sum()
    change(x)
    with pytest.raises(RuntimeError, match=IN_PLACE):
        loss.backward()


@pytest.mark.parametrize("change", CHANGES)
def test_input_changed_after_the_forward_is_an_error_as_in_eager(change, device, call):
    x = torch.ones(4, device=device, requires_grad=True) * 1
    loss = call(lambda x: x * x, x).sum()
    change(x)
    with pytest.raises(RuntimeError, match=IN_PLACE):
        loss.backward()


def test_error_of_a_changed_input_shows_its_shape_versions_and_the_fix():
    x = torch.ones(2, 3)
    weight = nn.Parameter(torch.ones(3))
    loss = checkpoint(lambda x: x * weight, x).sum()
    x.add_(1)
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    assert str(caught.value) == (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        "an input of a checkpointed region, [torch.FloatTensor [2, 3]], is at version 1; expected version 0 instead. "
        "The replay would start from the changed tensor.\n"
        "  works:    the operation out of place, such as x = x + 1 instead of x.add_(1)"
    )


def test_input_without_grad_changed_after_the_forward_is_an_error(device):
    weight, x = torch.ones(4, device=device, requires_grad=True), torch.ones(4, device=device)
    loss = checkpoint(lambda x: x * weight, x).sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match=IN_PLACE):
        loss.backward()


def test_input_in_a_container_and_by_keyword_changed_after_the_forward_is_an_error(device):
    weight = torch.ones(4, device=device, requires_grad=True)

    def product(a, b, *, c):
        return a["a"] * b[0] * c * weight

    for place in (0, 1, 2):
        inputs = [torch.ones(4, device=device) for _ in range(3)]
        loss = checkpoint(product, {"a": inputs[0]}, [inputs[1]], c=inputs[2]).sum()
        inputs[place].add_(1)
        with pytest.raises(RuntimeError, match=IN_PLACE):
            loss.backward()


@pytest.mark.parametrize("change", CHANGES)
def test_input_changed_inside_the_function_is_an_error(change, device):
    def block(x):
        change(x)
        return x * x

    loss = checkpoint(block, torch.ones(4, device=device, requires_grad=True) * 1).sum()
    with pytest.raises(RuntimeError, match=IN_PLACE):
        loss.backward()


def test_input_changed_between_two_backwards_is_an_error_as_in_eager(device):
    for how in (plain, checkpoint):
        x = torch.ones(4, device=device, requires_grad=True) * 1
        loss = how(lambda x: x.sin(), x).sum()
        loss.backward(retain_graph=True)
        x.add_(1)
        with pytest.raises(RuntimeError, match=IN_PLACE):
            loss.backward()


def test_output_changed_by_the_caller_has_the_right_gradient_or_none(device):
    x = torch.ones(4, device=device, requires_grad=True)
    y = checkpoint(torch.exp, x)
    y.mul_(2)  # eager saves this output, and raises; a replay makes it again
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, 2 * torch.ones(4, device=device).exp())


def scaled_exp(x):
    h = x.exp()  # saves its result
    h.mul_(2)
    return h.sin()


def scaled_sigmoid(x):
    h = x.sigmoid()
    h.add_(1)
    return h * h


def zeroed_view(x):
    h = x.exp()
    h[0].zero_()
    return h.cos()


def used_before(x):
    h = x * 1
    y = h.sin()  # saves h
    h.mul_(3)
    return y.exp() + h


def inner_boundary(x):
    h = x.exp()
    y = checkpoint(torch.sin, h)
    h.mul_(2)
    return y + h.sin()


def rectified(x):
    h = x.exp()
    h = nn.functional.relu(h - 1.5, inplace=True) * h
    return h.add_(1).tanh()


FUNCTIONS = [scaled_exp, scaled_sigmoid, zeroed_view, used_before, inner_boundary, rectified]


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_intermediate_changed_after_it_was_saved_gives_the_right_gradient_or_an_error(function, early_stop, device):
    x = torch.linspace(0, 1, 4, dtype=torch.float64, device=device, requires_grad=True)
    loss = checkpoint(function, x, early_stop=early_stop).sum()
    message = None
    try:
        (gradient,) = torch.autograd.grad(loss, x)
    except RuntimeError as error:
        message = str(error)
    if message is None:
        assert torch.allclose(gradient, by_differences(function, x), atol=1e-5)
    else:
        assert IN_PLACE in message


@torch.no_grad()
def by_differences(function, x):
    """The gradient of ``function(x).sum()``."""
    steps = torch.eye(len(x), dtype=x.dtype, device=x.device) * 1e-6
    return torch.stack([(function(x + step).sum() - function(x - step).sum()) / 2e-6 for step in steps])


def test_tensor_closed_over_and_changed_after_the_forward_is_an_error_as_in_eager(device, call):
    h, x = torch.ones(4, device=device), torch.ones(4, device=device, requires_grad=True)
    loss = call(lambda x: x * h, x).sum()
    h.mul_(2)
    with pytest.raises(RuntimeError, match=IN_PLACE):
        loss.backward()


def doubled(x):
    return x.mul_(2)


def doubled_and_more(x):
    return x.mul_(2).sin()


def passed_on(x):
    return x


def read(x, y):
    return x.cos()


def read_both(x, y):
    return x.cos() + y.sum()


def change_the_output(x, y):
    y.mul_(3)
    return x.sin()


@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize("reads", [read, read_both, change_the_output])
@pytest.mark.parametrize("function", [doubled, doubled_and_more, passed_on, shift_a_view, shift_without_grad])
def test_input_that_is_read_behind_a_function_that_changes_it(function, reads, is_view, device):
    """By hand, the function changed an alias: the input had the new values, and a gradient of the old ones."""

    def gradient(call):
        leaf = torch.linspace(-1, 1, 6, device=device).view(2, 3).requires_grad_()
        whole = leaf * 1.5
        x = whole[1:] if is_view else whole
        y = call(function, x)
        (reads(x, y).sum() + whole.exp().sum()).backward()
        return leaf.grad, whole, x._version

    expected = gradient(plain)
    for call in (checkpoint, forwarded):
        if function is doubled_and_more and reads is read_both:  # a replay would start from the new values
            with pytest.raises(RuntimeError, match=IN_PLACE):
                gradient(call)
        else:
            received = gradient(call)
            assert torch.equal(received[0], expected[0])
            assert torch.equal(received[1], expected[1])
            assert received[2] == expected[2]


def forwarded(function, *args):
    return Checkpointing(function, *args).checkpoint()


def test_input_that_the_function_detaches(device):
    for call in (plain, checkpoint, forwarded):
        leaf = torch.ones(3, device=device, requires_grad=True)
        x = leaf * 2
        y = call(lambda x: x.detach_().sin(), x)
        (leaf + x.cos() + y).sum().backward()
        assert not x.requires_grad
        assert torch.equal(leaf.grad, torch.ones_like(leaf))


def test_output_that_is_returned_twice_is_one_tensor(device, call):
    """By hand, each place had a tensor of its own in the same memory: the other one had the new values, and the old
    graph."""
    leaf = torch.ones(3, device=device, requires_grad=True)
    first, second = call(lambda x: (x.sin(),) * 2, leaf * 2)
    first.mul_(3)
    second.sum().backward()
    assert torch.equal(leaf.grad, 6 * torch.cos(2 * torch.ones_like(leaf)))


def change_one(x, y):
    x.mul_(2)
    return y * 3


def change_both(x, y):
    return x.mul_(2).sum() + y.mul_(3).sum()


def change_beside_a_list(x, views):
    return change_one(x, views[0])


@pytest.mark.parametrize("function", [change_one, change_both, change_beside_a_list])
@pytest.mark.parametrize("inputs", [
    lambda whole: (whole[0], whole), lambda whole: (whole, whole[0]), lambda whole: (whole[0], whole[:, 1]),
])
def test_inputs_that_share_memory(function, inputs, device):
    """By hand, each had an alias with a graph of its own: the other had the new values, and the old graph."""

    def gradient(call):
        leaf = torch.linspace(-1, 1, 6, device=device).view(2, 3).requires_grad_()
        whole = leaf * 1.5
        x, y = inputs(whole)
        result = call(function, x, [y] if function is change_beside_a_list else y)
        (result.sum() + x.cos().sum() + whole.exp().sum()).backward()
        return leaf.grad

    for call in (checkpoint, forwarded):
        assert torch.equal(gradient(call), gradient(plain))


def test_input_that_the_function_transposes(call, device):
    leaf = torch.arange(4.0, device=device).view(2, 2).requires_grad_()
    x = leaf * 2
    y = call(lambda x: x.t_() + 1, x)
    (y.sum() + (x * torch.arange(4.0, device=device).view(2, 2)).sum()).backward()
    assert torch.equal(x, leaf.t() * 2)
    assert leaf.grad.tolist() == [[2, 6], [4, 8]]


def test_container_that_the_function_returns(device):
    kept = {}
    x = torch.ones(3, device=device, requires_grad=True) * 2
    assert forwarded(lambda x, kept: kept, x, kept) is kept
