"""State of modules: a replay finds what the forward found, and leaves behind what is there when it begins."""
from __future__ import annotations

import threading
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils import spectral_norm as spectral_norm_hook

from tests.helpers import in_threads
from tests.settings import without_collector
from tests.slow import few
from torchckpt import checkpoint, checkpoint_module, is_recomputing
from torchckpt.errors import RecomputationError
from torchckpt.regions.state import layout, module_state
from torchckpt.testing import count_recomputes


class Average(nn.Module):
    """Scales by a running average, which it changes in its forward."""

    def __init__(self, how="in place", size=4) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(size, size), how
        self.register_buffer("average", torch.ones(size))

    def forward(self, x):
        h = self.linear(x)
        with torch.no_grad():
            new = self.average * 0.9 + h.mean(0) * 0.1
        if self.how == "in place":
            self.average.copy_(new)
        elif self.how == "replaced":
            self.average = new
        elif self.how == "by .data":
            self.average.data.copy_(new)
        return (h * self.average.clone()).sin().exp()


class Drawing(nn.Module):
    def __init__(self, generator=None) -> None:
        super().__init__()
        self.linear, self.generator = nn.Linear(4, 4), generator

    def forward(self, x):
        h = self.linear(x)
        return h.sin() * torch.rand(h.shape, generator=self.generator)


