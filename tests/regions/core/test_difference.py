"""A replay that differs: the error names the operation and the line of both, the module, and what is likely."""
from __future__ import annotations

import random
import re
import sys
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torchs
from torch.utils.checkpoint import set_checkpoint_debug_enabled

from tests.helpers import leaf
from tests.settings import without_collector
from torchckpt import (
    ArgumentError,
    Checkpointing,
    Pipe,
    RecomputationError,
    checkpoint,
    checkpoint_layers,
    checkpoint_module,
    is_recomputing,
)
from torchckpt.regions.core import frame, slots
from torchckpt.testing import saved_by_line

HERE = Path(__file__).relative_to(Path.cwd())
LINES = Path(__file__).read_text().splitlines()


def line_of(mark: str) -> str:
    """``file:line`` of the line that ends with ``# mark``."""
    (number,) = [number for number, text in enumerate(LINES, 1) if text.endswith(f"# {mark}")]
    return f"{HERE}:{number}"


# thirty differences ---------------------------------------------------------------------------------------------------


class Part(nn.Module):
    """A module with layers of all kinds, of which each case runs one part."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.batch_norm = nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4)
        self.dropout, self.conv = nn.Dropout(0.5), nn.Conv1d(2, 2, 1)
        self.calls, self.cache = 0, []
        self.generators = [torch.Generator().manual_seed(1)]  # in a list: no replay finds it
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.ones(4))


class RouterCounts(Part):
    def forward(self, x):
        h = self.linear(x)
        chosen = h[:2] if is_recomputing() else h[:3]  # nothing is saved for it
        return chosen.sin()  # router counts


class RouterIndex(Part):
    def forward(self, x):
        rows = torch.tensor([0, 1] if is_recomputing() else [0, 1, 1])
        return self.linear(x)[rows].cos()  # router index


class RouterTopK(Part):
    def forward(self, x):
        return x.topk(1 if is_recomputing() else 2)[0].cos()  # router topk


class GrowingCache(Part):
    def forward(self, x):
        self.cache.append(self.linear(x))
        return torch.cat([one.detach() for one in self.cache[:-1]] + self.cache[-1:]).tanh()  # growing cache


class CacheOnce(Part):
    def forward(self, x):
        if not self.cache:
            self.cache.append((x * self.scale).sum())  # cache once, forward
        return self.linear(x) * self.cache[0]  # cache once, replay


class Autocast(Part):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=not is_recomputing()):
            return self.linear(x).sin()  # autocast


class CastSince(Part):
    def forward(self, x):
        return F.linear(x.to(self.linear.weight.dtype), self.linear.weight).exp()  # cast since


class Dropout(Part):
    def forward(self, x):
        return self.dropout(self.linear(x)).sin()  # dropout


class FunctionalDropout(Part):
    def forward(self, x):
        return F.dropout(x.exp(), 0.5).sin()  # functional dropout


class OtherMode(Part):
    def forward(self, x):
        h = F.dropout(self.linear(x).exp(), training=SETTINGS["training"])  # other mode, forward
        return h.sin()  # other mode, replay


class NoiseOfItsOwn(Part):
    def forward(self, x):
        return (x + torch.randn(x.shape, generator=self.generators[0])).sin()  # noise


class HiddenNoise(Part):
    def forward(self, x):
        return self.linear(x * globals()["ran" + "dom"].gauss(0, 1)).exp()  # hidden noise


class Counter(Part):
    def forward(self, x):
        self.calls += 1
        h = x * self.calls  # nothing is saved for it
        return h.sigmoid()  # counter


class BranchOnCounter(Part):
    def forward(self, x):
        self.calls += 1
        if self.calls > 1:
            x = x.tanh()  # branch, replay
        return self.linear(x.exp())  # branch, forward


class LessWork(Part):
    def forward(self, x):
        h = x.sin()
        return h if is_recomputing() else h.cos()  # less work


class MoreWork(Part):
    def forward(self, x):
        h = x.sin()
        return h.cosh() if is_recomputing() else h  # more work


class WeightChanged(Part):
    def forward(self, x):
        return (x * self.scale).exp()  # weight changed


class WeightOfLinear(Part):
    def forward(self, x):
        return self.linear(x.sin())  # weight of linear


class BufferChanged(Part):
    def forward(self, x):
        return (x * self.table[0]).sin()  # buffer changed


class GlobalChanged(Part):
    def forward(self, x):
        return x.clamp(0, SETTINGS["most"]).square()  # global changed


SETTINGS: dict[str, Any] = {}


class WritesOutside(Part):
    def forward(self, x):
        torch.sin(x.detach(), out=OUTSIDE)
        return (x * OUTSIDE).exp()  # writes outside


OUTSIDE = torch.empty(3, 4)


class OtherKernel(Part):
    def forward(self, x):
        q = self.linear(x).view(1, 1, 3, 4)
        if is_recomputing():
            return (q @ q.mT).softmax(-1) @ q  # other kernel, replay
        return F.scaled_dot_product_attention(q, q, q)  # other kernel, forward


class OtherNorm(Part):
    def forward(self, x):
        h = x.exp()
        if is_recomputing():
            return self.norm(h)  # other norm, replay
        return self.batch_norm(h)  # other norm, forward


class OtherActivation(Part):
    def forward(self, x):
        h = self.linear(x)
        return h.tanh() if is_recomputing() else h.sigmoid()  # other activation


class OfAFunction(Part):
    def forward(self, x):
        return Cube.apply(x[:1] if is_recomputing() else x)  # function


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad * ctx.saved_tensors[0] ** 2


class InnerRegion(Part):
    def forward(self, x):
        h = x.exp()
        return checkpoint(torch.sin, h[:1] if is_recomputing() else h)  # inner region


class InnerRegionOfTorch(Part):
    def forward(self, x):
        h = x.exp()
        return torchs(torch.sin, h[:1] if is_recomputing() else h, use_reentrant=False)  # inner region of torch


class Deep(Part):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), Sometimes()))

    def forward(self, x):
        return self.layers(x)


class Sometimes(nn.Module):
    def forward(self, x):
        return x.double().exp() if is_recomputing() else x.exp()  # deep


class Convolution(Part):
    def forward(self, x):
        images = x[:, :2].reshape(1, 2, 3)
        return self.conv(images[..., :2] if is_recomputing() else images)  # convolution


class Loss(Part):
    def forward(self, x):
        rows = 2 if is_recomputing() else 3
        return F.cross_entropy(x[:rows], torch.tensor([0, 1, 1])[:rows])  # loss


class Broadcast(Part):
    def forward(self, x):
        y = self.scale if is_recomputing() else self.scale.expand(3, 4)
        return x.exp() * y  # broadcast


class Case(NamedTuple):
    part: type[Part]
    forward: tuple[str, str]
    """The operation in the forward, and the mark of its line."""
    replay: tuple[str, str]
    cause: str
    """The beginning of one of the three likely causes."""
    module: str = ""
    """The path of the module, below that of the part."""
    since: Callable[[Part], object] = lambda part: None
    """What changes between the forward and the replay."""
    options: Mapping[str, Any] = MappingProxyType({})


def same(operation: str, line: str) -> tuple[tuple[str, str], tuple[str, str]]:
    return (operation, line), (operation, line)


NOTHING = "", ""
VALUES = {"determinism_check": "values"}
UNSEEDED = {**VALUES, "preserve_rng_state": False}
ROUTER, CACHE, STATE = "a choice that differs", "a cache that grew", "state that the function changes itself"
DRAWS, GENERATOR = "random numbers that no replay draws again", "a generator that no replay sets"
ONCE = "work that the first call alone does"
WEIGHT, CHANGED = "a weight that changed", "a parameter, buffer or global that changed"

CASES = [
    Case(RouterCounts, *same("Sin", "router counts"), ROUTER),
    Case(RouterIndex, *same("Index", "router index"), ROUTER),
    Case(RouterTopK, *same("Topk", "router topk"), ROUTER),
    Case(GrowingCache, *same("Tanh", "growing cache"), CACHE),
    Case(CacheOnce, ("Mul", "cache once, forward"), ("Addmm", "cache once, replay"), STATE),
    Case(Autocast, *same("Addmm", "autocast"), "autocast", "linear"),
    Case(CastSince, *same("Mm", "cast since"), "a module that was cast", "", lambda part: part.bfloat16()),
    Case(Dropout, *same("Mul", "dropout"), DRAWS, "dropout", options=UNSEEDED),
    Case(FunctionalDropout, *same("Mul", "functional dropout"), DRAWS, options=UNSEEDED),
    Case(
        OtherMode, ("Mul", "other mode, forward"), ("Sin", "other mode, replay"), "training=", "",
        lambda part: SETTINGS.update(training=False), VALUES,
    ),
    Case(NoiseOfItsOwn, *same("Sin", "noise"), GENERATOR, options=VALUES),
    Case(HiddenNoise, *same("Addmm", "hidden noise"), GENERATOR, "linear", options=VALUES),
    Case(Counter, *same("Sigmoid", "counter"), STATE, options=VALUES),
    Case(BranchOnCounter, ("Exp", "branch, forward"), ("Tanh", "branch, replay"), STATE, options=VALUES),
    Case(LessWork, ("Cos", "less work"), NOTHING, ONCE),
    Case(MoreWork, NOTHING, ("Cosh", "more work"), ONCE, options={"early_stop": False}),
    Case(WeightChanged, *same("Mul", "weight changed"), WEIGHT, "", lambda part: part.scale.data.add_(1), VALUES),
    Case(
        WeightOfLinear, *same("Addmm", "weight of linear"), WEIGHT, "linear",
        lambda part: part.linear.weight.data.add_(1), VALUES,
    ),
    Case(BufferChanged, *same("Mul", "buffer changed"), CHANGED, "", lambda part: part.table.data.add_(1), VALUES),
    Case(GlobalChanged, *same("Pow", "global changed"), CHANGED, "", lambda part: SETTINGS.update(most=0.1), VALUES),
    Case(WritesOutside, *same("Mul", "writes outside"), "a tensor from outside"),
    Case(
        OtherKernel, ("ScaledDotProductFlashAttentionForCpu", "other kernel, forward"), ("Bmm", "other kernel, replay"),
        STATE,
    ),
    Case(
        OtherNorm, ("NativeBatchNorm", "other norm, forward"), ("NativeLayerNorm", "other norm, replay"), "training=",
        "batch_norm",
    ),
    Case(OtherActivation, ("Sigmoid", "other activation"), ("Tanh", "other activation"), STATE, options=VALUES),
    Case(OfAFunction, *same("Cube", "function"), ROUTER),
    Case(InnerRegion, *same("checkpoint", "inner region"), STATE),
    Case(InnerRegionOfTorch, *same("checkpoint", "inner region of torch"), STATE),
    Case(Deep, *same("Exp", "deep"), "a module that was cast", "layers.1.1"),
    Case(Convolution, *same("Convolution", "convolution"), ROUTER, "conv"),
    Case(Loss, *same("LogSoftmax", "loss"), ROUTER),
    Case(Broadcast, *same("Mul", "broadcast"), STATE),
]


HINT = "; torch.utils.checkpoint.set_checkpoint_debug_enabled(True) shows its line"


class Model(nn.Module):
    """Its second block is a region."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Identity(), case.part()])
        self._case = case

    def forward(self, x, **options):
        return checkpoint(self.blocks[1], self.blocks[0](x), **self._case.options, **options)


