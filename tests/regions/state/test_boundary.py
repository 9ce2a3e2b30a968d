"""What a replay gets for an input that nobody holds any more: its values, its strides, a node behind it."""
from __future__ import annotations

from collections import ChainMap, UserDict, deque
from functools import partial
from types import MappingProxyType

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import torchckpt
from tests.helpers import assert_program_transparent, by_hand, leaf, plain, prefetched
from tests.slow import few
from torchckpt import checkpoint
from torchckpt.errors import RecomputationError
from torchckpt.regions.core.slots import _is_near, sample
from torchckpt.tensors import hidden_tensors, hides_tensors

CALLS = pytest.mark.parametrize("call", [checkpoint, by_hand, prefetched], ids=lambda call: call.__name__)

LAYOUTS = {
    "channels last": lambda base: base[:24].view(1, 3, 2, 4).contiguous(memory_format=torch.channels_last),
    "one channel": lambda base: base[:16].view(2, 1, 2, 4).contiguous(memory_format=torch.channels_last),
    "3-D channels last": lambda base: base[:24].view(1, 3, 2, 2, 2).contiguous(memory_format=torch.channels_last_3d),
    "transposed": lambda base: base[:5].view(5, 1).t(),
    "permuted": lambda base: base[:24].view(2, 1, 12).permute(2, 1, 0),
    "expanded": lambda base: base[:3].view(1, 3, 1).expand(1, 3, 4),
    "a slice of one": lambda base: base[:18].view(2, 9)[1:, ::2],
    "overlapping": lambda base: base.unfold(0, 6, 2)[None],
    "strides of its own": lambda base: base.as_strided((1, 3, 1), (50, 2, 17), 5),
    "zero-size": lambda base: base.as_strided((0, 1, 3), (7, 9, 2)),
    "a number": lambda base: base[3],
}


@few(25)
@CALLS
@pytest.mark.parametrize("kind", LAYOUTS)
def test_replay_gets_the_strides_of_the_forward(call, kind, device):
    seen = []

    def function(x):
        seen.append((x.shape, x.stride(), x.storage_offset(), x.is_leaf))
        return nn.functional.dropout(x, 0.5).sin()

    base = leaf(64, device=device)
    assert_program_transparent(call, lambda call, base: call(function, LAYOUTS[kind](base)), base)
    forward, replay = seen[-2:]
    assert forward == replay


@CALLS
def test_convolution_of_a_batch_of_one_keeps_its_mask(call, device):
    """A convolution asks the strides whether its output is channels last, and dropout draws in the output's order."""
    convolution = nn.Conv2d(3, 4, 3, padding=1).to(device)

    def block(x):
        return nn.functional.dropout(convolution(x), 0.5).sin()

    def model(call, x):
        return call(block, (x * 2).contiguous(memory_format=torch.channels_last))

    assert_program_transparent(call, model, leaf(1, 3, 4, 4, device=device), modules=[convolution])


class Packed(torch.autograd.graph.saved_tensors_hooks):
    """Saves what is contiguous, as ``save_on_cpu`` in pinned memory does."""

    def __init__(self) -> None:
        super().__init__(lambda tensor: torch.empty(tensor.shape).copy_(tensor), lambda packed: packed)


@CALLS
@pytest.mark.parametrize("kind", [kind for kind in LAYOUTS if kind not in ("expanded", "overlapping")])
def test_hooks_that_change_the_layout_do_not_change_that_of_the_replay(call, kind):
    seen = []

    def function(x):
        seen.append(torch.empty_like(x).stride())
        return nn.functional.dropout(x, 0.5).sin()

    def program(call, base):
        with Packed():
            return call(function, LAYOUTS[kind](base))

    assert_program_transparent(call, program, leaf(64))
    forward, replay = seen[-2:]
    assert forward == replay


@CALLS
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x], lambda x: {"x": [x]}], ids=["bare", "list", "dict"])
def test_inference_tensor_that_is_changed_after_the_forward_is_that_of_the_forward(call, wrap, device):
    x = leaf(3, 4, device=device)

    def inside(wrapped):
        while not isinstance(wrapped, torch.Tensor):
            wrapped = wrapped["x"] if isinstance(wrapped, dict) else wrapped[0]
        return wrapped

    def function(x, one, other):
        assert inside(one) is inside(other)
        assert inside(one).is_inference()
        assert inside(one).label == "given"
        return nn.functional.dropout(x + inside(one), 0.5).sin()

    def gradient(call):
        torch.manual_seed(1)
        with torch.inference_mode():
            given = torch.ones(4, 3, device=device).t()
        given.label = "given"
        loss = call(function, x, wrap(given), wrap(given)).sum()
        with torch.inference_mode():
            given.mul_(3)
        return torch.autograd.grad(loss, x)[0]

    assert torch.equal(gradient(call), gradient(plain))


