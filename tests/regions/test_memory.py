"""Memory: what stays alive, and until when, without the help of the garbage collector."""
from __future__ import annotations

import gc
import weakref
from collections import Counter
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import Probe, plain
from torchckpt import Checkpointing, checkpoint, checkpoint_module, is_recomputing
from torchckpt.testing import saved_bytes

A = 1024 * 4  # bytes of one activation


def storages_of(tree):
    return [leaf.untyped_storage() for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


class LiveStorages(TorchDispatchMode):
    """The storages that operators return while this is active, as long as anything keeps them."""

    def __init__(self, only=lambda: True) -> None:
        super().__init__()
        self._only, self._bytes = only, {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        known = {StorageWeakRef(storage) for storage in storages_of((args, kwargs))}
        for storage in storages_of(outputs):
            if (reference := StorageWeakRef(storage)) not in known and self._only():
                self._bytes[reference] = storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return outputs

    @property
    def live_bytes(self) -> int:
        return sum(size for reference, size in self._bytes.items() if not reference.expired())


@pytest.fixture
def no_gc():
    """The garbage collector is off, has nothing to collect, and looks at nothing older than the test."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()


def ours(objects):
    """Tensors and objects of regions among ``objects``, by their kind."""
    kinds = list(map(type, objects))
    ours = [kind for kind in kinds if issubclass(kind, Tensor) or str(kind.__module__).startswith("torchckpt.regions")]
    return Counter(kind.__qualname__ for kind in ours)


def kernel_objects():
    """Those that this test has made and that are alive, but the state of a thread, such as autograd's of a device."""
    kinds = ours(gc.get_objects())
    return {kind: number for kind, number in kinds.items() if kind not in ("Tensor", "Parameter", "_Thread")}


def cycles():
    """What only the garbage collector frees. (Of torch's own pytrees some functions are left, that hold nothing.)"""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return ours(gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def region_of(x, function=None, **options):
    """A region with dropout, over a closure that can be watched; its output, and a weak reference to the function."""

    def block(x):
        return nn.functional.dropout(x.sin(), 0.5).exp().sin()

    function = function or block
    return checkpoint(function, x, **options), weakref.ref(function)


# a forward without a backward -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_gc")
def test_output_that_dies_frees_input_function_frame_and_snapshot_at_once(device):
    x = torch.ones(4, device=device, requires_grad=True) * 1
    y, function = region_of(x)
    x = weakref.ref(x.untyped_storage())
    assert kernel_objects()
    assert None not in (x(), function())
    del y
    assert x() is function() is None
    assert not kernel_objects()


@pytest.mark.usefixtures("no_gc")
def test_output_of_nested_regions_that_dies_frees_them_at_once(device):
    x = torch.ones(4, device=device, requires_grad=True) * 1
    y, function = region_of(x, lambda x: checkpoint(torch.sin, x.exp()).sin())
    x = weakref.ref(x.untyped_storage())
    del y
    assert x() is function() is None
    assert not kernel_objects()


@pytest.mark.usefixtures("no_gc")
def test_forward_that_raises_frees_everything_with_its_exception():

    def failing(x):
        x.sin()
        raise ValueError("the pump is off")

    x = torch.ones(4, requires_grad=True) * 1
    with suppress(ValueError):
        checkpoint(failing, x)
    reference = weakref.ref(x.untyped_storage())
    del x
    assert reference() is None
    assert not kernel_objects()


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("how", ["unused", "prefetched"])
def test_region_by_hand_frees_everything_when_it_dies(how, device):
    x = torch.ones(4, device=device, requires_grad=True) * 1
    region = Checkpointing(lambda x: x.sin().exp(), x)
    y = region.recompute(region.checkpoint())
    if how == "prefetched":
        region.prefetch()
    x = weakref.ref(x.untyped_storage())
    del y, region
    assert x() is None
    assert not kernel_objects()


@pytest.mark.usefixtures("no_gc")
def test_region_in_which_nothing_requires_grad_keeps_nothing():
    y, function = region_of(torch.ones(4))
    assert function() is None
    assert not kernel_objects()
    assert not y.requires_grad


@pytest.mark.usefixtures("no_gc")
def test_class_of_a_checkpointed_module_dies_with_its_last_user():
    class Local(nn.Linear):
        pass

    checkpoint_module(Local(4, 4))
    reference = weakref.ref(Local)
    del Local
    gc.collect()  # classes are cycles
    assert reference() is None


# a backward -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_gc")
def test_backward_frees_slots_inputs_and_recomputed_tensors_while_the_loss_lives(device):
    x = torch.ones(4, device=device, requires_grad=True)
    h = x * 1
    y, function = region_of(h)
    h, loss = weakref.ref(h.untyped_storage()), y.sum()
    del y
    with LiveStorages(only=is_recomputing) as recomputed:
        loss.backward()
    assert recomputed.peak_bytes > recomputed.live_bytes == 0
    assert h() is function() is None
    assert set(kernel_objects()) <= {"Frame", "Options"}  # hooks of the graph that the loss holds; they are empty
    assert x.grad is not None


@pytest.mark.usefixtures("no_gc")
def test_backward_frees_everything_of_the_kernel_with_the_loss(device, call):
    x = torch.ones(4, device=device, requires_grad=True)
    call(lambda x: x.sin().exp().sin(), x).sum().backward()
    assert not kernel_objects()


@pytest.mark.usefixtures("no_gc")
def test_second_backward_frees_what_a_first_one_had_to_keep(device):
    x = torch.ones(1024, device=device, requires_grad=True)
    loss = checkpoint(lambda x: x.sin().exp().sin(), x).sum()
    with LiveStorages(only=is_recomputing) as recomputed:
        loss.backward(retain_graph=True)
        assert recomputed.live_bytes == A
        loss.backward()
    assert recomputed.live_bytes == 0


@pytest.mark.usefixtures("no_gc")
def test_region_by_hand_that_is_still_referenced_holds_nothing_after_the_backward(device):
    h = torch.ones(4, device=device, requires_grad=True) * 1
    region = Checkpointing(torch.sin, h)
    region.checkpoint().sum().backward()
    h = weakref.ref(h.untyped_storage())
    assert region.is_recomputed
    assert h() is None


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("options", [{}, {"determinism_check": "values"}, {"early_stop": False}], ids=str)
def test_forward_and_backward_make_no_reference_cycle(options, device, call):
    linear = nn.Linear(4, 4, device=device)

    def once():
        x = torch.ones(4, 4, device=device, requires_grad=True)
        call(lambda x: nn.functional.dropout(linear(x).sin()).exp().sin(), x, **options).sum().backward()
        call(lambda x: checkpoint(torch.sin, linear(x), **options).exp(), x, **options).sum().backward()
        call(torch.sin, x, **options)

    once()
    assert not cycles()


@pytest.mark.usefixtures("no_gc")
def test_checkpointed_module_makes_no_reference_cycle():
    module, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.ones(3, 4)
    handle = checkpoint_module(module)
    module(x).sum().backward()
    handle.remove()
    del module, handle
    assert not cycles()


def raises_in_replay(x):
    y = x.sin().exp()
    if is_recomputing():
        raise ValueError("the pump is off")
    return y.sin()


def differs_in_replay(x):
    return (x[:2] if is_recomputing() else x).sin().exp()


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("function", [raises_in_replay, differs_in_replay])
def test_replay_that_raises_frees_everything_with_its_exception(function):
    def once():
        x = torch.ones(4, requires_grad=True)
        with suppress(ValueError, RuntimeError):
            checkpoint(function, x).sum().backward()

    once()
    assert not kernel_objects()
    assert not cycles()


# how much -------------------------------------------------------------------------------------------------------------


def chain(x):
    """Saves four results of its own, of A bytes each."""
    for _ in range(4):
        x = x.exp()
    return x.sum()


@pytest.mark.usefixtures("no_gc")
def test_forward_keeps_exactly_the_boundary(device):
    leaf, bias = torch.ones(1024, device=device, requires_grad=True), nn.Parameter(torch.ones(1024, device=device))
    with LiveStorages() as live:
        h = leaf * 0.001
        y = checkpoint(lambda h: (h + bias).sin().exp().sin() * bias, h, preserve_rng_state=False)
        assert live.live_bytes == 2 * A  # h and y
        del h
        assert live.live_bytes == 2 * A  # h is the boundary
        del y
        assert live.live_bytes == 0


@pytest.mark.usefixtures("no_gc")
def test_forward_without_a_region_keeps_more(device):
    leaf = torch.ones(1024, device=device, requires_grad=True)
    with LiveStorages() as live:
        y = (leaf * 0.001).sin().exp().sin()
        assert live.live_bytes == 3 * A
        del y


def test_saved_bytes_are_exactly_the_boundary(device):
    h, other = torch.randn(1024, device=device, requires_grad=True) * 1, torch.randn(3, device=device)
    with saved_bytes() as saved:
        y = checkpoint(lambda h, other: chain(h) * other.sum(), h, other=other)
    assert saved.total == A + 3 * 4
    with saved_bytes() as saved_by_eager:
        chain(h)
    assert saved_by_eager.total == 4 * A
    del y


def test_saved_bytes_of_nested_regions_are_the_boundary_of_the_outer_one(device):
    h = torch.randn(1024, device=device, requires_grad=True) * 1
    with saved_bytes() as saved:
        y = checkpoint(lambda h: checkpoint(chain, checkpoint(torch.sin, h)), h)
    assert saved.total == A
    del y


def live_at_each_step_of_a_backward(device, call, steps=4):
    """Multiples of A: the live bytes that the replay made, after the backward of each of the ``steps``."""
    recomputed, seen = LiveStorages(only=is_recomputing), []

    def look():
        seen.append(recomputed.live_bytes / A)

    def function(x):
        for _ in range(steps):
            x = Probe.apply(x, look).exp()
        return x

    x = torch.zeros(1024, device=device, requires_grad=True)
    with recomputed:
        call(function, x).sum().backward()
    return seen


@pytest.mark.usefixtures("no_gc")
def test_recomputed_tensors_are_freed_node_by_node(device, call):
    # backward of   exp 4, exp 3, exp 2, exp 1
    assert live_at_each_step_of_a_backward(device, call) == [3, 2, 1, 0]


class SavesViews(torch.autograd.Function):
    """In its forward there is no grad, so the views that it saves are leaves, of tensors that have a graph."""

    @staticmethod
    def forward(ctx, x):
        y = x * 2
        ctx.save_for_backward(x.view(-1), y.view(-1))
        return y

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad + 0 * sum(ctx.saved_tensors)


@pytest.mark.usefixtures("no_gc")
def test_views_that_a_function_saves_hold_no_graph(device, call):
    alive = weakref.WeakSet()

    def function(x):
        y = x * x
        alive.add(y)
        return SavesViews.apply(y).exp()

    x = torch.ones(4, device=device, requires_grad=True)
    call(function, x).sum().backward()
    assert not list(alive)
    assert not kernel_objects()


@pytest.mark.usefixtures("no_gc")
def test_recomputed_tensors_are_kept_where_the_graph_is(device):
    recomputed, x = LiveStorages(only=is_recomputing), torch.zeros(1024, device=device, requires_grad=True)
    loss = checkpoint(chain, x)
    with recomputed:
        loss.backward(retain_graph=True)
    assert recomputed.live_bytes == 4 * A


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("regions", [1, 2, 6])
def test_peak_of_a_backward_is_one_regions_activations(regions, device):
    x = torch.zeros(1024, device=device, requires_grad=True)
    recomputed = LiveStorages(only=is_recomputing)

    def block(h):
        return (h.sin().exp() * 0.1).tanh().exp()  # saves its input, and the results of exp, tanh and exp

    y = x
    for _ in range(regions):
        y = checkpoint(block, y)
    loss = y.sum()
    del y
    with recomputed:
        loss.backward()
    assert recomputed.peak_bytes == 3 * A
    assert recomputed.live_bytes == 0


@pytest.mark.usefixtures("no_gc")
def test_peak_of_forward_and_backward_grows_by_one_boundary_a_region(device):
    def peak(call, regions):
        with LiveStorages() as live:
            y = torch.zeros(1024, device=device, requires_grad=True)
            for _ in range(regions):
                y = call(lambda h: (h.sin().exp() * 0.1).tanh().exp(), y)
            loss = y.sum()
            del y
            loss.backward()
        return live.peak_bytes

    assert peak(checkpoint, 8) - peak(checkpoint, 7) == A
    assert peak(plain, 8) - peak(plain, 7) == 3 * A