class Grows(nn.Module):
    """Makes a buffer in its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.rand(4))
        return (nn.functional.dropout(self.linear(x), 0.5) * self.scale).sin().exp()


def quantized():
    return nn.Sequential(nn.Linear(4, 4), torch.ao.quantization.FakeQuantize(), nn.Linear(4, 4), nn.Sigmoid())


def in_lists():
    inner = nn.ModuleDict({"a": Average(), "b": Average("replaced")})
    return nn.Sequential(inner["a"], nn.Dropout(0.3), inner["b"])


MAKES = {
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
    "spectral_norm, by hook": lambda: spectral_norm_hook(nn.Linear(4, 4)),
    "two of them": lambda: nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Dropout(), parametrizations.spectral_norm(nn.Linear(4, 4))
    ),
    "fake quantization": quantized,
    "buffer changed in place": Average,
    "buffer replaced": lambda: Average("replaced"),
    "buffer changed by .data": lambda: Average("by .data"),
    "large buffer changed by .data": lambda: nn.Sequential(nn.Linear(4, 1100), Average("by .data", 1100)),
    "buffers of several": in_lists,
    "buffer made in the first call": Grows,
    "generator of its own": lambda: Drawing(torch.Generator().manual_seed(3)),
    "lazy": lambda: nn.Sequential(nn.LazyLinear(4), nn.Dropout(0.5), nn.LazyLinear(4), nn.Tanh()),
    "lazy norm": lambda: nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Dropout(0.5), nn.Tanh()),
}


def steps(make, call, count=3, calls=2):
    """Outputs, gradients and state of some steps of so many calls each, all from one seed."""
    torch.manual_seed(5)
    module = make()
    seen = []
    for _ in range(count):
        torch.manual_seed(7)
        xs = [torch.randn(3, 4, requires_grad=True) for _ in range(calls)]
        outputs = [call(module, x) for x in xs]
        sum(output.sin().sum() for output in outputs).backward()
        seen += [output.detach() for output in outputs] + [x.grad for x in xs]
        seen += [parameter.grad.clone() for parameter in module.parameters()]
        seen += [buffer.clone() for buffer in module.buffers()] + [torch.rand(2)]
    return seen


def by_method(module, x):
    return checkpoint(module.forward, x)


def by_argument(module, x):
    return checkpoint(lambda function, x: function(x), module, x)


def by_module(module, x):
    with checkpoint_module(module):
        return module(x)


@few(6)
@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:.*torch.nn.utils.spectral_norm")
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature", "ignore:.*spectral_norm. is deprecated")
@pytest.mark.parametrize("way", [checkpoint, by_method, by_argument, by_module], ids=lambda way: way.__name__)
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_state_that_a_forward_changes(make, way):
    if way is by_method and make in (MAKES["lazy"], MAKES["lazy norm"], MAKES["spectral_norm, by hook"]):
        pytest.skip("what such a layer does by hooks is done for module(x) alone")
    expected = steps(make, lambda module, x: module(x))
    with count_recomputes() as recomputes:
        received = steps(make, way)
    assert len(received) == len(expected)
    assert all(map(torch.equal, received, expected))
    assert recomputes.total >= 4


class Forces(nn.Module):
    """Runs a backward through what has changed a buffer past its version counter."""

    def __init__(self, size) -> None:
        super().__init__()
        self.linear, self.average = nn.Linear(4, size), Average("by .data", size)

    def forward(self, x):
        energy = self.average(self.linear(x)).sum(-1, keepdim=True)
        return energy * torch.autograd.grad(energy.sum(), x, create_graph=True)[0]


@pytest.mark.parametrize("size", [4, 1100])
def test_a_backward_in_the_first_forward_that_changes_a_buffer(size):
    received, expected = (steps(lambda: Forces(size), call) for call in (checkpoint, lambda module, x: module(x)))
    assert all(map(torch.equal, received, expected))


@pytest.mark.parametrize("size", [4, 5000])
def test_a_buffer_of_a_dtype_that_cannot_be_compared(size):
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    module.register_buffer("packed", torch.zeros(size, dtype=torch.uint8).view(torch.float4_e2m1fn_x2))
    checkpoint(module, torch.randn(3, 4)).sum().backward()
    assert module[0].weight.grad is not None


def test_the_same_by_hand_and_ahead(call):
    for make in MAKES["spectral_norm"], Average, MAKES["buffer replaced"]:
        expected = steps(make, lambda module, x: module(x))
        assert all(map(torch.equal, steps(make, call), expected))


def test_nested_regions_of_a_layer_that_changes(call):
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.average = Average(), Average("replaced")

        def forward(self, x):
            return self.call(self.average, self.call(self.inner, x)).sin()

    def make(call):
        Outer.call = staticmethod(call)
        return Outer

    expected = steps(make(lambda module, x: module(x)), lambda module, x: module(x))
    assert all(map(torch.equal, steps(make(call), call), expected))


def test_a_module_has_its_own_buffers_again_after_a_replay():
    module = Average()
    own = module.average
    checkpoint(module, torch.randn(3, 4)).sum().backward()
    assert module.average is own
    module.how = "replaced"
    output = checkpoint(module, torch.randn(3, 4))
    replaced = module.average
    output.sum().backward()
    assert module.average is replaced


def test_a_module_has_its_own_buffers_again_after_a_replay_that_raises():
    class Raises(Average):
        def forward(self, x):
            y = super().forward(x)
            if is_recomputing() and self.raises:
                raise ZeroDivisionError
            return y.exp()

    module = Raises()
    module.raises = True
    own, x = module.average, torch.randn(3, 4)
    expected = steps(lambda: module, lambda module, x: module(x), count=1, calls=1)
    output = checkpoint(module, x)
    now = own.clone()
    with pytest.raises(ZeroDivisionError):
        output.sum().backward(retain_graph=True)
    assert module.average is own
    assert torch.equal(own, now)
    module.raises = False
    output.sum().backward()  # from the same state again
    assert expected


@pytest.mark.parametrize("change", ["in place", "another"])
def test_buffer_that_changes_after_the_forward(change):
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("scale", torch.full((4,), 2.0))

        def forward(self, x):
            return (self.linear(x) + self.scale).sin().exp()

    module, x = Scaled(), torch.randn(3, 4)
    expected = torch.autograd.grad(module(x).sum(), list(module.parameters()))
    output = checkpoint(module, x)
    if change == "in place":
        module.scale.zero_()
    else:
        module.scale = torch.zeros(4)
    changed = module.scale
    received = torch.autograd.grad(output.sum(), list(module.parameters()))
    assert all(map(torch.equal, received, expected))
    assert module.scale is changed
    assert not changed.any()


def clones(monkeypatch):
    made = []

    class Counted(layout.Copy):
        __slots__ = ()

        def __init__(self, buffer, table=None, has_values=True) -> None:
            made.extend([buffer.nbytes] * has_values)
            super().__init__(buffer, table, has_values)

    monkeypatch.setattr(module_state, "Copy", Counted)
    return made


def test_what_never_changes_is_copied_once_and_a_large_copy_is_dropped(monkeypatch):
    made = clones(monkeypatch)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    module.register_buffer("small", torch.ones(4))
    module.register_buffer("large", torch.ones(2**15))
    for _ in range(3):
        checkpoint(module, torch.randn(3, 4)).sum().backward()
    assert made == [16, 2**17]
    kept = {key: copy.values is None for key, copy in layout.layout_of(module)[0].copies.items()}
    assert kept == {(0, "small"): False, (0, "large"): True}


def test_what_changes_is_copied_once_a_call(monkeypatch):
    made = clones(monkeypatch)
    module = Average()
    for _ in range(3):
        checkpoint(module, torch.randn(3, 4)).sum().backward()
    assert made == [16] * 3


def test_batch_norm_is_not_copied(monkeypatch):
    made = clones(monkeypatch)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    checkpoint(module, torch.randn(3, 4)).sum().backward()
    assert made == []


def test_large_buffer_that_changes_at_first_in_a_later_call_is_an_error_and_then_right():
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.changes = nn.Linear(4, 4), False
            self.register_buffer("large", torch.ones(2**15))

        def forward(self, x):
            if self.changes:
                self.large.mul_(0.5)
            return (self.linear(x) * self.large[:4].clone()).sin().exp()

    module, x = Late(), torch.randn(3, 4)
    checkpoint(module, x).sum().backward()
    module.changes = True
    with pytest.raises(RecomputationError) as caught:
        checkpoint(module, x).sum().backward()
    assert str(caught.value) == (
        "one of the variables needed for gradient computation has been modified by an inplace operation: the replay of "
        "region 'test_large_buffer_that_changes_at_first_in_a_later_call_is_an_error_and_then_right.<locals>.Late' "
        "reads Late.large, [torch.FloatTensor [32768]], which was changed in place after the forward\n"
        "  works:    optimizer.step(), or another change of weights and buffers, after the backward"
    )
    before = module.large.clone()
    output = checkpoint(module, x)
    received = torch.autograd.grad(output.sum(), list(module.parameters()))
    module.large.copy_(before)
    assert all(map(torch.equal, received, torch.autograd.grad(module(x).sum(), list(module.parameters()))))


def test_of_a_module_that_is_closed_over_a_call_copies_so_many_bytes_of_buffers(monkeypatch):
    monkeypatch.setattr(module_state, "_MOST_BYTES", 2**17)
    made = clones(monkeypatch)
    module, x = Average(), torch.randn(3, 4)
    for name in "abc":
        module.register_buffer(name, torch.ones(2**14))
    for _ in range(2):
        average = module.average.clone()
        received = torch.autograd.grad(checkpoint(lambda x: module(x), x).sum(), list(module.parameters()))
        module.average.copy_(average)
        assert all(map(torch.equal, received, torch.autograd.grad(module(x).sum(), list(module.parameters()))))
    assert made.count(2**16) == 2  # once, two of three

    def changes(x):
        module.c.add_(1)
        return (module(x) * module.c[:4].clone()).sin()

    with pytest.raises(RecomputationError, match=r"Average\.c"):
        checkpoint(changes, x).sum().backward()
    checkpoint(changes, x).sum().backward()


def test_a_module_that_is_closed_over_may_use_behind_a_guard_what_it_updates_under_it():
    class Guarded(Average):
        def forward(self, x):
            h = self.linear(x)
            if not is_recomputing():
                self.average.mul_(0.5).add_(h.detach().mean(0))
            return (h * self.average.clone()).sin()

    module, x = Guarded(), torch.randn(3, 4)
    average = module.average.clone()
    received = torch.autograd.grad(checkpoint(lambda x: module(x), x).sum(), list(module.parameters()))
    module.average.copy_(average)
    assert all(map(torch.equal, received, torch.autograd.grad(module(x).sum(), list(module.parameters()))))


@pytest.mark.parametrize("is_closed_over", [False, True])
def test_module_that_gets_a_submodule_in_its_first_call_is_an_error(is_closed_over):
    class Builds(nn.Module):
        def forward(self, x):
            if not hasattr(self, "linear"):
                self.linear = nn.Linear(4, 4)
            return nn.functional.dropout(self.linear(x), 0.5).sin()

    module, x = Builds(), torch.randn(3, 4, requires_grad=True)
    function = (lambda x: module(x)) if is_closed_over else module
    with pytest.raises(RecomputationError) as caught:
        checkpoint(function, x).sum().backward()
    assert str(caught.value).startswith("the modules of region 'test_module_that_gets")
    assert str(caught.value).endswith(
        "are not those that its forward started with: some were added, removed or replaced since\n"
        "  works:    changes of modules after the backward; and a first call that creates some outside a region, under "
        "torch.no_grad()"
    )
    with count_recomputes() as recomputes:
        checkpoint(function, x).sum().backward()
    assert recomputes.total == 1


def test_a_module_beside_the_region_may_get_a_submodule():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)
    output = checkpoint(lambda x: model[0](x).sin(), x)
    model.append(nn.Linear(4, 2))
    received = torch.autograd.grad(output.sum(), model[0].weight)
    assert torch.equal(received[0], torch.autograd.grad(model[0](x).sin().sum(), model[0].weight)[0])


def test_a_parameter_that_comes_beside_another_that_is_replaced_is_an_error():
    """The replay read the new weight, and its gradients were wrong in silence."""
    model, x = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), torch.randn(3, 4, requires_grad=True)
    for _ in range(2):
        output = checkpoint(lambda x: model[0](x).tanh(), x)
        model[0].weight = nn.Parameter(torch.rand(4, 4))
    model[1].register_parameter("more", nn.Parameter(torch.rand(1)))
    with pytest.raises(RecomputationError, match="the parameters of region"):
        output.sum().backward()


def test_what_the_function_changes_is_lent_though_a_module_beside_it_gets_a_submodule():
    layer, beside, x = Average(), nn.Sequential(nn.Tanh()), torch.randn(3, 4)
    before = layer.average.clone()
    output = checkpoint(lambda x: layer(x).sin() if x.dim() else beside(x), x)
    beside.append(nn.Linear(4, 2))
    received = torch.autograd.grad(output.sum(), layer.linear.weight)
    layer.average.copy_(before)
    assert torch.equal(received[0], torch.autograd.grad(layer(x).sin().sum(), layer.linear.weight)[0])


def test_generator_that_comes_later_is_found_by_its_name():
    module = Drawing()
    checkpoint(module, torch.randn(3, 4)).sum().backward()
    module.generator = torch.Generator().manual_seed(3)
    x = torch.randn(3, 4)
    received = torch.autograd.grad(checkpoint(module, x).sum(), list(module.parameters()))
    module.generator.manual_seed(3)
    expected = torch.autograd.grad(module(x).sum(), list(module.parameters()))
    assert all(map(torch.equal, received, expected))


@pytest.mark.parametrize("twice", ["named too", "the default one"])
def test_a_generator_that_is_found_twice_is_put_back_once(twice):
    module, x = Drawing(), torch.randn(3, 4)
    module.generator = torch.Generator() if twice == "named too" else torch.default_generator
    output = checkpoint(module, x, generators=[module.generator])
    after = module.generator.get_state()
    output.sum().backward()
    assert torch.equal(module.generator.get_state(), after)


def test_a_module_by_a_computed_name_is_not_seen_but_by_values():
    """The limit that the page of limits lists."""
    Average.hidden, x = Average(), torch.randn(3, 4)
    with pytest.raises(RecomputationError, match="with other values"):
        checkpoint(lambda x: getattr(Average, "hid" + "den")(x), x, determinism_check="values").sum().backward()


class Counter(nn.Module):
    """Changes a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x):
        self.calls += 1
        return (self.linear(x) * self.calls).sin()


