"""What a replay leaves on modules: what was there before it, also where it stops early."""
from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

from tests.helpers import plain
from torchckpt import checkpoint


class Borrowing(nn.Module):
    """Sets something for its call alone, and puts it back at the end, behind the last operation that saves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(4, 4), nn.Dropout(0.2)
        self.w, self.scale, self.note, self.function = nn.Parameter(torch.randn(4, 4)), 1, None, None
        self.table: dict[str, int] = {}
        self.register_buffer("b", torch.ones(4))
        self.register_buffer("empty", None)


class Mode(Borrowing):
    def forward(self, x):
        self.drop.eval()
        y = self.linear(self.drop(x))
        self.drop.train()
        return y


class Flag(Borrowing):
    def forward(self, x):
        self.linear.bias.requires_grad_(False)
        y = self.linear(x)
        self.linear.bias.requires_grad_(True)
        return y


class Setting(Borrowing):
    def forward(self, x):
        self.scale = 2
        y = (self.linear(x) * self.scale).sin()
        self.scale = 1
        return y


class SettingOfTorch(Borrowing):
    def forward(self, x):
        p, self.drop.p = self.drop.p, 0.5
        y = self.drop(self.linear(x)).sin()
        self.drop.p = p
        return y


class Note(Borrowing):
    def forward(self, x):
        self.note, self.function, self.empty = x.detach(), torch.sin, x.detach() + 1
        y = self.function(self.linear(x) * self.note + self.empty)
        self.note = self.function = self.empty = None
        return y


class Buffer(Borrowing):
    def forward(self, x):
        b, self.b = self.b, self.b * 2
        y = (self.linear(x) * self.b).sin()
        self.b = b
        return y


class Weight(Borrowing):
    def forward(self, x):
        w = self.w
        del self.w
        self.w = nn.functional.dropout(w, 0.3)
        y = x @ self.w
        del self.w
        self.w = w
        return y


class Table(Borrowing):
    def forward(self, x):
        self.table["x"] = 1
        y = self.linear(x).sin()
        self.table.clear()
        return y


class Hook(Borrowing):
    def forward(self, x):
        hook = self.linear.register_forward_hook(lambda _, __, output: 2 * output)
        y = self.linear(x).sin()
        hook.remove()
        return y


class Child(Borrowing):
    def forward(self, x):
        linear, self.linear = self.linear, nn.Identity()
        y = linear(x).sin()
        self.linear = linear
        return y


class Exchanged(Borrowing):
    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        self.w, self.v = self.v, self.w
        return (x @ self.w).tanh() @ self.v


class Frozen(Borrowing):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        self.calls += 1
        self.w.requires_grad_(bool(self.calls % 2))
        self.drop.train(bool(self.calls % 2))
        return self.linear(self.drop(x @ self.w)).sin()


class Growing(Borrowing):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        self.calls += 1
        calls = int(self.calls)
        self.register_buffer(f"of{calls}", x.detach().mean(0))
        if calls > 2:
            delattr(self, f"of{calls - 2}")
        return (self.linear(x) * sum(b.sum() for name, b in self._buffers.items() if name.startswith("of"))).sin()


def held(module):
    """What the module and its children hold, by name."""
    state = [
        (place, name, value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value))
        for place, inner in enumerate(module.modules())
        for table in (vars(inner), inner._parameters, inner._buffers)
        for name, value in table.items()
        if not name.startswith("_") and not isinstance(value, nn.Module)
    ]
    flags = [(inner.training, type(inner), len(inner._forward_hooks)) for inner in module.modules()]
    return state, flags, [(name, p.requires_grad) for name, p in module.named_parameters()]


def assert_same(one, other):
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for each in zip(one, other):
            assert_same(*each)
    else:
        assert one == other


def steps(make, call, forwards, is_reversed):
    """What the module holds after each backward, and the gradients of each step."""
    torch.manual_seed(0)
    module, noted = make(), []
    for _ in range(3):
        outputs = [call(module, torch.randn(2, 4, requires_grad=True)) for _ in range(forwards)]
        for output in outputs[::-1] if is_reversed else outputs:
            output.square().sum().backward()
            noted.append(held(module))
        noted.append([p.grad if p.grad is None else p.grad.clone() for p in module.parameters()])
        module.zero_grad()
    return noted


BORROWING = [Mode, Flag, Setting, SettingOfTorch, Note, Buffer, Weight, Table, Hook, Child]


@pytest.mark.parametrize("is_reversed", [False, True], ids=["first first", "last first"])
@pytest.mark.parametrize("make", [*BORROWING, Exchanged, Frozen, Growing])
def test_modules_hold_after_a_replay_what_they_held_before(make, is_reversed):
    assert_same(*(steps(make, call, 2, is_reversed) for call in (checkpoint, plain)))


class Stateful(nn.Module):
    """An LSTM that goes on where its last call has ended: a tuple of tensors."""

    def __init__(self, state) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(4, 4)
        if state != "added":
            self.state = None if state == "none" else (torch.zeros(2, 4), torch.zeros(2, 4))

    def forward(self, x):
        h, c = self.cell(nn.functional.dropout(x, 0.2), getattr(self, "state", None))
        self.state = h.detach(), c.detach()
        return h + c.sin()


class Counting(nn.Module):
    """A number that is set first in a forward, beside a buffer that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        self.mean.add_(x.detach().mean(0))
        return (self.linear(x) * self.calls + self.mean).sin()


@pytest.mark.parametrize("is_reversed", [False, True], ids=["first first", "last first"])
@pytest.mark.parametrize("make", [*(partial(Stateful, state) for state in ("none", "zeros", "added")), Counting])
def test_replays_find_tuples_of_tensors_and_first_numbers_as_their_forwards(make, is_reversed):
    noted = [steps(make, call, 3, is_reversed) for call in (checkpoint, plain)]
    assert_same(*noted)
    gradients = [each for each in noted[0] if isinstance(each, list)]
    assert all(gradient is not None for each in gradients for gradient in each)
