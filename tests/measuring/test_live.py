"""Bytes that operators make: how many are alive at most during each action, and when it ends."""
from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import leaf
from torchckpt.measuring.live import LiveBytes, Watch
from torchckpt.planning import Action, Kind
from torchckpt.planning.step.memory import Level, Piece
from torchckpt.regions import live as module
from torchckpt.regions.core.frame import Frame
from torchckpt.regions.core.options import Options
from torchckpt.regions.private import dispatch_modes_are_active, put_under_modes
from torchckpt.regions.saved import storage_of

FIRST, SECOND = Action(0, Kind.FORWARD, 0), Action(0, Kind.BACKWARD, 0)
CPU = torch.device("cpu")


def ones(count):
    return torch.ones(count // 4)


def test_of_each_action():
    alive = LiveBytes(CPU)
    with alive.entered():
        alive.reaches(FIRST)
        kept = ones(100)
        gone = ones(1000)
        del gone
        alive.reaches(SECOND)
        more = kept + 1
        del kept
    assert alive.levels == {FIRST: Level(1100, 100), SECOND: Level(200, 100)}
    assert more.sum() == 50


def test_what_was_there_before_does_not_count_nor_do_views_of_it():
    before = ones(400)
    alive = LiveBytes(CPU)
    with alive.entered():
        alive.reaches(FIRST)
        views = before[10:], before.view(-1, 2), before.t()
        fresh = ones(40)
        again = fresh[1:]
    assert alive.levels == {FIRST: Level(40, 40)}
    assert [next(iter(storage_of(one))) in alive for one in (*views, again)] == [False, False, False, True]


def test_a_tensor_that_changes_in_place_counts_once():
    alive = LiveBytes(CPU)
    with alive.entered():
        alive.reaches(FIRST)
        fresh = ones(40)
        for _ in range(5):
            fresh += 1
    assert alive.levels == {FIRST: Level(40, 40)}


def test_what_is_watched_for_a_while_counts_what_grows():
    watch = Watch()
    with watch:
        watch.live = LiveBytes(CPU)
        grown = torch.empty(0).resize_(10)
        listed = torch.tensor([1.0, 2.0])
        assert watch.live.highest() == grown.nbytes + listed.nbytes == 48


def test_an_operator_looks_at_what_it_makes_alone(monkeypatch):
    """Each one that took more than all before looked at all storages: a first step took twenty times as long."""
    looks, look = [], module.alive_storage
    monkeypatch.setattr(module, "alive_storage", lambda storage: looks.append(storage) or look(storage))
    alive, held = LiveBytes(CPU), []
    with alive.watching():
        for _ in range(100):
            held.append(ones(40))
            ones(4)  # which is freed
    assert len(looks) == 200
    assert alive.highest() == 4004


def test_what_is_resized_by_no_operator_counts():
    alive = LiveBytes(CPU)
    with alive.watching():
        x, y = ones(40), ones(40)
        x.untyped_storage().resize_(400)
        x.zero_()
        assert (alive.highest(), alive.now()) == (440, 440)
        x.untyped_storage().resize_(0)
        alive.begin()
        y.untyped_storage().resize_(0)
        z = ones(80)
        assert (alive.highest(), alive.now()) == (80, z.nbytes)


def test_a_backward_counts_too():
    x = leaf(100)
    alive = LiveBytes(CPU)
    with alive.entered():
        alive.reaches(FIRST)
        y = x.exp()
        alive.reaches(SECOND)
        y.backward(torch.ones(100))
        del y
    assert alive.levels[FIRST] == Level(400, 400)
    assert alive.levels[SECOND].highest == 1200
    assert x.grad is not None


def test_what_was_held_before_the_first_replay():
    alive = LiveBytes(CPU)
    with alive.entered():
        alive.reaches(SECOND)
        first = ones(100)
        with alive.replaying(1):
            second = ones(400)
        with alive.replaying(0):
            pass
    pieces = (2, False, 100), (1, True, 500), (1, False, 500), (0, True, 500), (0, False, 500)
    assert alive.levels == {SECOND: Level(500, 500, 100, tuple(Piece(*each, each[-1]) for each in pieces))}
    assert first.shape != second.shape


def test_operators_that_are_not_looked_at():
    alive = LiveBytes(CPU, looks=False)
    with alive.entered():
        alive.reaches(FIRST)
        fresh = ones(100)
    assert alive.levels == {}
    assert next(iter(storage_of(fresh))) in alive


@pytest.mark.parametrize("looks", [False, True])
def test_a_replay_runs_to_its_end_where_bytes_are_counted(looks):
    frame = Frame(Options())
    with LiveBytes(CPU, looks).replaying(0, frame):
        assert (frame.tail is not None) == looks
    assert frame.tail is None


class Allocator:
    """As a device's module counts; what is allocated is set by hand."""

    def __init__(self):
        self.now = self.most = 0

    def allocate(self, count):
        self.now += count
        self.most = max(self.most, self.now)

    def memory_allocated(self, device):
        return self.now

    def max_memory_allocated(self, device):
        return self.most

    def reset_peak_memory_stats(self, device):
        self.most = self.now


def test_a_device_that_counts_itself_is_asked(monkeypatch):
    allocator = Allocator()
    allocator.allocate(1000)
    monkeypatch.setattr(module, "allocator_of", lambda device: allocator)
    alive = LiveBytes(CPU)
    with alive.entered():
        alive.reaches(FIRST)
        allocator.allocate(70)
        allocator.allocate(-50)
        alive.reaches(SECOND)
        allocator.allocate(5)
        with alive.replaying(0):
            allocator.allocate(5)
        allocator.allocate(-5)
    pieces = Piece(1, False, 25, 25), Piece(0, True, 30, 30), Piece(0, False, 30, 25)
    assert alive.levels == {FIRST: Level(70, 20), SECOND: Level(30, 25, 25, pieces)}


def test_a_device_that_was_never_used_is_made_ready_before_its_statistics_are_reset(monkeypatch):
    allocator = Allocator()
    allocator.init = lambda: setattr(allocator, "is_ready", True)
    monkeypatch.setattr(torch, "get_device_module", lambda device: allocator)
    assert module.LiveStorages(torch.device("cuda")).allocator.is_ready


class Collects(TorchDispatchMode):
    """Calls what it was given in the middle of an operator, as the garbage collector may."""

    def __init__(self, call) -> None:
        super().__init__()
        self.call = call

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.call()
        return func(*args, **(kwargs or {}))


def test_a_watch_that_is_stopped_inside_of_an_operator_is_left_later():
    first, second = Watch(), Watch()
    put_under_modes(first)
    with Collects(first.stop):
        ones(100)
    assert ones(100).sum() == 25  # what torch could not do if the watch were gone
    put_under_modes(second)
    assert dispatch_modes_are_active() == 1
    second.live = LiveBytes(CPU)
    second.before = first.stop  # the same from inside of another watch
    ones(100)
    second.stop()
    assert dispatch_modes_are_active() == 0
    assert ones(100).sum() == 25