def test_a_python_attribute_is_not_seen_but_by_values():
    """The limit that the page of limits lists, and its remedy."""
    with pytest.raises(RecomputationError, match="with other values"):
        checkpoint(Counter(), torch.randn(3, 4), determinism_check="values").sum().backward()


class Mixing(nn.Module):
    """Has a buffer of an unusual kind."""

    def __init__(self, mixing, mix) -> None:
        super().__init__()
        self.linear, self.mix = nn.Linear(4, 4), mix
        self.register_buffer("mixing", mixing)

    def forward(self, x):
        return self.mix(self.mixing, self.linear(x)).tanh()


@pytest.mark.parametrize(
    ("make", "mix"),
    [(torch.inference_mode()(lambda: torch.randn(2, 4)), torch.add), (lambda: torch.randn(2, 2).to_sparse(), torch.mm)],
    ids=["inference tensor", "sparse"],
)
def test_buffer_of_an_unusual_kind(make, mix):
    module, x = Mixing(make(), mix), torch.randn(2, 4, requires_grad=True)
    expected, found = (torch.autograd.grad(call(x).sum(), x) for call in (module, partial(checkpoint, module)))
    assert torch.equal(found[0], expected[0])


def test_tensors_that_a_state_alone_may_hold():
    module = Average()
    module.register_buffer("sparse", torch.eye(2).to_sparse())
    found, _ = module_state.record_state(module, (), False)
    average, copy = found.tensors()
    assert average is module.average
    assert copy is not average
    assert torch.equal(copy, average)


