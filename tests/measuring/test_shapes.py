"""Calls that save other bytes have other shapes: names and places of tensors are part of them."""
from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch.utils import _pytree as pytree

from torchckpt.measuring.remembered import shapes_of

X = torch.ones(2, 3)


class Pair(NamedTuple):
    left: object
    right: object


class Box:
    """A container of a user's, that does not tell the places of what it holds."""

    def __init__(self, held):
        self.held = held


pytree.register_pytree_node(Box, lambda box: ([box.held], None), lambda held, _: Box(*held))


def call(*args, **kwargs):
    return args, kwargs


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (call(X, bias=X), call(X, memory=X)),
        (call(X, bias=X), call(X, X)),
        (call(X, None, X), call(X, X, None)),
        (call({"labels": X}), call({"mask": X})),
        (call(X, more=[X, None]), call(X, more=[None, X])),
        (call(pair=Pair(X, None)), call(pair=Pair(None, X))),
        (call(X, cached=True), call(X, causal=True)),
        (call(Box(X), X), call(Box(None), X)),
    ],
)
def test_places_are_part_of_a_shape(one, other):
    assert shapes_of(*one[0], **one[1]) != shapes_of(*other[0], **other[1])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (call(X), call(X, None)),
        (call(X, X), call(X, X, 0.5, by="name")),
        (call(X, mask=X), call(X, mask=X, scale=2)),
        (call(X, mask=X, bias=None), call(X, mask=X)),
        (call([X, X]), call([X, X], None)),
    ],
)
def test_what_is_no_tensor_and_no_flag_is_no_part(one, other):
    assert shapes_of(*one[0], **one[1]) == shapes_of(*other[0], **other[1])
