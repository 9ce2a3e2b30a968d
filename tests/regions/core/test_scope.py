"""A scope gathers the outermost regions of a forward, or has regions keep what they save."""
from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch
from torch import nn

from tests.helpers import Block, assert_equal, by_hand, doing, in_thread, in_threads, leaf, plain, prefetched, run
from torchckpt import Checkpointing, checkpoint, checkpoint_module, is_checkpointing
from torchckpt.errors import ArgumentError, TransformError
from torchckpt.regions.core.scope import Scope
from torchckpt.regions.flags import local
from torchckpt.testing import count_recomputes, saved_bytes

keeping = pytest.mark.parametrize("keep", [False, True], ids=["gather", "keep"])


@pytest.fixture(autouse=True)
def none_stays():
    assert local.thread.scope is None
    yield
    assert local.thread.scope is None


def nested(x, call=checkpoint):
    return call(lambda x: call(torch.exp, call(torch.sin, x)).cos(), x)


def names(scope):
    return [frame.function.__name__ for frame in scope.frames]


def within(scope, function):
    def entered(*args, **kwargs):
        with scope.entered():
            return function(*args, **kwargs)

    return entered


# gathering ------------------------------------------------------------------------------------------------------------


def test_frames_are_gathered_in_the_order_of_their_forwards(call, device):
    scope = Scope()
    with scope.entered():
        call(torch.exp, call(torch.sin, call(torch.cos, leaf(3, device=device))))
    assert len(scope.frames) == 3
    if call is not prefetched:
        assert names(scope) == ["cos", "sin", "exp"]


def test_frames_of_modules_are_gathered():
    model = nn.Sequential(Block(), nn.Tanh(), Block())
    for block in (model[0], model[2]):
        checkpoint_module(block)
    scope = Scope()
    with scope.entered():
        model(leaf(3, 4))
    assert [frame.function.__self__ for frame in scope.frames] == [model[0], model[2]]


def test_the_replay_of_all_frames_leaves_nothing_to_the_backward(device):
    events, x = [], leaf(3, device=device)

    def layer(number):
        def function(h):
            events.append(f"{number} {doing()}")
            return h.sin().exp()

        return function

    scope = Scope()
    with scope.entered():
        loss = checkpoint(layer(2), checkpoint(layer(1), x)).sum()
    for frame in reversed(scope.frames):
        frame.recompute()
    assert [frame.is_recomputed for frame in scope.frames] == [True, True]
    events.append("backward")
    loss.backward()
    assert events == ["1 forward", "2 forward", "2 replay", "1 replay", "backward"]


def test_outermost_regions_only(device):
    scope = Scope()
    with scope.entered():
        loss = nested(leaf(3, device=device)).sum()
        assert names(scope) == ["<lambda>"]
        scope.frames[0].recompute()  # which runs the forwards of the inner ones again
        loss.backward()
    assert len(scope.frames) == 1


def test_gradients_are_those_without_a_scope(call, device):
    blocks = nn.ModuleList([Block(), Block()]).to(device)

    def function(x):
        return call(lambda x: call(blocks[1], blocks[0](x)).tanh(), x)

    x = leaf(3, 4, device=device)
    received = run(within(Scope(), function), x, modules=[blocks])
    assert_equal(received, run(lambda x: blocks[1](blocks[0](x)).tanh(), x, modules=[blocks]))


def test_two_forwards_two_scopes():
    first, second = Scope(), Scope()
    with first.entered():
        checkpoint(torch.sin, leaf(3))
    with second.entered():
        checkpoint(torch.exp, leaf(3))
    with first.entered():
        checkpoint(torch.cos, leaf(3))
    assert (names(first), names(second)) == (["sin", "cos"], ["exp"])


def test_a_scope_in_a_scope():
    outer, inner = Scope(), Scope(keep=True)
    with outer.entered():
        checkpoint(torch.sin, leaf(3))
        with inner.entered():
            checkpoint(torch.exp, leaf(3))
        checkpoint(torch.cos, leaf(3))
    assert (names(outer), names(inner)) == (["sin", "cos"], [])


def test_a_region_that_saves_nothing_has_a_frame_that_is_done():
    scope = Scope()
    with scope.entered():
        checkpoint(lambda x: x + 1, leaf(3))
    assert [frame.is_recomputed for frame in scope.frames] == [True]


