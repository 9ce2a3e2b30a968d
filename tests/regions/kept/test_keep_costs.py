"""What ``keep`` costs: bytes, FLOPs, how long results live, and nothing where it is not called."""
from __future__ import annotations

import functools
import gc
import sys
import weakref

import pytest
import torch
from torch import nn

import torchckpt
from tests.helpers import (
    assert_equal,
    leaf,
    plain,
)
from torchckpt import Checkpointing, checkpoint, is_recomputing, keep
from torchckpt.errors import RecomputationError
from torchckpt.testing import flops, saved_bytes


def another(x):
    return keep(torch.cos, x) if is_recomputing() else keep(torch.sin, x)


def test_bytes_and_flops():
    weight = nn.Parameter(torch.randn(8, 8))

    def block(kept, x):
        h = (x @ weight).tanh()
        return (kept(lambda h: (h @ weight).exp(), h) @ weight).sin().cos()

    x = leaf(4, 8)
    product, found = 2 * 4 * 8 * 8, {}
    for kept in (plain, keep):
        with saved_bytes() as saved, flops() as counted:
            y = checkpoint(functools.partial(block, kept), x)
        found[kept] = saved.total - x.nbytes
        with flops() as replayed:
            y.sum().backward()
        assert counted.total == 3 * product
        assert replayed.total == (9 if kept is plain else 8) * product
    assert found == {plain: 0, keep: 2 * x.nbytes}  # what is kept is h, and its own result


def test_results_die_with_the_replay_or_with_the_graph():
    results = []

    def block(x):
        def route(x):
            y = x.cos() * 2
            results.append(weakref.ref(y.untyped_storage()))
            return y, {"of": x}

        return keep(route, x.tanh())[0].sin().cos()

    def alive():
        return [reference() is not None for reference in results]

    gc.collect()
    gc.disable()
    try:
        for call in (block, lambda x: checkpoint(block, x).exp().sin()):
            results.clear()
            y = checkpoint(call, leaf(3))
            assert alive() == [True]
            del y
            assert alive() == [False]
            results.clear()
            region = Checkpointing(call, leaf(3))
            y = region.checkpoint()
            y.sum().backward(retain_graph=True)
            y.sum().backward()
            assert alive() == [False]
    finally:
        gc.enable()


def test_a_region_that_saves_nothing_and_a_replay_that_failed_hold_nothing():
    made = []

    def noted(x):
        y = x.exp()
        made.append(weakref.ref(y.untyped_storage()))
        return y

    region = Checkpointing(lambda x: keep(noted, x).sin(), torch.ones(3))
    region.checkpoint()
    assert made[0]() is None

    y = checkpoint(lambda x: another(noted(x)).sin().cos(), leaf(3))
    with pytest.raises(RecomputationError):
        y.sum().backward()
    gc.collect()
    assert made[2]() is None  # of the replay


@pytest.mark.parametrize("holder", ["attribute", "error"])
def test_what_holds_a_tensor_of_the_region_makes_no_cycle(holder):
    made = []

    def named(h):
        if holder == "error":
            raise ValueError(h)
        y = h.cos()
        y.before = h
        return y

    def block(x):
        h = x.sin().exp()
        made.append(weakref.ref(h))
        try:
            return (keep(named, h) * h).sin()
        except ValueError as error:
            return (error.args[0].detach() * h).sin()

    x = leaf(3)
    assert checkpoint(block, x) is not None
    assert made[0]() is None
    expected = torch.autograd.grad(block(x).sum(), x)
    assert_equal(torch.autograd.grad(checkpoint(block, x).sum(), x), expected)


def test_regions_that_keep_nothing_call_no_more_than_before():


    def names(call):
        seen = []

        def note(frame, event, _):
            if event == "call" and frame.f_code.co_filename.startswith(*torchckpt.__path__):
                seen.append(frame.f_code.co_filename.rpartition("/")[2])

        sys.setprofile(note)
        try:
            call()
        finally:
            sys.setprofile(None)
        return seen

    x = leaf(3)
    found = names(lambda: checkpoint(lambda x: x.sin().cos(), x).sum().backward())
    assert not {"keep.py", "kept.py", "hooks.py"} & set(found)
    assert "keep.py" in names(lambda: checkpoint(lambda x: keep(torch.sin, x).cos(), x))


def test_it_is_public():
    assert torchckpt.keep is keep