def test_a_layout_does_not_keep_its_module():
    for module in Average(), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)):
        checkpoint(module, torch.randn(3, 4)).sum().backward()
    gone = weakref.ref(module)
    with without_collector():
        del module
        assert gone() is None


def test_replays_of_several_threads_leave_the_buffers_of_the_module():
    module = parametrizations.spectral_norm(nn.Linear(4, 4))
    own = dict(module.named_buffers())
    barrier = threading.Barrier(4)

    def train():
        barrier.wait()
        for _ in range(20):
            output = checkpoint(module, torch.randn(3, 4))
            torch.autograd.grad(output.sum(), list(module.parameters()))

    in_threads(train, train, train, train)
    assert all(buffer is own[name] for name, buffer in module.named_buffers())


def test_a_first_forward_beside_a_replay_of_another_thread_does_not_leave_its_substitute():
    """Nobody knows yet that the forward changes the buffer, so that no lock is held."""
    begins, reads, has_read, ends = (threading.Event() for _ in range(4))

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            if threading.current_thread() is slow:
                begins.set()
                assert reads.wait(10)
            elif is_recomputing():
                reads.set()
                assert has_read.wait(10)
            count = self.count
            if threading.current_thread() is slow:
                has_read.set()
                assert ends.wait(10)
            self.count = count.add_(1)
            return (x * self.weight).sin()

    module, x = Counts(), torch.ones(3)
    buffer = module.count
    slow = threading.Thread(target=lambda: checkpoint(module, x), daemon=True)
    slow.start()
    assert begins.wait(10)
    checkpoint(module, x).sum().backward()
    ends.set()
    slow.join(10)
    assert module.count is buffer


def test_eval_mode_and_training_mode_in_turn():
    def make():
        return nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.BatchNorm1d(4), Average())

    def in_turn(call):
        def run(module, x):
            module.train(not module.training)
            return call(module, x)

        return run

    expected = steps(make, in_turn(lambda module, x: module(x)), calls=1)
    assert all(map(torch.equal, steps(make, in_turn(checkpoint), calls=1), expected))
