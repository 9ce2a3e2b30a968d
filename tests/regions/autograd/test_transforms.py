"""Transforms of functions: a region cannot be entered inside one, and says so."""
from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

from tests.helpers import assert_transparent, by_hand, leaf
from torchckpt import Checkpointing, checkpoint
from torchckpt.errors import TransformError


def under_dual_level(function, x):
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(x, torch.ones_like(x)))


def under_an_unused_dual_level(function, x):
    with forward_ad.dual_level():
        return function(x)


TRANSFORMS = {
    "vmap": lambda f, x: torch.vmap(f)(x),
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "grad_and_value": lambda f, x: torch.func.grad_and_value(lambda x: f(x).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).sum())(x),
    "linearize": lambda f, x: torch.func.linearize(f, x),
    "dual_level": under_dual_level,
    "dual_level, unused": under_an_unused_dual_level,
}


@pytest.mark.parametrize("call", [checkpoint, by_hand], ids=["checkpoint", "by_hand"])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transform_around_the_call(call, device, transform):
    with pytest.raises(TransformError, match=r"cannot be entered under vmap, jvp, torch\.func\.grad or"):
        transform(lambda x: call(torch.exp, x), leaf(3, device=device))


def test_text_of_the_error():
    with pytest.raises(TransformError) as caught:
        torch.vmap(lambda x: checkpoint(torch.exp, x))(leaf(3))
    assert str(caught.value) == (
        "a region cannot be entered under vmap, jvp, torch.func.grad or forward-mode AD\n"
        "  received: a call inside such a transform\n"
        "  works:    block(x) itself inside the transform; or torch.autograd.grad, double backward included, "
        "through checkpoint(block, x)"
    )


def test_vmap_inside_the_function(call, device):
    def function(x):
        return torch.vmap(torch.sin)(x.exp()).cos()

    assert_transparent(call, function, leaf(3, device=device))


def test_func_grad_inside_the_function_is_the_error_of_torch(device):
    # torch's own restriction on saved-tensor hooks: torch.utils.checkpoint has it too
    def function(x):
        return torch.func.grad(lambda x: x.exp().sum())(x)

    with pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"):
        checkpoint(function, leaf(3, device=device))


def test_transform_after_the_region_was_left():
    x = leaf(3)
    output = checkpoint(torch.exp, x)
    assert torch.equal(torch.vmap(torch.neg)(x.detach()), -x.detach())
    output.sum().backward()
    assert torch.equal(x.grad, x.detach().exp())


def test_transform_where_gradients_are_off(device):
    x = leaf(3, device=device)
    with torch.no_grad():
        assert torch.equal(torch.vmap(lambda x: checkpoint(torch.exp, x))(x), x.exp())


def test_region_after_a_refused_one():
    region, x = Checkpointing(torch.exp, leaf(3)), leaf(3)
    with pytest.raises(TransformError):
        torch.vmap(lambda _: region.checkpoint())(x)
    checkpoint(torch.exp, x).sum().backward()
    assert torch.equal(x.grad, x.detach().exp())


def dropped(x):
    return x.sin() + torch.nn.functional.dropout(x.exp(), 0.5).tanh()


def in_a_region(function, x):
    return checkpoint(lambda y: checkpoint(function, y).sin(), x)


def in_no_region(function, x):
    return function(x).sin()


@pytest.mark.parametrize("randomness", ["error", "same", "different"])
@pytest.mark.parametrize(
    ("call", "plain"), [(checkpoint, lambda f, x: f(x)), (by_hand, lambda f, x: f(x)), (in_a_region, in_no_region)]
)
def test_a_replay_is_outside_of_the_transform_that_its_backward_is_in(call, plain, device, randomness):
    """So it draws the numbers of the forward once, however many gradients arrive at once."""
    x = leaf(3, 4, device=device)
    found = []
    for run in (plain, call):
        torch.manual_seed(0)
        y = run(dropped, x)
        basis = torch.eye(12, device=device).view(12, 3, 4)
        found.append(torch.vmap(lambda v, y=y: torch.autograd.grad(y, x, v)[0], randomness=randomness)(basis))
    assert torch.equal(*found)