@pytest.fixture(params=CASES, ids=lambda case: case.part.__name__)
def case(request):
    random.seed(1)
    SETTINGS.update(most=1.0, training=True)
    return request.param


def message_of(case: Case, **options: Any) -> list[str]:
    model = Model(case)
    loss = model(leaf(3, 4), **options).float().sum()
    case.since(model.blocks[1])
    with pytest.raises(RecomputationError) as caught:
        loss.backward()
    return str(caught.value).split("\n")


def made(of: tuple[str, str]) -> re.Pattern[str]:
    """The end of a line: the operation and its line."""
    operation, mark = of
    if not operation:
        return re.compile("nothing, it had ended")
    return re.compile(rf"\w+ \(.*\) on cpu.*, for {operation}( \(\w+\))? at {re.escape(line_of(mark))}")


def test_the_error_names_both_operations_and_their_lines_in_five_lines(case):
    first, forward, replay, likely, works = message_of(case, debug=True)
    module = ".".join(filter(None, ["blocks.1" if case.forward[0] else case.part.__name__, case.module]))
    assert re.fullmatch(
        rf"the replay of region '{case.part.__name__}' did not save what its forward saved: tensor \d+ of \d+"
        rf", in {re.escape(module)}",
        first,
    )
    assert made(case.forward).fullmatch(forward.removeprefix("  forward saved: "))
    assert made(case.replay).fullmatch(replay.removeprefix("  replay saved:  "))
    causes = likely.removeprefix("  likely:        ")
    assert re.match(r"\(1\) .*; \(2\) .*; \(3\) ", causes)
    assert re.search(rf"\(\d\) {re.escape(case.cause)}", causes)
    assert re.match(r"  works:         \(1\) .*; \(2\) .*; \(3\) ", works)


