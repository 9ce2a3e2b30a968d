"""A forward that changes parameters of its modules in place, or makes tensors of their numbers."""
from __future__ import annotations

import copy
from contextlib import suppress

import pytest
import torch
from torch import nn

from tests.helpers import assert_equal, by_hand, plain, prefetched
from torchckpt import checkpoint, is_recomputing
from torchckpt.errors import RecomputationError

CALLS = pytest.mark.parametrize("call", [checkpoint, by_hand, prefetched], ids=lambda call: call.__name__)


class Limited(nn.Module):
    """Two embeddings with ``max_norm``, of one weight in part, that rounding may scale twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.bag = nn.Embedding(9, 7, max_norm=0.7), nn.EmbeddingBag(9, 7, max_norm=0.3, norm_type=1.0)
        self.tied = nn.Embedding(9, 7, max_norm=0.5)
        self.tied.weight = self.words.weight

    def forward(self, x):
        ids = torch.arange(5, device=x.device)
        hidden = self.words(ids) * self.tied(ids + 2) + self.bag(ids[None]) * x
        return nn.functional.dropout(hidden, 0.5).sin()


class Clamped(nn.Linear):
    """Its weight is within bounds before it is read."""

    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.2, 0.2)
        return nn.functional.dropout(super().forward(x), 0.5).sin()


class Decayed(nn.Linear):
    """Its weight is another in each call, and read before."""

    def forward(self, x):
        scale = self.weight.detach().norm()
        with torch.no_grad():
            self.weight.mul_(0.9)
        return nn.functional.dropout(super().forward(x), 0.5).sin() * scale


class Scale(nn.Module):
    """A number at first, and a tensor from the first call on."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.calls = 1.5, 0

    def forward(self, x):
        self.calls += 1
        hidden = (x * self.scale).sin()
        self.scale = 0.5 * self.scale + hidden.detach().mean()
        return (hidden * self.scale).exp()


def steps(call, module, device, regions=2):
    """Three steps of training, with ``regions`` calls of the module in each: what they leave."""
    torch.manual_seed(1)
    module = copy.deepcopy(module).to(device)
    optimizer, left = torch.optim.SGD([*module.parameters(), torch.zeros(1, requires_grad=True)], 0.3), []
    for _ in range(3):
        x = torch.randn(5, 7, device=device, requires_grad=True)
        loss = sum(call(module, x * number).sum() for number in range(1, regions + 1))
        optimizer.zero_grad()
        loss.backward()
        left += [loss, x.grad, *(parameter.grad.clone() for parameter in module.parameters())]
        optimizer.step()
        left += [parameter.detach().clone() for parameter in module.parameters()]
    return left, [value for name, value in vars(module).items() if name == "scale"]


@CALLS
@pytest.mark.parametrize("make", [Limited, lambda: nn.Sequential(Scale(), nn.Dropout(0.5))], ids=["Limited", "Scale"])
def test_calls_are_equal_to_plain_ones(call, make, device):
    module = make()
    assert_equal(steps(call, module, device), steps(plain, module, device))


@CALLS
def test_one_call_a_step_of_a_clamped_weight_is_equal(call, device):
    module = Clamped(7, 7)
    assert_equal(steps(call, module, device, regions=1), steps(plain, module, device, regions=1))


def test_a_weight_that_is_clamped_and_then_replaced_by_the_optimizer_is_that_of_the_forward(device):
    module, left = Clamped(7, 7).to(device), []
    x = torch.randn(5, 7, device=device, requires_grad=True)
    for call in (plain, checkpoint):
        torch.manual_seed(1)
        own = copy.deepcopy(module)
        checkpoint(own, x).sum().backward()  # now it is known what the forward changes
        loss = call(own, x).sum()
        versions = own.weight._version
        left.append(torch.autograd.grad(loss, [x, own.bias]))
        assert own.weight._version == versions
    assert_equal(left[1], left[0])