class Turned(torch.Tensor):
    """Has another ``sin``. A loss of it runs its backward where subclasses do not see functions."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(torch.Tensor.cos if func is torch.Tensor.sin else func, types, args, kwargs)


class Unseeing(torch.Tensor):
    """Makes plain tensors of all that is done with it, as a ``Parameter`` does."""

    __torch_function__ = torch._C._disabled_torch_function_impl


class Scale(nn.Module):
    """Keeps a buffer of a subclass, which its forward changes."""

    def __init__(self, cls, how) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("scale", torch.rand(4).as_subclass(cls))

    def forward(self, x):
        seen.append((type(x), type(self.scale)))
        y = (self.scale.sin() * x.sin() * x).exp()
        if self.how == "in place":
            self.scale.add_(1)
        elif self.how == "another":
            self.scale = (self.scale + 1).as_subclass(type(self.scale))
        return y


seen: list[tuple[type, type]] = []


@CALLS
@pytest.mark.parametrize("how", ["", "in place", "another"])
@pytest.mark.parametrize("cls", [Turned, Unseeing])
def test_a_subclass_that_nobody_holds_any_more_is_one_in_the_replay(call, cls, how):
    def gradient(call):
        torch.manual_seed(1)
        x, module = leaf(4), Scale(cls, how)
        call(module, (x * 2).as_subclass(cls)).sum().backward()
        return x.grad

    seen.clear()
    assert torch.equal(gradient(call), gradient(plain))
    assert seen == [(cls, cls)] * 3  # two of the region


@pytest.mark.parametrize("cls", [Turned, Unseeing])
def test_an_output_of_a_subclass_may_be_changed_in_place(cls):
    """Autograd forbids that where an autograd Function returns a view."""

    def gradient(call):
        torch.manual_seed(1)
        x = leaf(4)
        y = call(lambda hidden: hidden.cos().as_subclass(cls), x * 2)
        assert type(y) is cls
        return torch.autograd.grad(y.mul_(2).sum().as_subclass(torch.Tensor), x)[0]

    assert torch.equal(gradient(by_hand), gradient(plain))


def test_a_parameter_that_a_region_returns_is_a_tensor_behind_it():
    weight = nn.Parameter(torch.rand(4))
    y, same = by_hand(lambda x: (x.sin() * weight, weight), leaf(4) * 2)
    assert type(same) is torch.Tensor
    assert y.grad_fn is not None


@CALLS
@pytest.mark.parametrize("cls", [Turned, Unseeing])
def test_an_inference_tensor_of_a_subclass_is_one_in_the_replay(call, cls):
    def function(x, given):
        seen.append((type(x), type(given)))
        return (given.clone().as_subclass(torch.Tensor) * x).sin()

    seen.clear()
    with torch.inference_mode():
        given = torch.rand(4).as_subclass(cls)
    call(function, leaf(4), given).sum().backward()
    assert seen == [(torch.Tensor, cls)] * 2


class Ring:
    """A cache that is full: what comes in moves what is oldest out, and all shapes stay."""

    def __init__(self, depth=0):
        self.held = [torch.ones(2, 4) for _ in range(3)]
        for _ in range(depth):
            self.held = {"one": self.held}

    def push(self, x):
        self.inner().append(x)
        return torch.stack([self.inner().pop(0), *self.inner()])

    def inner(self):
        held = self.held
        while isinstance(held, dict):
            held = held["one"]
        return held


class Slotted:
    __slots__ = ("__held", "empty")

    def __init__(self):
        self.__held = deque([torch.ones(2, 4) for _ in range(3)], 3)

    def push(self, x):
        self.__held.append(x)
        return torch.stack([*self.__held])


@pytest.mark.parametrize("make", [Ring, lambda: Ring(1), Slotted])
def test_a_full_cache_that_the_replay_fills_again_is_noticed(make):
    ring, x = make(), torch.randn(2, 4, requires_grad=True)
    y = checkpoint(lambda x, cache: (cache.push(x * 2) * x).sin(), x, ring)
    with pytest.raises(RecomputationError, match="did not save what its forward saved"):
        y.sum().backward()


def test_an_object_with_tensors_that_is_only_read():
    """The values may be others, as where a kernel adds in another order, and that is the function's affair."""
    ring, x = Ring(), torch.randn(2, 4, requires_grad=True)

    def read(x, cache):
        noise = 0.0 if torchckpt.is_recomputing() else 1e-3
        return (torch.stack(cache.held) * x + noise).sin()

    checkpoint(read, x, ring).sum().backward()
    with pytest.raises(RecomputationError):
        checkpoint(read, x, ring, determinism_check="values").sum().backward()