class Keys:
    """A cache of keys, as transformers passes to its layers."""

    def __init__(self):
        self.keys = [torch.ones(1, 4)]

    def update(self, more):
        self.keys.append(more)
        return torch.cat(self.keys)


def test_a_cache_among_the_arguments_is_the_likeliest_where_another_operation_saves_what_it_holds():
    outputs = checkpoint(lambda x, cache: (x @ cache.update(x).mT).sum(-1), leaf(3, 4), Keys())
    with pytest.raises(RecomputationError, match=r"likely: +\(1\) a cache that grew.*\n.*\(1\) use_cache=False, or "):
        outputs.sum().backward()


def test_without_debug_all_but_the_line_of_the_forward_is_known(case):
    _, forward, replay, *_ = message_of(case)
    operation, _ = case.forward
    if operation:
        known = f", for {operation}" if operation != "checkpoint" else ""
        assert re.fullmatch(rf"  forward saved: .*{known}{re.escape(HINT)}", forward)
    assert made(case.replay).fullmatch(replay.removeprefix("  replay saved:  "))


# what is known when ---------------------------------------------------------------------------------------------------


def fewer(x):
    h = x.sin()
    return h if is_recomputing() else h.exp()  # fewer


def prefetched(function, *args):
    region = Checkpointing(function, *args)
    region.checkpoint()
    region.prefetch()


