"""Balances: what is measured of each layer, by a clock that only the layers move, and that nothing is left of it."""
from __future__ import annotations

import copy
import doctest
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchckpt
from tests.accelerator import random_states
from torchckpt.errors import ArgumentError
from torchckpt.pipe import Balance, Pipe, balance, balance_by_bytes, balance_by_time
from torchckpt.pipe.partition import layers_of
from torchckpt.testing import saved_bytes

BOTH = pytest.mark.parametrize("balance_by", [balance_by_time, balance_by_bytes])


class Clock:
    """Its seconds pass in the layers only."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.events: list[str] = []

    def passes(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(balance, "_now", lambda devices: clock.seconds)
    return clock


class Pass(torch.autograd.Function):
    """The identity, whose backward takes so many seconds."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, clock: Clock, seconds: float, name: str) -> Tensor:
        ctx.clock, ctx.seconds, ctx.name = clock, seconds, name
        return input.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.clock.events.append(ctx.name.upper())
        ctx.clock.passes(ctx.seconds)
        return grad, None, None, None


class Slow(nn.Module):
    """Takes so many seconds forward, one number a call or one for all, and backward."""

    def __init__(self, clock: Clock, name: str, forward: float | list[float], backward: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.clock, self.name, self.backward_seconds = clock, name, backward
        self.forward_seconds = iter(forward) if isinstance(forward, list) else None
        self.each = 0.0 if isinstance(forward, list) else forward

    def forward(self, input: Tensor) -> Tensor:
        self.clock.events.append(self.name)
        self.clock.passes(next(self.forward_seconds) if self.forward_seconds else self.each)
        return Pass.apply(input * self.weight, self.clock, self.backward_seconds, self.name)


# by time --------------------------------------------------------------------------------------------------------------


def test_forwards_count_twice_where_they_are_recomputed(clock: Clock) -> None:
    model = nn.Sequential(Slow(clock, "a", 4, 1), Slow(clock, "b", 1, 2), Slow(clock, "c", 1, 6))
    balance = balance_by_time(2, model, torch.ones(3, 2))
    assert (balance, balance.costs, balance.unit) == ([1, 2], [9, 4, 8], "seconds")
    without = balance_by_time(2, model, torch.ones(3, 2), recompute=False)
    assert (without, without.costs) == ([2, 1], [5, 3, 7])


def test_every_round_is_of_all_layers_and_the_first_one_warms_up(clock: Clock) -> None:
    model = nn.Sequential(Slow(clock, "a", 1, 1), Slow(clock, "b", 1, 1))
    balance_by_time(2, model, torch.ones(3, 2), rounds=2)
    assert "".join(clock.events) == "aAbB" "aAbB" "aAbB"


def test_medians_are_of_the_rounds_but_the_first(clock: Clock) -> None:
    model = nn.Sequential(Slow(clock, "a", [900, 2, 3, 800], 1), Slow(clock, "b", [9, 9, 1, 5], 1))
    assert balance_by_time(1, model, torch.ones(3, 2), rounds=3).costs == [2 * 3 + 1, 2 * 5 + 1]


def test_nothing_goes_back_to_what_takes_no_gradient(clock: Clock) -> None:
    model = nn.Sequential(Slow(clock, "a", 1, 7), Slow(clock, "b", 1, 7), Slow(clock, "c", 1, 7)).requires_grad_(False)
    model[1].requires_grad_()
    assert balance_by_time(3, model, torch.ones(3, 2)).costs == [2, 9, 9]
    assert balance_by_time(3, model, torch.ones(3, 2, requires_grad=True)).costs == [9, 9, 9]


def test_devices_are_waited_for_before_the_clock_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", events.append)
    monkeypatch.setattr(balance.time, "perf_counter", lambda: events.append("clock") or 1.5)
    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert balance._now(devices) == 1.5
    assert events == [*devices, "clock"]


def test_the_real_clock_runs(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU()).to(device)
    assert all(cost > 0 for cost in balance_by_time(2, model, torch.ones(3, 2, device=device), rounds=1).costs)


# what layers are called with ------------------------------------------------------------------------------------------


class Split(nn.Module):
    def forward(self, input: Tensor, mask: Any, *, factor: float) -> tuple[Tensor, dict[str, Any]]:
        assert mask["none"] is None
        return input * factor, {"mask": mask["mask"], "word": "join"}


class Join(nn.Module):
    def forward(self, both: tuple[Tensor, dict[str, Any]]) -> Tensor:
        first, second = both
        assert second["word"] == "join"
        return first.masked_fill(second["mask"], 0.0)


@BOTH
def test_the_first_layer_gets_the_sample_and_the_others_what_the_one_before_returns(balance_by: Any) -> None:
    mask = {"mask": torch.ones(3, 2, dtype=torch.bool), "none": None}
    balance = balance_by(3, nn.Sequential(Split(), Join(), nn.Linear(2, 2)), torch.ones(3, 2), mask, factor=2.0)
    assert balance == [1, 1, 1]


@BOTH
def test_token_ids_and_layers_that_change_their_input(balance_by: Any, device: torch.device) -> None:
    layers = (nn.ReLU(inplace=True), nn.Embedding(5, 4), nn.ReLU(inplace=True), nn.Flatten(), nn.Identity())
    tokens = torch.tensor([[1, 2], [3, 4]], device=device)
    before, version = tokens.clone(), tokens._version
    assert sum(balance_by(2, nn.Sequential(*layers).to(device), tokens)) == 5
    assert torch.equal(tokens, before)
    assert tokens._version == version


@BOTH
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_grad_mode_is_that_of_training(balance_by: Any, context: Callable[[], Any], clock: Clock) -> None:
    model = nn.Sequential(Slow(clock, "a", 1, 2), Slow(clock, "b", 1, 2))
    sample = torch.ones(3, 2)
    expected = balance_by(2, model, sample).costs
    with context():
        assert balance_by(2, model, torch.ones(3, 2)).costs == expected
        enabled = torch.is_grad_enabled()
    assert enabled == (context is torch.enable_grad)


# as it was found ------------------------------------------------------------------------------------------------------


class Counts(nn.Module):
    """Buffers of all sorts: one that is replaced, one that is shared, none, and one that the forward makes."""

    def __init__(self, shared: Tensor) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("shared", shared)
        self.register_buffer("missing", None)

    def forward(self, input: Tensor) -> Tensor:
        self.calls = self.calls + 1
        self.shared += 1
        self.missing = torch.ones(2)
        self.register_buffer("made", torch.ones(2), persistent=False)
        return input


class Fails(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        raise KeyError("of the user")


def model_of_all_sorts(device: torch.device) -> nn.Sequential:
    shared = torch.zeros(2)
    counts = Counts(shared), Counts(shared)
    layers = (nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), *counts, nn.Linear(4, 4).eval(), nn.ReLU(True))
    return nn.Sequential(*layers).to(device)


def picture(model: nn.Module, device: torch.device) -> dict[str, Any]:
    """What must not change: objects, versions, values."""
    tensors = [*model.named_parameters(), *model.named_buffers(remove_duplicate=False)]
    return {
        "tensors": [(name, id(tensor), tensor._version, tensor.device, tensor.tolist()) for name, tensor in tensors],
        "gradients": [None if p.grad is None else (id(p.grad), p.grad.tolist()) for p in model.parameters()],
        "requires grad": [p.requires_grad for p in model.parameters()],
        "names": [list(layer._buffers) for layer in model.modules()],
        "modes": [layer.training for layer in model.modules()],
        "random numbers": [state.tolist() for state in random_states(device)],
        "hooks": [len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in model.modules()],
    }


@BOTH
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_left_as_it_is_found(balance_by: Any, training: bool, fails: bool, device: torch.device) -> None:
    model = model_of_all_sorts(device).train(training)
    model[5].eval()
    model[0].weight.grad = torch.ones(4, 4, device=device)
    sample = torch.randn(3, 4, device=device, requires_grad=True)
    before = picture(model, device)
    if fails:
        with pytest.raises(KeyError, match="of the user"):
            balance_by(2, nn.Sequential(*model, Fails()), sample)
    else:
        balance_by(2, model, sample)
    after = picture(model, device)
    for what, was in before.items():
        assert after[what] == was, what
    assert sample.grad is None


@BOTH
def test_hooks_that_step_an_optimizer_are_not_called(balance_by: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    steps: list[Tensor] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(steps.append)
    balance_by(2, model, torch.ones(3, 2))
    assert steps == []


# by bytes -------------------------------------------------------------------------------------------------------------

B = 16 * 8 * 4  # bytes of 16 rows of 8


def bytes_of_layers(*layers: nn.Module, sample: Tensor | None = None, **options: Any) -> list[float]:
    return balance_by_bytes(1, nn.Sequential(*layers), torch.ones(16, 8) if sample is None else sample, **options).costs


@pytest.mark.parametrize(("options", "scale"), [({}, 4), ({"param_scale": 2}, 2), ({"param_scale": 2.5}, 2.5)])
def test_parameters_count_with_gradients_and_optimizer(options: dict[str, Any], scale: float) -> None:
    weights = 4 * (8 * 8 + 8)
    assert bytes_of_layers(nn.Linear(8, 8), **options) == [scale * weights + B]
    assert bytes_of_layers(nn.Linear(8, 8).requires_grad_(False), **options) == [weights + B]


def test_buffers_count_once() -> None:
    statistics = 2 * 8 * 4 + 8
    kept = 2 * 8 * 4  # mean and deviation of the batch
    assert bytes_of_layers(nn.BatchNorm1d(8, affine=False), sample=torch.ones(16, 8, requires_grad=True)) == [
        statistics + kept + B
    ]


def test_a_parameter_counts_for_the_first_layer_that_has_it() -> None:
    first, second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    second.weight = first.weight
    assert bytes_of_layers(first, second) == [4 * 4 * 8 * 8 + B, B]


def test_an_activation_counts_for_the_layer_that_is_called_with_it() -> None:
    linear = nn.Linear(8, 8).requires_grad_(False)
    sample = torch.ones(16, 8, requires_grad=True)
    weights = 4 * (8 * 8 + 8)
    layers = (linear, nn.ReLU(), nn.GELU(), nn.Flatten(), nn.Softmax(-1), nn.ReLU(inplace=True))
    assert bytes_of_layers(*layers, sample=sample) == [weights + B, B, B, 0, B, 0]


def test_inside_of_a_layer_all_counts_that_autograd_saves() -> None:
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    weights = 3 * 4 * 4 * (8 * 8 + 8)
    assert bytes_of_layers(block) == [weights + 3 * B]
    torchckpt.checkpoint_module(block)
    assert bytes_of_layers(block) == [weights + B]


def test_the_sum_is_what_the_module_keeps() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 8))
    sample = torch.randn(16, 8)
    with saved_bytes() as saved:
        model(sample)
    boundary = B  # what Tanh is called with; where no stage begins there, it is not kept
    weights = sum(4 * parameter.nbytes for parameter in model.parameters())
    assert sum(balance_by_bytes(2, model, sample).costs) == saved.total + boundary + weights