def test_a_weight_that_is_read_before_it_is_changed_is_an_error_once_and_right_from_then_on(device):
    module, x = Decayed(7, 7).to(device), torch.randn(5, 7, device=device, requires_grad=True)
    loss = checkpoint(module, x).sum()
    with pytest.raises(RecomputationError) as caught:
        loss.backward()
    assert "changed Decayed.weight in place, for the first time, after it had read it" in str(caught.value)
    assert "works:    the change before the region; or the step once more" in str(caught.value)
    found = []
    for call in (plain, checkpoint):
        own = copy.deepcopy(module)
        if call is checkpoint:
            checkpoint(own, x)  # known by now
            own.load_state_dict(module.state_dict())
        torch.manual_seed(1)
        found.append(torch.autograd.grad(call(own, x).sum(), [x, *own.parameters()]))
    assert_equal(found[1], found[0])


def test_a_number_that_becomes_a_tensor_is_the_number_in_the_replay_and_the_tensor_after_it():
    module, x = Scale(), torch.randn(4, requires_grad=True)
    loss = checkpoint(module, x).sum()
    scale = module.scale
    (gradient,) = torch.autograd.grad(loss, x)
    assert module.scale is scale
    assert module.calls == 1  # as of the plain module: it goes with the tensor
    (expected,) = torch.autograd.grad(Scale()(x).sum(), x)
    assert torch.equal(gradient, expected)


def test_a_large_buffer_made_in_inference_mode_is_that_of_the_forward():
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with torch.inference_mode():
                self.register_buffer("shift", torch.randn(40, 40))

        def forward(self, x):
            return (x + self.shift).sin().exp()

    module, x = Shifted(), torch.randn(40, 40, requires_grad=True)
    (expected,) = torch.autograd.grad(module(x).sum(), x)
    loss = checkpoint(module, x).sum()
    with torch.inference_mode():
        module.shift.add_(1)
    assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


class OwnNorm(nn.BatchNorm1d):
    """A norm layer of the user's, whose call is torch's."""


class NormLast(nn.Module):
    """A replay ends inside of the call of the norm layer."""

    def __init__(self, norm) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), norm(4)

    def forward(self, x):
        return self.norm(self.linear(x))


class NormRead(NormLast):
    """Reads the statistics itself, as torch's ConvBn2d does, which trains quantized weights."""

    def forward(self, x):
        return super().forward(x * self.norm.running_var.clone())


def scale_of(norm):
    return (norm.running_var + norm.eps).rsqrt()


class NormReadByProperty(NormLast):
    @property
    def scale(self):
        return self.norm.running_var.clone()

    def forward(self, x):
        return super().forward(x * self.scale)


class NormReadByDecorated(NormLast):
    @torch.no_grad()
    def scale(self):
        return self.norm.running_var.clone()

    def forward(self, x):
        return super().forward(x * self.scale())


class NormReadByFunction(NormLast):
    def forward(self, x):
        return super().forward(x * scale_of(self.norm))


class NormReadBehind(NormLast):
    """Reads what the call has made of the statistics, as a batch renormalization does."""

    def forward(self, x):
        return (super().forward(x) / self.norm.running_var.sqrt()).exp() + self.norm.running_mean


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, OwnNorm])
@pytest.mark.parametrize(
    "cls", [NormLast, NormRead, NormReadBehind, NormReadByProperty, NormReadByDecorated, NormReadByFunction]
)
def test_statistics_of_a_norm_layer_whose_call_ends_the_replay(call, cls, norm):
    def steps(call):
        torch.manual_seed(1)
        module, xs = cls(norm), [torch.randn(5, 4, requires_grad=True) for _ in range(3)]
        for x in xs:
            call(module, x).sin().sum().backward()
        return [*(x.grad for x in xs), *(p.grad for p in module.parameters()), *module.buffers()]

    assert all(map(torch.equal, steps(call), steps(lambda module, x: module(x))))