def torchs_debug_of(enabled, call) -> str:
    with set_checkpoint_debug_enabled(enabled), pytest.raises(RecomputationError) as caught:
        call()
    return str(caught.value)


def told(call) -> str:
    return torchs_debug_of(None, lambda: call(leaf(3, 4)).sum().backward())


def test_a_replay_that_no_backward_has_started_knows_the_forwards_operation_with_debug_alone():
    operation = "forward saved: float32 (4,) on cpu, for Exp"
    assert f"forward saved: float32 (4,) on cpu{HINT}\n" in torchs_debug_of(False, lambda: prefetched(fewer, leaf(4)))
    text = torchs_debug_of(True, lambda: prefetched(fewer, leaf(4)))
    assert f"{operation} at {line_of('fewer')}\n" in text


class Sometime(nn.Module):
    def forward(self, x):
        return x[:1].cosh() if is_recomputing() else x.exp()  # sometime


def checkpointed_module(x):
    module = nn.Sequential(nn.Identity(), Sometime())
    checkpoint_module(module[1])
    return module(x)


def test_torchs_context_sets_it_for_modules_and_pipes_and_overrides_the_argument():
    places = f"for Exp at {line_of('sometime')}\n", f"for Cosh at {line_of('sometime')}\n"
    pipe = Pipe(nn.Sequential(nn.Linear(4, 4), Sometime()), balance=[2], chunks=1, checkpoint="always")
    for call in (checkpointed_module, pipe):
        text = torchs_debug_of(True, lambda call=call: call(leaf(3, 4)).sum().backward())
        assert all(place in text for place in places)
    assert ", in 1\n" in text
    text = torchs_debug_of(False, lambda: checkpoint(Sometime(), leaf(4), debug=True).sum().backward())
    assert f"for Exp{HINT}\n" in text


def test_a_region_by_hand_notes_the_line_of_the_forward_with_debug():
    for options, end in ({}, HINT), ({"debug": True}, f" at {line_of('sometime')}"):
        text = told(lambda x, options=options: Checkpointing(Sometime(), x, **options).checkpoint())
        assert f"  forward saved: float32 (3, 4) on cpu, for Exp{end}\n" in text
    with pytest.raises(ArgumentError, match=r"^Checkpointing: debug is not a bool"):
        Checkpointing(Sometime(), leaf(4), debug=1)