def test_bytes_decide_the_balance() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 8), nn.Linear(8, 8))
    assert balance_by_bytes(2, model, torch.ones(1, 8)) == [2, 2]
    assert balance_by_bytes(3, model, torch.ones(1, 8)) == [1, 1, 2]


# the result -----------------------------------------------------------------------------------------------------------


def test_a_pipe_takes_it_and_it_is_a_list() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    balance = balance_by_bytes(2, model, torch.ones(3, 2))
    assert isinstance(balance, list)
    assert Pipe(model, balance).balance == list(balance)
    for copied in (pickle.loads(pickle.dumps(balance)), copy.deepcopy(balance)):
        assert (copied, copied.costs, copied.table()) == (balance, balance.costs, balance.table())


def test_the_table_says_what_is_in_a_stage() -> None:
    layers = {"tokens": nn.Embedding(4, 2), "0": nn.ReLU(), "1": nn.ReLU(), "head": nn.ReLU()}
    names = balance._names(layers_of(nn.Sequential(OrderedDict(layers)), nested=False))
    of_names = Balance([3, 1], [0.001, 0.0005, 0.0005, 0.006], names, "seconds")
    assert of_names.stage_costs == [0.002, 0.006]
    assert of_names.table().split("\n") == [
        "         layers  time   share",
        "stage 0  0 to 2  2 ms  25.0 %  tokens, ReLU x 2",
        "stage 1       3  6 ms  75.0 %  head",
    ]