def test_a_forward_that_raises_has_no_frame():
    def broken(x):
        raise ValueError("the pump is off")

    scope = Scope()
    with scope.entered():
        with pytest.raises(ValueError, match="the pump is off"):
            checkpoint(broken, leaf(3))
        checkpoint(torch.sin, leaf(3))
    assert names(scope) == ["sin"]


def test_without_its_scope_a_frame_dies_with_its_graph():
    scope = Scope()
    with scope.entered():
        y = checkpoint(torch.sin, leaf(3))
    frame = weakref.ref(scope.frames[0])
    del scope
    assert frame() is not None
    del y
    gc.collect()
    assert frame() is None


# keeping --------------------------------------------------------------------------------------------------------------


def test_regions_that_keep_are_the_plain_call(call, device):
    block, x = Block().to(device), leaf(3, 4, device=device)
    scope = Scope(keep=True)
    with count_recomputes() as recomputes:
        received = run(within(scope, lambda x: call(block, x)), x, modules=[block])
    assert_equal(received, run(block, x, modules=[block]))
    assert recomputes.total == 0
    assert scope.frames == []


def test_regions_that_keep_save_what_the_plain_call_saves(call, device):
    def saved_by(function):
        with saved_bytes() as saved:
            y = function(x)
        del y
        return saved.total

    block, x = Block().to(device), leaf(3, 4, device=device)
    plain_bytes = saved_by(lambda x: block(block(x)))
    assert saved_by(within(Scope(keep=True), lambda x: call(block, call(block, x)))) == plain_bytes
    assert saved_by(within(Scope(), lambda x: call(block, call(block, x)))) < plain_bytes


def test_a_region_that_keeps_is_no_checkpointing():
    seen = []
    with Scope(keep=True).entered():
        checkpoint(lambda x: seen.append(is_checkpointing()) or x.sin(), leaf(3))
    assert seen == [False]


def test_a_region_with_options_keeps_too():
    def contexts():
        raise AssertionError("a plain call has no contexts")

    x = leaf(3)
    with Scope(keep=True).entered():
        y = checkpoint(torch.sin, x, determinism_check="values", context_fn=contexts, early_stop=False)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], x.cos())


@keeping
def test_errors_are_those_without_a_scope(keep):
    with Scope(keep).entered():
        with pytest.raises(ArgumentError, match="determinism_check"):
            checkpoint(torch.sin, leaf(3), determinism_check="bits")
        with pytest.raises(TransformError, match="vmap"):
            torch.func.vmap(lambda x: checkpoint(torch.sin, x))(leaf(3))


# by hand --------------------------------------------------------------------------------------------------------------


def test_by_hand_and_by_the_scope_it_is_one_frame(device):
    x, scope = leaf(3, device=device), Scope()
    with scope.entered():
        region = Checkpointing(torch.sin, x)
        y = region.recompute(region.checkpoint())
    (frame,) = scope.frames
    with count_recomputes() as recomputes:
        frame.recompute()
        assert region.is_recomputed
        region.prefetch()
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], x.cos())
    assert recomputes.total == 1


def test_by_hand_what_keeps_is_there_already(device):
    x = leaf(3, device=device)
    with Scope(keep=True).entered(), count_recomputes() as recomputes:
        region = Checkpointing(torch.sin, x)
        assert not region.is_recomputed
        outputs = region.checkpoint()
        assert region.is_recomputed
        assert region.recompute(outputs) is outputs
        region.prefetch()
        assert torch.equal(torch.autograd.grad(outputs.sum(), x)[0], x.cos())
    assert recomputes.total == 0


def test_by_hand_the_scope_of_the_forward_decides():
    gathering, region = Scope(), Checkpointing(torch.sin, leaf(3))
    with gathering.entered():
        outputs = region.checkpoint()
    with Scope(keep=True).entered():
        region.recompute(outputs).sum().backward()
    assert len(gathering.frames) == 1


# where a scope begins and ends ----------------------------------------------------------------------------------------


@keeping
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_where_gradients_are_off_there_is_nothing_to_gather(keep, mode):
    scope, x = Scope(keep), leaf(3)
    with scope.entered(), mode():
        for call in (checkpoint, by_hand):
            assert not call(torch.sin, x).requires_grad
    assert scope.frames == []


