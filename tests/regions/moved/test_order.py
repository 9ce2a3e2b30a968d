"""Orders of events: what the default order does, and what a schedule may do in its place."""
from __future__ import annotations

import gc
import sys
import weakref
from itertools import count

import pytest
import torch

import torchckpt
from tests.helpers import in_thread, in_threads, is_collected, leaf
from tests.regions.moved.calls import by_default, sizes
from torchckpt.regions.flags import local
from torchckpt.regions.moved.copies import Bytes, Copies
from torchckpt.regions.moved.order import Order
from torchckpt.regions.moved.region import Moved


@pytest.fixture
def events(monkeypatch):
    """F, B: a forward and a backward begin; out, back: copies are queued; free: they are let go of. By region."""
    written, numbers = [], count()

    def words(word, storages):
        owners = [storage.owner() for storage in storages]
        return dict.fromkeys(f"{word}{owner.number}" for owner in owners if hasattr(owner, "number"))

    def watch(of, name, word):
        method = getattr(of, name)

        def watched(self, *args):
            storages = [self] if of is Bytes else [each for each in args[0] if word == "out" or each.is_away]
            written.extend(each for each in words(word, storages) if each != written[-1])
            return method(self, storages) if of is Copies else method(self)

        monkeypatch.setattr(of, name, watched)

    init = Moved.__init__

    def noted(self, *args):
        self.number = next(numbers)
        written.append(f"F{self.number}")
        init(self, *args)

    monkeypatch.setattr(Moved, "__init__", noted)
    watch(Copies, "send", "out")
    watch(Copies, "fetch", "back")
    watch(Bytes, "let_go", "free")
    local.thread.order = None
    yield written
    local.thread.order = None


def through(events, x, regions, call=by_default):
    """``regions`` calls, one after the other, of a function that saves two tensors."""
    for number in range(regions):
        x = call(lambda x: x.sin().exp() * 1.5, x)
        x.register_hook(lambda grad, number=number: events.append(f"B{number}"))
    return x


def test_let_go_when_the_next_but_one_begins_and_fetched_one_ahead(device, events):
    loss = through(events, leaf(4, device=device) * 1, 5).sum()
    assert " ".join(events) == "F0 F1 out0 F2 out1 free0 F3 out2 free1 F4 out3 free2"
    events.clear()
    loss.backward()
    # 4 and 3 are still here
    assert " ".join(events) == "B4 B3 back2 B2 back1 B1 back0 B0"


@pytest.mark.parametrize(("regions", "picture"), [
    (1, "F0 B0"),
    (2, "F0 F1 out0 B1 B0"),
    (3, "F0 F1 out0 F2 out1 free0 B2 B1 back0 B0"),
])
def test_few_regions(device, events, regions, picture):
    through(events, leaf(4, device=device) * 1, regions).sum().backward()
    assert " ".join(events) == picture


def test_micro_batches_one_after_the_other(device, events):
    for _ in range(2):
        through(events, leaf(4, device=device) * 1, 3).sum().backward()
    assert " ".join(events) == (
        "F0 F1 out0 F2 out1 free0 B2 B1 back0 B0 F3 F4 out3 F5 out4 free3 B2 B1 back3 B0"
    )


def test_forwards_of_two_micro_batches_before_their_backwards(device, events):
    x = leaf(4, device=device)
    losses = [through(events, x * 1, 3).sum() for _ in range(2)]
    assert " ".join(events) == "F0 F1 out0 F2 out1 free0 F3 out2 free1 F4 out3 free2 F5 out4 free3"
    events.clear()
    losses[0].backward()  # the first one first: its last region is fetched late
    assert " ".join(events) == "B2 back2 back1 B1 back0 B0"
    events.clear()
    losses[1].backward()
    assert " ".join(events) == "B2 B1 back3 B0"


def test_a_region_without_a_backward_is_passed_over(device, events):
    x = leaf(4, device=device) * 1
    x = through(events, x, 2)
    through(events, x, 1)  # whose result nobody keeps
    gc.collect()
    assert " ".join(events) == "F0 F1 out0 F2 out1 free0"
    events.clear()
    x = through(events, x, 2)
    x.sum().backward()
    assert " ".join(events) == "F3 F4 out3 free1 B1 B0 back1 B1 back0 B0"


def test_regions_of_another_thread_have_an_order_of_their_own(device, events):
    x = leaf(4, device=device) * 1
    first = through(events, x, 2)
    second = in_thread(through, events, x, 2)
    assert " ".join(events) == "F0 F1 out0 F2 F3 out2"
    (first + second).sum().backward()