@pytest.mark.parametrize("change", [lambda held: held.append(held.pop(0)), lambda held: held[0].mul_(2)])
def test_an_object_that_is_changed_before_the_replay(change):
    ring, x = Ring(), torch.randn(2, 4, requires_grad=True)
    ring.held[0] *= 3
    y = checkpoint(lambda x, cache: (torch.stack(cache.held) * 2 * x).sin(), x, ring)
    change(ring.held)
    with pytest.raises(RecomputationError, match="did not save what its forward saved"):
        y.sum().backward()


class Unbound:
    """As a proxy that has nothing behind it."""

    @property
    def __dict__(self):
        raise RuntimeError("outside of a request")


class Lazy(dict):
    def values(self):
        raise RuntimeError("reads files")


@pytest.mark.parametrize("value", [Unbound(), Lazy(one=1)])
def test_what_an_object_holds_is_looked_at_with_care(value):
    ring, x = Ring(), torch.randn(2, 4, requires_grad=True)
    ring.other = value
    for given in (ring, value):
        checkpoint(lambda x, other: x.sin(), x, other=given).sum().backward()
    assert len(list(hidden_tensors(ring))) == 3
    assert len(list(hidden_tensors([[x] * 1000] * 1000))) < 10_000


def test_an_object_that_holds_tensors_costs_no_checksums(monkeypatch):
    """For which the device would be waited for: masks of attention are such objects, and most are only read."""
    monkeypatch.setattr("torchckpt.regions.core.slots.fingerprint", None)
    ring, x = Ring(), torch.randn(2, 4, requires_grad=True)
    checkpoint(lambda x, cache: (torch.stack(cache.held) * x).sin(), x, ring).sum().backward()


class Sums:
    """What layers add to: no layer reads it."""

    def __init__(self):
        self.sums = []


@pytest.mark.parametrize("layer", [nn.LSTM(8, 8), nn.GRU(8, 8), nn.Linear(8, 8)])
def test_an_object_that_layers_only_add_to(layer):
    """Each replay finds more than its forward. A workspace may have other bytes, and a kernel adds in another order."""
    x, sums = torch.randn(4, 3, 8, requires_grad=True), Sums()

    def run(x, sums):
        y = layer(x)
        y = y[0] if isinstance(y, tuple) else y
        y = (y * (1 + 1e-5 * torchckpt.is_recomputing())).sigmoid()
        sums.sums.append(y.mean())
        return y

    y = checkpoint(run, checkpoint(run, x, sums), sums)
    (y.sum() + sum(sums.sums)).backward()


def test_a_sample_has_elements_of_all_parts():
    base = torch.randn(9, 2, 40, dtype=torch.complex64)
    for tensor in (base, base.transpose(0, 2), base.real, base.real.half(), base.imag > 0, base[0, 0, 0]):
        for change in (0, 1):
            other = tensor.clone()
            last = other[(-1,) * other.dim()]
            last.copy_(last if not change else ~last if last.dtype == torch.bool else last + 1)
            assert _is_near(sample(tensor), sample(other)) is (change == 0)
    assert sample(base[:0]).numel() == 0


@pytest.mark.parametrize("make", [MappingProxyType, UserDict, ChainMap, lambda held: deque(held.values())])
def test_containers_that_hold_tensors(make):
    assert hides_tensors(make({"mask": torch.ones(2)}))
    assert not hides_tensors(make({"mask": memoryview(bytearray(4))}))


@pytest.mark.parametrize("operator", [torch.ops.aten.clone.default, torch.ops.aten.mul.Tensor])
def test_selective_contexts_see_nothing_of_what_is_compared(operator):
    ring, x = Ring(), torch.randn(2, 4, requires_grad=True)

    def read(x, cache):
        y = (x.sin() * cache.held[0]).clone() * 2
        return y.cos()

    def policy(_, called, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if called is operator else CheckpointPolicy.PREFER_RECOMPUTE

    (expected,) = torch.autograd.grad(read(x, ring).sum(), x)
    contexts = partial(create_selective_checkpoint_contexts, policy)
    (found,) = torch.autograd.grad(checkpoint(read, x, ring, context_fn=contexts).sum(), x)
    assert torch.equal(found, expected)