@pytest.mark.parametrize("budget", [{}, {"budget": "50%"}], ids=["", "budget"])
def test_layers_note_the_line_of_the_forward_with_debug(budget):
    model = nn.Sequential(nn.Linear(4, 4), Sometime())
    for options, module, end in ({}, "Sometime", HINT), ({"debug": True}, "1", f" at {line_of('sometime')}"):
        with checkpoint_layers(model, Sometime, **budget, **options):
            text = told(model)
        assert f", in {module}\n  forward saved: float32 (3, 4) on cpu, for Exp{end}\n" in text
        assert f"  replay saved:  float32 (1, 4) on cpu, for Cosh at {line_of('sometime')}\n" in text


# the replay that differs is the one that is described -----------------------------------------------------------------


class Counts(nn.Module):
    """One of its calls differs. The next would not."""

    def __init__(self, different: int = 2) -> None:
        super().__init__()
        self.calls, self.different = 0, different

    def forward(self, x):
        self.calls += 1
        if self.calls == self.different:
            x = x[:1].cosh()  # counts
        return x.exp()


def in_pipe(**options):
    return lambda part: Pipe(nn.Sequential(nn.Linear(4, 4), part), chunks=1, checkpoint="always", **options)


def in_layers(part):
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Identity(), part))
    checkpoint_layers(model, "1")
    return model


@pytest.mark.parametrize(
    ("made_of", "module"),
    [
        (lambda part: lambda x: checkpoint(part, x), "Counts"),
        (lambda part: lambda x: checkpoint(nn.Sequential(nn.Identity(), part), x), "1"),
        (lambda part: lambda x: checkpoint(part.forward, x), "Counts"),
        (in_layers, "1"),
        (in_pipe(balance=[2]), "Counts"),
        (in_pipe(balance=[1, 1]), "Counts"),
    ],
    ids=["checkpoint", "inside of a module", "method", "inside of a layer", "Pipe", "Pipe of two stages"],
)
def test_what_differs_once_is_told_of_the_call_in_which_it_did(made_of, module):
    part = Counts()
    text = told(made_of(part))
    assert f", in {module}\n  forward saved: float32 (3, 4) on cpu, for Exp{HINT}\n" in text
    assert f"\n  replay saved:  float32 (1, 4) on cpu, for Cosh at {line_of('counts')}\n" in text
    assert part.calls == 2  # nothing is run for the error


@pytest.mark.parametrize(("different", "operation", "mark"), [(2, "Cos", "around"), (3, "Cosh", "counts")])
def test_of_nested_regions_the_one_that_differs_is_told_of(different, operation, mark):
    """The second call of the inner one is in the replay of the outer one, the third is its own replay."""
    part = Counts(different)

    def around(x):
        return checkpoint(part, x.tanh()).cos()  # around

    text = told(lambda x: checkpoint(around, x))
    assert f"  replay saved:  float32 (1, 4) on cpu, for {operation} at {line_of(mark)}\n" in text
    assert part.calls == different


def test_an_operation_whose_result_is_dropped_is_known_by_its_line():
    def function(x):
        (x[:1] if is_recomputing() else x).exp()  # dropped
        return x.sin()

    text = torchs_debug_of(True, lambda: checkpoint(function, leaf(4)).sum().backward())
    assert f"forward saved: float32 (4,) on cpu, at {line_of('dropped')}\n" in text
    assert f"replay saved:  float32 (1,) on cpu, at {line_of('dropped')}\n" in text


def test_two_different_tensors_of_one_line_are_told_apart_by_their_operations():
    def function(x):
        return x.sin().tanh().exp()[: 2 if is_recomputing() else 4].cos().square()  # five

    text = torchs_debug_of(True, lambda: checkpoint(function, leaf(4)).sum().backward())
    assert "tensor 4 of 5\n" in text
    assert text.count(f"for Cos at {line_of('five')}\n") == 2


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf")  # of Dynamo's own
def test_of_compiled_code_the_line_is_the_users():
    layer = torch.compile(nn.Linear(4, 4), backend="eager")

    def function(x):
        return layer(x[:1] if is_recomputing() else x).sin()  # compiled

    text = torchs_debug_of(True, lambda: checkpoint(function, leaf(3, 4)).sum().backward())
    assert text.count(f", for Addmm at {line_of('compiled')}\n") == 2


