"""Settings, attributes of modules that are no tensors: those of which classes, and what is left in them dies."""
from __future__ import annotations

import gc
import weakref
from functools import partial

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from tests.helpers import assert_equal, by_hand, plain, prefetched
from torchckpt import checkpoint, is_recomputing

CALLS = pytest.mark.parametrize("call", [checkpoint, by_hand, prefetched], ids=lambda call: call.__name__)


def assert_as_plain(call, make, run, shape=(5, 7)):
    """``run(way, module, x)``, with regions by ``call``, leaves the gradients that it leaves without."""
    found = []
    for way in (plain, call):
        torch.manual_seed(1)
        module, x = make(), torch.randn(shape, requires_grad=True)
        run(way, module, x)
        found.append([x.grad, *(p.grad for p in module.parameters())])
    assert_equal(found[1], found[0])


class Leaving(nn.Module):
    """Leaves what it has computed in an attribute, as attention weights for a plot."""

    def __init__(self, leave) -> None:
        super().__init__()
        self.linear, self.left, self.seen, self.leave = nn.Linear(4, 4), None, [], leave

    def forward(self, x):
        h = self.linear(x).relu()
        out = self.linear(h)
        self.leave(self, h)
        return out


def in_list(module, h):
    module.left = [h]


def in_tuple(module, h):
    module.left = (h, 1)


def in_dict(module, h):
    module.left = {"h": h}


def as_tensor(module, h):
    module.left = h


def behind_others(module, h):
    module.seen.append(h)


@pytest.mark.parametrize("leave", [in_list, in_tuple, in_dict, as_tensor, behind_others])
@CALLS
def test_what_a_forward_without_a_backward_leaves_on_its_module_dies_with_the_next_call(call, leave):
    module, graphs = Leaving(leave), []
    for _ in range(4):
        module.seen = []
        out = call(module, torch.randn(3, 4))
        h = module.seen[0] if leave is behind_others else module.left
        h = h if isinstance(h, torch.Tensor) else next(iter(h.values() if isinstance(h, dict) else h))
        graphs.append(weakref.ref(h))
        del out, h
    gc.collect()
    assert sum(graph() is not None for graph in graphs) <= 2


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.factor, self.sizes = nn.Parameter(torch.randn(4, 4)), 1.0, None

    def forward(self, x):
        x = (x @ self.weight * self.factor).sin()
        return x if self.sizes is None else x * x.new_full(self.sizes, 2.0).sin()


class Twice(nn.Module):
    def forward(self, weight):
        return weight * 2


@pytest.mark.parametrize("is_parametrized", [False, True])
@CALLS
def test_settings_of_a_class_that_torch_has_made_of_one_of_the_users_are_those_of_the_forward(call, is_parametrized):
    def run(way, module, x):
        losses = []
        if is_parametrized:
            parametrize.register_parametrization(module, "weight", Twice())
        for factor, sizes in [(1.0, None), (numpy.float64(0.5), (3, 4)), (numpy.float32(2.5), torch.Size([4]))]:
            module.factor, module.sizes = factor, sizes
            losses.append(way(module, x).sum())
        module.factor, module.sizes = 7, {"none": 0}
        sum(losses).backward()
        assert (module.factor, module.sizes) == (7, {"none": 0})

    assert_as_plain(call, Scaled, run, (3, 4))