@pytest.mark.parametrize(
    ("costs", "unit", "cells"),
    [
        ([1, 3], "seconds", ["1 s", "3 s"]),
        ([5e-6, 7e-7], "seconds", ["5 us", "0.7 us"]),
        ([5e-8, 0], "seconds", ["0.05 us", "0 us"]),
        ([2**30, 2**29], "bytes", ["1 GiB", "0.5 GiB"]),
        ([5 * 2**20, 0], "bytes", ["5 MiB", "0 MiB"]),
        ([100, 1000], "bytes", ["100 B", "1000 B"]),
        ([0, 0], "bytes", ["0 B", "0 B"]),
    ],
)
def test_units_fit_the_largest_stage(costs: list[float], unit: Any, cells: list[str]) -> None:
    lines = Balance([1, 1], costs, ["a", "b"], unit).table().split("\n")[1:]
    assert [re.split(r"\s{2,}", line)[2] for line in lines] == cells


def test_the_examples() -> None:
    results = doctest.testmod(balance, extraglobs={"torch": torch, "Pipe": Pipe})
    assert (results.failed, results.attempted > 8) == (0, True)


# faults ---------------------------------------------------------------------------------------------------------------

MODEL = nn.Sequential(nn.ReLU(), nn.ReLU())
X = torch.ones(3, 2)
WORKS = "works:    balance_by_{by}(2, nn.Sequential(embedding, *blocks, head), x)"