# nothing else changes -------------------------------------------------------------------------------------------------


def calls_of(function) -> int:
    """The calls of Python and of C in ``function``; the fewest of several, since the first ones fill caches."""
    counts = []
    for _ in range(5):
        calls = []
        sys.setprofile(lambda frame, event, argument, calls=calls: calls.append(event))
        try:
            function()
        finally:
            sys.setprofile(None)
        counts.append(calls.count("call") + calls.count("c_call"))
    return min(counts)


def fails(name: str) -> Callable[..., Any]:
    def fail(*_):
        pytest.fail(f"{name} is called")

    return fail


def test_with_debug_off_a_forward_makes_no_call_for_it(monkeypatch):
    """With it, calls come in for each saved tensor; without it, none of the code that finds places runs."""
    for module in (frame, slots):
        for name in {"place_of", "newest_node", "holders_behind"} & vars(module).keys():
            monkeypatch.setattr(module, name, fails(name))
    layer, x = nn.Linear(4, 4), leaf(2, 4)
    checkpoint(layer, x).sum().backward()
    with pytest.raises(pytest.fail.Exception, match="newest_node is called"):
        checkpoint(layer, x, debug=True)


def test_the_calls_of_a_region_are_counted():
    layer, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), leaf(2, 4)

    def step(**options):
        return lambda: checkpoint(layer, x, **options).sum().backward()

    off, on = calls_of(step()), calls_of(step(debug=True))
    with set_checkpoint_debug_enabled(False):
        assert calls_of(step()) == off
    assert off < on


def test_debug_changes_no_bit_and_holds_nothing():
    layer, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh()), leaf(3, 4)

    def step(**options):
        torch.manual_seed(1)
        y = checkpoint(layer, x, **options)
        return *torch.autograd.grad(y.sum(), [x, *layer.parameters()]), y

    assert all(map(torch.equal, step(), step(debug=True)))
    with without_collector():
        y = weakref.ref(step(debug=True)[-1])
        assert y() is None


def test_the_function_goes_on_until_the_operation_is_known_and_not_further():
    events = []

    def function(x):
        h = (x[:2] if is_recomputing() else x).sin()
        events.append("sin")
        h = h.cos()
        events.append("cos")
        h = h.exp()
        events.append("exp")
        return h

    loss = checkpoint(function, leaf(4)).sum()
    assert events == ["sin", "cos", "exp"]
    with pytest.raises(RecomputationError, match=r"replay saved:  float32 \(2,\) on cpu, for Sin"):
        loss.backward()
    assert events[3:] == ["sin"]


def test_an_error_that_follows_from_the_difference_is_not_the_one_that_is_raised():
    def function(x):
        h = x[:2].double() if is_recomputing() else x
        return h.sin() @ torch.ones(4)

    with pytest.raises(RecomputationError, match=r"replay saved:  float64 \(2,\) on cpu"):
        checkpoint(function, leaf(4)).backward()


def test_an_error_holds_no_tensor_of_the_replay():
    hidden = []

    def function(x):
        h = (x[:2] if is_recomputing() else x) * 1
        hidden.append(weakref.ref(h))
        return h.sin().exp()

    with without_collector():
        with pytest.raises(RecomputationError) as caught:
            checkpoint(function, leaf(4)).sum().backward()
        error = caught.value.with_traceback(None)
        del caught
        assert hidden[-1]() is None
        assert error.__context__ is None


def test_a_tensor_that_a_backward_inside_of_a_region_saves(device):
    """On a device the engine saves it in a thread of its own, where no Python code runs."""

    def function(x):
        (gradient,) = torch.autograd.grad(x.sin().exp().sum(), x, create_graph=True)
        return x + gradient

    def gradient(call):
        x = torch.linspace(0, 1, 4).to(device).requires_grad_()
        call(x).sum().backward()
        return x.grad

    assert torch.equal(gradient(lambda x: checkpoint(function, x, debug=True)), gradient(function))
    x = torch.linspace(0, 1, 4).to(device).requires_grad_()
    assert saved_by_line(lambda: function(x).sum().backward()).total > 0
