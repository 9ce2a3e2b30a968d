"""Tensors in structures, and the autograd nodes behind them."""
from __future__ import annotations

import torch

from torchckpt.tensors import gradient_bytes, node_name, nodes_behind, tensors_in


def test_tensors_come_in_the_order_of_leaves_and_as_often_as_they_stand_there():
    a, b = torch.ones(1), torch.ones(2)
    tensors = tensors_in(({"x": a, "n": 3}, [b, None, "text"], a))
    assert [id(tensor) for tensor in tensors] == [id(a), id(b), id(a)]


def test_a_tensor_is_a_structure_and_so_is_nothing():
    a = torch.ones(1)
    assert tensors_in(a) == [a]
    assert tensors_in(None) == []


def test_nodes_come_from_the_outputs_on_and_each_once():
    x = torch.ones(2, requires_grad=True)
    y = x.sin()
    names = [type(node).__name__ for node in nodes_behind([y.exp(), y.cos(), x])]
    assert names == ["CosBackward0", "SinBackward0", "AccumulateGrad", "ExpBackward0"]


def test_gradients_of_a_parameter_that_stages_share_count_once():
    own, shared, frozen = (torch.ones(size, requires_grad=size < 3) for size in (1, 2, 3))
    (own.sum() + shared.sum()).backward()
    assert gradient_bytes({1: [shared], 0: [own, shared, frozen], 2: []}) == {1: 8, 0: 4, 2: 0}


class Named(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.name = "mine"
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_a_function_of_the_users_may_keep_something_under_the_name_of_a_method_of_nodes():
    y = Named.apply(torch.ones(2, requires_grad=True))
    assert [node_name(node) for node in nodes_behind([y])] == ["NamedBackward", "torch::autograd::AccumulateGrad"]