class Table(nn.Module):
    """Makes a table at its first call, and notes its length, in attributes that were not there before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        if len(x) > getattr(self, "length", 0):
            self.length = len(x)
            self.table = torch.arange(float(len(x)))
        return (self.linear(x) * self.table[: len(x), None]).sin()


@CALLS
def test_numbers_that_come_with_a_tensor_at_the_first_call_go_with_it(call):
    found = []
    for way in (plain, call):
        torch.manual_seed(1)
        module = Table()
        inputs = [torch.randn(rows, 4, requires_grad=True) for rows in (3, 5)]
        for x in inputs:
            way(module, x).sum().backward()
        assert module.length == len(module.table) == 5
        found.append([*(x.grad for x in inputs), *(p.grad for p in module.parameters())])
    assert_equal(found[1], found[0])


class Task(nn.Module):
    """Which weight it reads, how often, and what follows, is set from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.task, self.factor, self.kind, self.calls, self.scales = 0, 1.0, "sine", 0, {"a": 1.0}
        self.heads, self.names = nn.ModuleList(nn.Linear(7, 7) for _ in range(3)), ["a"]
        self.active, self.frozen = {"a"}, frozenset("a")

    def forward(self, x):
        self.calls += 1  # of its own, so that a replay counts, too
        x = self.heads[self.task](x) * self.factor * self.scales["a"]
        if self.active != self.frozen:
            x = x.tanh()
        for _ in self.names:
            x = nn.functional.dropout(x, 0.3)
        return x.sin() if self.kind == "sine" else x.cos()


class Counting(Task):
    def forward(self, x):
        if is_recomputing():
            self.replays = getattr(self, "replays", 0) + 1
        return super().forward(x)


class Made(nn.Module):
    """The class that `parametrize` makes of the user's says that it is of torch; as `fully_shard` makes one."""

    def __new__(cls):
        module = Task()
        module.shift = nn.Parameter(torch.ones(7))
        parametrize.register_parametrization(module, "shift", nn.Tanh())
        return module


@pytest.mark.parametrize("make", [Task, Counting, Made])
@CALLS
def test_settings_of_modules_that_change_between_a_forward_and_its_backward_are_those_of_the_forward(call, make):
    replays = []

    def run(way, module, x):
        losses = []
        settings = [(0, 1.0, "sine", ["a"]), (1, 2.5, "cosine", ["a", "b"]), (2, 0.5, "sine", [])]
        for task, factor, kind, names in settings[: 1 if make is Counting else 3]:
            module.task, module.factor, module.kind, module.names[:] = task, factor, kind, names
            module.scales["a"] *= 1.5
            module.active ^= {"b"}
            module.frozen = module.frozen | set(names)
            losses.append(way(module, x).sum())
        sum(losses).backward()
        assert module.calls == len(losses) * (1 if way is plain else 2)
        assert (module.task, module.kind, module.names) == (task, kind, names)
        replays.append(getattr(module, "replays", 1))

    assert_as_plain(call, make, run)
    assert replays[-1] == 1


