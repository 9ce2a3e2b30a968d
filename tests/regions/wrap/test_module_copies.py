"""Copies of a checkpointed module, deep, shallow, pickled and loaded: each checkpoints, with its own weights."""
from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

from tests.helpers import in_threads, saved_and_loaded
from tests.regions.modules import Block, Model, assert_recomputes_to_equal, checkpointed, step
from torchckpt import checkpoint_module


@pytest.fixture
def model():
    return Model()


def pickled(module):
    return pickle.loads(pickle.dumps(module))


def loaded_from_state_dict(module):
    other = checkpointed(type(module).__bases__[-1]())
    other.load_state_dict(module.state_dict())
    return other


COPIES = [copy.deepcopy, pickled, saved_and_loaded, loaded_from_state_dict]


@pytest.mark.parametrize("copied", COPIES)
def test_copy_checkpoints_with_its_own_weights(copied):
    block = checkpointed(Block())
    expected, _ = step(block)
    other = copied(block)
    assert type(other) is type(block)
    assert all(torch.equal(a, b) and a is not b for a, b in zip(other.parameters(), block.parameters()))
    assert_recomputes_to_equal(other, expected)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.fill_(7)
    assert_recomputes_to_equal(other, expected)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol_of_pickle_works(protocol):
    block = checkpointed(Block())
    assert_recomputes_to_equal(pickle.loads(pickle.dumps(block, protocol)), step(block)[0])


def test_shallow_copy_checkpoints_and_shares_its_weights():
    block = checkpointed(Block())
    other = copy.copy(block)
    assert type(other) is type(block)
    assert other.linear is block.linear
    assert_recomputes_to_equal(other, step(block)[0])


def test_shallow_copy_with_other_weights_uses_them():
    linear = checkpointed(nn.Linear(4, 4))
    other = copy.copy(linear)
    other._parameters = {name: nn.Parameter(torch.zeros_like(p)) for name, p in linear.named_parameters()}
    assert not other(torch.ones(4, 4)).any()


def test_handle_undoes_the_original_and_not_its_copy():
    block = Block()
    handle = checkpoint_module(block)
    other = copy.deepcopy(block)
    handle.remove()
    assert (step(block)[1], step(other)[1]) == (0, 1)


def test_copy_of_a_model_whose_layers_are_checkpointed_is_equal(model):
    for layer in model.layers:
        checkpoint_module(layer)
    expected, _ = step(model)
    for copied in (copy.deepcopy, pickled, saved_and_loaded):
        assert_recomputes_to_equal(copied(model), expected, total=2)


def test_state_dict_of_a_plain_model_can_be_loaded_and_the_reverse(model):
    expected, _ = step(copy.deepcopy(model))
    plain, other = copy.deepcopy(model), checkpointed(Model())
    other.load_state_dict(plain.state_dict())
    assert_recomputes_to_equal(other, expected)
    fresh = Model()
    fresh.load_state_dict(copy.deepcopy(model).state_dict())
    assert_recomputes_to_equal(fresh, expected, total=0)


def test_copy_keeps_a_reference_between_its_own_parts():
    block = checkpointed(Block())
    block.twin = block.linear
    other = pickled(block)
    assert other.twin is other.linear is not block.linear


def test_module_with_arguments_for_new_is_copied_with_them():
    given = []

    class Sized(nn.Linear):
        def __new__(cls, *args):
            given.append(args)
            return super().__new__(cls)

        def __getnewargs__(self):
            return None, 4

    copy.copy(checkpointed(Sized(4, 4)))
    assert given == [(4, 4), (None, 4)]


def test_copies_of_one_module_in_a_list_are_one_module():
    block = checkpointed(Block())
    for copied in (copy.deepcopy, pickled, saved_and_loaded):
        first, second = copied([block, block])
        assert first is second
        assert step(first)[1] == 1


class Slow:
    """Takes its time to be copied: until the module was used."""

    def __init__(self):
        self.copying, self.used = threading.Event(), threading.Event()

    def __deepcopy__(self, memo):
        self.copying.set()
        assert self.used.wait(30)
        return self


def test_module_that_is_used_while_another_thread_copies_it_is_a_region_all_the_same():
    block, slow = checkpointed(Block()), Slow()
    block.slow = slow

    def use():
        assert slow.copying.wait(30)
        try:
            return step(block)[1]
        finally:
            slow.used.set()

    other, recomputes = in_threads(lambda: copy.deepcopy(block), use)
    assert recomputes == 1
    slow.used.set()
    assert step(other)[1] == 1