class Turned(torch.Tensor):
    """Has another ``sin``. A loss of it runs its backward where subclasses do not see functions."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(torch.Tensor.cos if func is torch.Tensor.sin else func, types, args, kwargs)


class Named(nn.Parameter):
    """A parameter of the user's."""


class Halves(nn.Module):
    """Changes its weight in place."""

    def __init__(self, make) -> None:
        super().__init__()
        self.weight, self.classes = make(torch.linspace(0.1, 1, 4)), []

    def forward(self, x):
        with torch.no_grad():
            self.weight.mul_(0.5)
        self.classes.append((type(self.weight), isinstance(self.weight, nn.Parameter)))
        return (self.weight.sin() * x).exp()


@pytest.mark.parametrize("make", [lambda values: nn.Parameter(values.as_subclass(Turned)), Named])
def test_a_parameter_of_a_subclass_that_changes_in_place_is_one_in_the_replay(call, make):
    def gradients(call):
        module, x = Halves(make), torch.linspace(0, 1, 4, requires_grad=True)
        with suppress(RecomputationError):  # in the first step it is not known
            call(module, x).sum().backward()
        module.zero_grad()
        module.classes.clear()
        loss = call(module, x).sum()
        gradients = torch.autograd.grad(loss, [x, module.weight])
        assert set(module.classes) == {(type(module.weight), True)}
        return [gradient.as_subclass(torch.Tensor) for gradient in gradients]

    assert all(map(torch.equal, gradients(call), gradients(lambda module, x: module(x))))


class Angles(nn.Module):
    """A table that grows with the number beside it, as that of a rotary embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def forward(self, x):
        if len(x) > self.length:
            self.length = len(x)
            self.register_buffer("table", torch.arange(self.length)[:, None] / 7 + 1, persistent=False)
        return x * self.table[: len(x)]


class Started(nn.Module):
    """Its weight and its buffer are set by the first call, which a flag notes."""

    def __init__(self) -> None:
        super().__init__()
        self.is_started = False
        self.shift = nn.Parameter(torch.zeros(7))
        self.register_buffer("scale", torch.ones(7))

    def forward(self, x):
        if not self.is_started:
            with torch.no_grad():
                self.shift.copy_(x.mean(0))
                self.scale.copy_(1 / x.std(0))
            self.is_started = True
        return (x - self.shift) * self.scale


class Average(nn.Module):
    """A running average, corrected by the number of calls."""

    def __init__(self, is_replaced: bool) -> None:
        super().__init__()
        self.calls, self.is_replaced = 0, is_replaced
        self.register_buffer("mean", torch.zeros(7))

    def forward(self, x):
        self.calls += 1
        with torch.no_grad():
            mean = self.mean * 0.9 + 0.1 * x.mean(0)
            if self.is_replaced:
                self.mean = mean
            else:
                self.mean.copy_(mean)
        return x * torch.sigmoid(self.mean / (1 - 0.9**self.calls))


class Guarded(Average):
    """Of what is counted once by a guard, a replay finds the number that the forward has left."""

    def forward(self, x):
        if not is_recomputing():
            self.calls += 1
            self.mean += 1
        return x.sin() * self.calls


MAKES = [Angles, Started, lambda: Average(True), lambda: Average(False), lambda: Guarded(True)]


@pytest.mark.parametrize("make", MAKES)
@CALLS
def test_numbers_that_go_with_the_tensors_of_a_module_are_those_of_the_forward(call, make):
    found, numbers = [], []
    for way in (plain, call):
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(7, 7), make(), nn.Dropout(0.3), nn.Tanh())
        for length in (4, 6, 5, 9):
            x = torch.randn(length, 7, requires_grad=True)
            way(module, x).sum().backward()
            found.append([x.grad, *(p.grad for p in module.parameters()), *module.buffers()])
        numbers.append([value for value in vars(module[1]).values() if isinstance(value, (bool, int))])
    assert_equal(found[4:], found[:4])
    assert numbers[0] == numbers[1]


class Borrowed(nn.Module):
    """Takes a parameter or a child away while it runs, and puts it back as the last one of its table."""

    def __init__(self, table: str) -> None:
        super().__init__()
        self.table = table
        if table == "_parameters":
            self.a, self.b = (nn.Parameter(torch.randn(7)) for _ in range(2))
        else:
            self.a, self.b = nn.Linear(7, 7), nn.Linear(7, 7)

    def forward(self, x):
        table = getattr(self, self.table)
        taken = table.pop("a")
        try:
            h = x * taken.exp() if isinstance(taken, nn.Parameter) else taken(x)
            h = h.sin() * self.b if isinstance(taken, nn.Parameter) else self.b(h.sin())
        finally:
            table["a"] = taken
        return nn.functional.dropout(h, 0.3).tanh()


@pytest.mark.parametrize("table", ["_parameters", "_modules"])
@CALLS
def test_what_a_forward_takes_away_and_puts_back_has_its_name_in_the_replay(call, table):
    """The order of the table is another then. Parameters were exchanged in silence, children an error."""
    found = []
    for way in (plain, call):
        torch.manual_seed(1)
        module, x = nn.Sequential(Borrowed(table), nn.Tanh()), torch.randn(4, 7, requires_grad=True)
        outputs = [way(module, x) for _ in range(3)]
        for output in reversed(outputs):
            output.sum().backward()
        found.append([*outputs, x.grad, *(p.grad for _, p in sorted(module.named_parameters()))])
    assert_equal(found[1], found[0])


class Exchanged(nn.Module):
    """Takes both parameters away, and puts each back by the name of the other, in the order of before."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(7)) for _ in range(2))

    def forward(self, x):
        self._parameters.update(dict(zip("ba", [self._parameters.pop(name) for name in "ab"])))
        return nn.functional.dropout(x * self.a.exp(), 0.3).sin() * self.b