def test_a_schedule_drives_regions_by_an_order_of_its_own(device, events):
    class Later:
        """Lets go of all regions after the forwards, and fetches them before the backwards."""

        def __init__(self):
            self.regions = []

        def begins(self, region):
            self.regions.append(region)

        def returns(self, region):
            events.append("returns")

    local.thread.order = order = Later()
    loss = through(events, leaf(4, device=device) * 1, 3).sum()
    for region in order.regions:
        region.release()
    for region in reversed(order.regions):
        region.issue()
        region.issue()
        region.release()
    assert " ".join(events) == "F0 F1 F2 out0 free0 out1 free1 out2 free2 back2 back1 back0"
    events.clear()
    loss.backward()
    assert " ".join(events) == "B2 returns B1 returns B0 returns"


def test_nobody_drives_late_and_never_wrong(device, events):
    class Never:
        def begins(self, region):
            regions.append(region)

        def returns(self, region):
            pass

    regions, local.thread.order = [], Never()
    x = leaf(4, device=device)
    loss = through(events, x * 1, 3).sum()
    for region in regions:
        region.release()
    events.clear()
    loss.backward()
    assert " ".join(events) == "B2 back2 B1 back1 B0 back0"


def test_release_and_issue_outside_of_their_time_do_nothing(device):
    region = Moved(1)
    region.release()
    region.issue()
    x = leaf(4, device=device)
    loss = region.forward(lambda x: (x * 2).exp().sum(), (x,), {})
    region.issue()
    (storage,) = region._moving()
    assert (storage.is_away, storage.is_back) == (False, False)
    loss.backward(retain_graph=True)
    region.release()
    region.issue()
    assert (storage.is_away, storage.is_back) == (False, False)
    loss.backward()
    assert torch.equal(x.grad, ((x * 2).exp() * 2 * 2).detach())


def test_a_function_that_runs_a_backward_itself_begins_none_of_the_region(device):
    region = Moved(1)

    def function(x):
        y = x.exp()
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return (y * gradient).sum()

    x = leaf(4, device=device)
    loss = region.forward(function, (x,), {})
    assert not region.has_begun
    assert 16 in sizes(region)
    region.release()
    loss.backward()
    assert torch.allclose(x.grad, 2 * (2 * x).exp())


# what dies ------------------------------------------------------------------------------------------------------------


def test_what_nobody_needs_dies_at_once(device):
    x = leaf(4, device=device) * 1
    for released in (False, True):
        region = Moved(1)
        loss = region.forward(lambda x: x.exp().tanh().sum(), (x,), {})
        if released:
            region.release()
        storages = [weakref.ref(storage) for storage in region._moving()]
        assert len(storages) == 2
        reference = weakref.ref(region)
        gc.disable()
        try:
            del region, loss
            assert reference() is None
            assert [storage() for storage in storages] == [None, None]
        finally:
            gc.enable()


def test_what_came_back_dies_with_its_node(device):
    alive, region = [], Moved(1)

    def look(grad):
        alive.append(sum(storage() is not None for storage in storages))

    def function(x):
        for _ in range(3):
            x = x.exp()
            x.register_hook(look)
        return x * 1

    loss = region.forward(function, (leaf(4, device=device) * 1,), {}).sum()
    storages = [weakref.ref(storage) for storage in region._moving()]
    region.release()
    loss.backward()
    assert alive == [3, 2, 1]
    assert [storage() for storage in storages] == [None, None, None]


def test_a_backward_that_fails_leaves_no_region_behind(device):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("the pump is off")

    x = leaf(4, device=device) * 1
    region = Moved(1)
    loss = region.forward(lambda x: Fails.apply(x.exp()).sin().sum(), (x,), {})
    region.release()
    with pytest.raises(ValueError, match="the pump is off"):
        loss.backward(retain_graph=True)
    with pytest.raises(ValueError, match="the pump is off"):
        loss.backward()
    reference = weakref.ref(region)
    del region, loss
    assert is_collected(reference)


def test_a_forward_that_fails_moves_nothing_and_leaves_no_hooks(device):
    region, results = Moved(1), []

    def function(x):
        results.append(x.exp())
        raise ValueError("the pump is off")

    x = leaf(4, device=device)
    with pytest.raises(ValueError, match="the pump is off"):
        region.forward(function, (x,), {})
    region.release()
    assert sizes(region) == []
    results[0].sum().backward()
    assert torch.equal(x.grad, results[0])
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    torchckpt.offload(torch.exp, x, min_bytes=1).sum().backward()


def test_regions_begin_and_return_in_several_threads_at_once():
    """Backwards run in the threads of their devices, beside the next forward."""

    class Region:
        is_released = has_begun = False

        def send(self): ...
        def release(self): ...
        def issue(self): ...

    order = Order()

    def work():
        for _ in range(300):
            regions = [Region() for _ in range(5)]
            for region in regions:
                order.begins(region)
            for region in regions[::-1]:
                order.returns(region)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        in_threads(work, work, work)
    finally:
        sys.setswitchinterval(interval)