class Gained(nn.Module):
    """Reads an attribute that it may have, on itself and on a child."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(7, 7), Scaled7()

    def forward(self, x):
        return nn.functional.dropout(self.inner(self.linear(x)) * getattr(self, "gain", 1.0), 0.3).sin()


class Scaled7(nn.Module):
    def forward(self, x):
        return (x * getattr(self, "scale", 1.0)).cos()


@CALLS
def test_an_attribute_that_is_first_set_behind_a_forward_is_not_there_in_its_replay(call):
    def run(way, module, x):
        losses = [way(module, x).sum() for _ in range(2)]
        module.gain, module.inner.scale = 5.0, True
        losses.append(way(module, x).sum())
        module.gain, module.inner.rate = 2.0, 3
        sum(losses).backward()
        assert (module.gain, module.inner.scale, module.inner.rate) == (2.0, True, 3)

    assert_as_plain(call, Gained, run)


@CALLS
def test_attributes_that_are_hidden_come_back_in_any_order(call):
    def run(way, module, x):
        losses = []
        for name in ("one", "two", "gain"):
            losses.append(way(module, x).sum())
            setattr(module, name, 3.0)
        for loss in losses:
            loss.backward()

    assert_as_plain(call, Gained, run)


class Numbered(nn.Module):
    """Takes a number at its first call, which another attribute tells, and draws none in a replay."""

    def __init__(self, tells) -> None:
        super().__init__()
        self.linear, self.tells, self.state, self.ready = nn.Linear(7, 7), tells, {"": object()}, False
        self.numbers = iter(range(2, 9))

    def forward(self, x):
        if self.tells(self):
            self.ready, self.state["ready"], self.places = True, True, numpy.arange(7)
            self.number = next(self.numbers)
        return (self.linear(x) * self.number).sin()


@pytest.mark.parametrize(
    "tells",
    [lambda m: not m.ready, lambda m: "ready" not in m.state, lambda m: not hasattr(m, "places"),
     lambda m: not hasattr(m, "number")],
)
@CALLS
def test_a_number_that_a_first_call_sets_itself_stays(call, tells):
    def run(way, module, x):
        sum(way(module, x).sum() for _ in range(2)).backward()
        assert (module.number, next(module.numbers)) == (2, 3)

    assert_as_plain(call, lambda: Numbered(tells), run)


@CALLS
def test_a_hook_that_asks_whether_a_replay_runs_leaves_other_settings_alone(call):
    seen = []

    def note(module, _, out):
        if not is_recomputing():
            seen.append((module.factor, getattr(module, "factor", None), out.shape))

    def run(way, module, x):
        module.register_forward_hook(note)
        losses = []
        for factor in (2.0, 3.0):
            losses.append(way(module, x).sum())
            module.factor = factor
        sum(losses).backward()

    assert_as_plain(call, Scaled, run, (3, 4))


class Prepares(nn.Module):
    """Sets a number on its child at its first call, with a tensor or without, which a flag of its own tells."""

    def __init__(self, with_tensor) -> None:
        super().__init__()
        self.linear, self.inner, self.is_ready, self.with_tensor = nn.Linear(7, 7), Needs(), False, with_tensor

    def forward(self, x):
        if not self.is_ready:
            self.is_ready, self.inner.size = True, x.shape[-1]
            if self.with_tensor:
                self.inner.table = torch.rand(7)
        return self.inner(self.linear(x))


class Needs(nn.Module):
    size, table = 1, 1.0

    def forward(self, x):
        return (x * self.size + self.table).sin()


@pytest.mark.parametrize("with_tensor", [False, True])
@CALLS
def test_a_flag_goes_with_what_a_first_call_sets_on_another_module(call, with_tensor):
    def run(way, module, x):
        sum(way(module, x).sum() for _ in range(2)).backward()
        assert (module.is_ready, module.inner.size) == (True, 7)

    assert_as_plain(call, partial(Prepares, with_tensor), run)


class Slots(nn.Module):
    """Writes each call's row to the next place of a table that a child of it has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.cache, self.place = nn.Linear(7, 7), nn.Module(), 0
        self.cache.register_buffer("rows", torch.zeros(9, 7))

    def forward(self, x):
        self.cache.rows[self.place] = x.detach().mean(0)
        self.place += 1
        return (self.linear(x) * self.cache.rows[: self.place].sum(0)).sin()


@CALLS
def test_a_number_goes_with_a_buffer_of_another_module(call):
    def run(way, module, x):
        for _ in range(2):
            sum(way(module, x).sum() for _ in range(2)).backward()
        assert module.place == 4

    assert_as_plain(call, Slots, run)


@pytest.mark.parametrize("is_there", [True, False])
@CALLS
def test_a_hook_that_asks_whether_a_replay_runs_counts_in_an_attribute_of_its_module(call, is_there):
    def count(module, _):
        name = "replays" if is_recomputing() else "forwards"
        setattr(module, name, getattr(module, name, 0) + 1)

    module, x = Scaled(), torch.randn(3, 4, requires_grad=True)
    if is_there:
        module.replays = 0
    module.register_forward_pre_hook(count)
    for step in (1, 2):
        sum(call(module, x).sum() for _ in range(3)).backward()
        assert (module.forwards, module.replays) == (3 * step, 3 * step)