@BOTH
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            (2, nn.ReLU(), X),
            "(): the module is not an nn.Sequential of at least one layer\n  received: ReLU\n  " + WORKS,
        ),
        ((2, nn.Sequential(), X), "of at least one layer\n  received: an empty Sequential\n  " + WORKS),
        (
            (3, MODEL, X),
            "(): there are fewer layers than stages\n  received: partitions=3, 2 layers\n"
            "  works:    partitions=2, or more layers",
        ),
        ((0, MODEL, X), "partitions is not an integer >= 1\n  received: partitions=0\n  works:    partitions=1"),
        ((True, MODEL, X), "partitions is not an integer >= 1\n  received: partitions=True\n  works:    partitions=1"),
        ((2, MODEL), "there is no sample, the arguments of the first layer\n  received: none\n  " + WORKS),
        ((0, nn.ReLU()), "(): 3 faults\n"),
    ],
)
def test_faults(balance_by: Any, arguments: Any, text: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(text.format(by=balance_by.__name__.split("_")[-1]))) as raised:
        balance_by(*arguments)
    assert str(raised.value).startswith(f"{balance_by.__name__}(): ")


def test_nothing_is_timed_on_meta() -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    for model, x in (layers, torch.ones(3, 2, device="meta")), (layers.to("meta"), torch.ones(3, 2)):
        with pytest.raises(ArgumentError, match="nothing takes time on meta"):
            balance_by_time(2, model, x)
    assert balance_by_bytes(2, layers, torch.ones(3, 2, device="meta")) == [1, 1]


def test_faults_of_options() -> None:
    text = "rounds is not an integer >= 1\n  received: rounds=0\n  works:    rounds=1"
    with pytest.raises(ArgumentError, match=re.escape(text)):
        balance_by_time(2, MODEL, X, rounds=0)
    for scale in (0.5, float("nan"), float("inf"), "adam"):
        text = (
            f"param_scale is not a number of at least 1, which the parameter itself counts\n"
            f"  received: param_scale={scale!r}\n"
            "  works:    param_scale=4, for Adam"
        )
        with pytest.raises(ArgumentError, match=re.escape(text)):
            balance_by_bytes(2, MODEL, X, param_scale=scale)  # type: ignore[arg-type]  # the fault


@BOTH
def test_what_a_layer_raises_passes_through(balance_by: Any) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'param_scal'"):
        balance_by(2, MODEL, X, param_scal=2)