@CALLS
def test_parameters_whose_names_a_forward_exchanges(call):
    found = []
    for way in (plain, call):
        torch.manual_seed(1)
        module, x = Exchanged(), torch.randn(4, 7, requires_grad=True)
        for _ in range(3):
            way(module, x).sum().backward()
        found.append([x.grad, module.a.grad, module.b.grad])
    assert_equal(found[1], found[0])


def test_parameters_that_have_other_names_by_the_replay_are_an_error():
    module = Borrowed("_parameters")
    loss = checkpoint(module, torch.randn(4, 7)).sum()
    module.c = module._parameters.pop("a")
    with pytest.raises(RecomputationError, match="the parameters of region"):
        loss.backward()


class Alternates(nn.Module):
    """Uses in each second call what the last one has left: a buffer that is None else, or an attribute."""

    def __init__(self, is_buffer: bool) -> None:
        super().__init__()
        self.is_buffer = is_buffer
        if is_buffer:
            self.register_buffer("last", None)

    def forward(self, x):
        last = getattr(self, "last", None)
        if last is None:
            self.last = x.detach() + 1
        elif self.is_buffer:
            self.last = None
        else:
            del self.last
        return nn.functional.dropout(x, 0.3).sin() * (2.0 if last is None else last)


@pytest.mark.parametrize("is_buffer", [True, False])
@CALLS
def test_a_replay_leaves_nothing_where_two_forwards_have_come_back_to_nothing(call, is_buffer):
    found = []
    for way in (plain, call):
        torch.manual_seed(1)
        module, inputs = Alternates(is_buffer), [torch.randn(3, 7, requires_grad=True) for _ in range(6)]
        for x, y in zip(inputs[::2], inputs[1::2]):
            outputs = [way(module, x), way(module, y)]
            for output in reversed(outputs):
                output.square().sum().backward()
        found.append([getattr(module, "last", None), *(x.grad for x in inputs)])
    assert_equal(found[1], found[0])