@keeping
def test_it_ends_with_its_block(keep):
    scope, x = Scope(keep), leaf(3)
    with scope.entered():
        pass
    with count_recomputes() as recomputes:
        checkpoint(torch.sin, x).sum().backward()
    assert (scope.frames, recomputes.total) == ([], 1)


@keeping
def test_it_ends_with_an_exception(keep):
    outer = Scope()
    with outer.entered():
        with pytest.raises(ValueError, match="the pump is off"), Scope(keep).entered():
            raise ValueError("the pump is off")
        assert local.thread.scope is outer


def test_it_is_for_one_thread():
    scope, x = Scope(keep=True), leaf(3)
    with scope.entered(), count_recomputes() as recomputes:
        in_thread(lambda: checkpoint(torch.sin, x).sum().backward())
        assert recomputes.total == 1
        checkpoint(torch.sin, x).sum().backward()
    assert recomputes.total == 1


def test_two_threads_gather_their_own():
    def work(function):
        scope = Scope()
        with scope.entered():
            for _ in range(100):
                checkpoint(function, leaf(3))
        return names(scope)

    received = in_threads(lambda: work(torch.sin), lambda: work(torch.exp))
    assert received == [["sin"] * 100, ["exp"] * 100]


@keeping
def test_a_backward_within_replays_as_the_forward_was(keep, device):
    x, scope = leaf(3, device=device), Scope(keep)
    loss = checkpoint(lambda x: nested(x).tanh(), x).sum()
    with scope.entered():
        loss.backward()
        assert local.thread.scope is scope
    assert scope.frames == []
    assert torch.equal(x.grad, torch.autograd.grad(nested(x, plain).tanh().sum(), x)[0])


@keeping
def test_a_scope_inside_a_region(keep, device):
    x, scope = leaf(3, device=device), Scope(keep)
    loss = checkpoint(within(scope, nested), x).sum()
    loss.backward()
    assert scope.frames == []  # they are not the outermost ones
    assert torch.equal(x.grad, torch.autograd.grad(nested(x, plain).sum(), x)[0])


# some are kept --------------------------------------------------------------------------------------------------------


def numbered(keep, names="abcd"):
    """What happens in four regions, two of which hold another one, and in their backward."""
    seen = []

    def layer(name):
        def inner(h):
            seen.append(f"{doing()} {name}'")
            return h.exp()

        def function(h):
            seen.append(f"{doing()} {name}")
            return checkpoint(inner, h.sin()) if name in "bc" else h.sin()

        return function

    scope = Scope(keep)
    with scope.entered():
        y = leaf(3)
        for name in names:
            y = checkpoint(layer(name), y)
    y.sum().backward()
    return scope, seen


def test_regions_of_some_numbers_are_kept_and_those_inside_of_them_stay_regions():
    scope, seen = numbered({1, 3})
    assert seen == [
        *("forward a", "plain call b", "forward b'", "forward c", "forward c'", "plain call d"),
        *("replay c", "replay c'", "replay b'", "replay a"),
    ]
    assert scope.numbers == [0, 2]
    assert scope.regions == 4


@pytest.mark.parametrize("keep", [frozenset(), False])
def test_no_number_keeps_nothing(keep):
    scope, _ = numbered(keep)
    assert scope.numbers == [0, 1, 2, 3]


@pytest.mark.parametrize("keep", [range(4), True])
def test_all_numbers_keep_all(keep):
    scope, seen = numbered(keep)
    assert (scope.frames, scope.regions) == ([], 4)
    words = {word for event in seen for word in [event.rpartition(" ")[0]]}
    assert words == ({"plain call"} if keep is True else {"plain call", "forward", "replay"})


def test_a_region_that_raises_is_no_longer_entered():
    def fails(x):
        raise ValueError("no more")

    scope = Scope({0})
    with scope.entered():
        with pytest.raises(ValueError, match="no more"):
            checkpoint(fails, leaf(3))
        checkpoint(torch.sin, leaf(3))
    assert scope.numbers == [1]


def test_replays_are_told_by_number():
    told = []

    @contextlib.contextmanager
    def around(number, frame):
        told.append((number, bool(frame.recomputed)))
        yield
        told.append((number, bool(frame.recomputed)))

    scope = Scope({1}, around)
    with scope.entered():
        y = checkpoint(torch.exp, checkpoint(torch.sin, checkpoint(torch.cos, leaf(3))))
    y.sum().backward()
    assert told == [(2, False), (2, True), (0, False), (0, True)]
