"""Layers that change in place what their stage gets: right where nobody else reads it, or refused in the forward."""
from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.slow import few
from torchckpt import Pipe
from torchckpt.errors import ArgumentError
from torchckpt.pipe import NoChunk
from torchckpt.pipe.run.visit import Memory, shared_places
from torchckpt.pipe.skip import pop, stash

MODES: list[Any] = ["never", "except_last", "always"]


class View(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.shape)


class Doubles(nn.Linear):
    """Changes its input, and reads it."""

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return super().forward(x)


class Row(nn.Linear):
    """Changes a part of its input, without a gradient, and reads it."""

    def forward(self, x: Tensor) -> Tensor:
        h = x * 1
        with torch.no_grad():
            x[:, :2].zero_()
        return super().forward(h) + x


class Pair(nn.Linear):
    """Returns a tensor and a view of it."""

    def forward(self, x: Tensor) -> Any:
        h = super().forward(x)
        return h, h.view(-1, 2, 2)


class ChangesTheSecond(nn.Module):
    def forward(self, pair: Any) -> Tensor:
        pair[1].mul_(2)
        return pair[0].sum(1, keepdim=True) + 1


class Stashes(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        stash("skip", h)
        return h.view(h.shape)


class Pops(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + pop("skip")


class Table(nn.Linear):
    """Changes what goes whole to every micro-batch."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:  # type: ignore[override]
        table.add_(1)
        return super().forward(x) * table


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


RIGHT: dict[str, Any] = {
    "behind a cut": (lambda: [linear(), nn.ReLU(inplace=True), linear()], [1, 2]),
    "behind a cut, and a view": (lambda: [linear(), View(), Doubles(4, 4)], [1, 1, 1]),
    "a view in the stage before": (lambda: [linear(), View(), nn.ReLU(inplace=True), linear()], [2, 2]),
    "twice": (lambda: [linear(), Doubles(4, 4), Doubles(4, 4)], [1, 1, 1]),
    "a part, without gradient": (lambda: [linear(), Row(4, 4), linear()], [1, 2]),
    "first of all": (lambda: [nn.ReLU(inplace=True), linear(), linear()], [2, 1]),
    "first of all, one stage": (lambda: [nn.ReLU(inplace=True), linear()], [2]),
    "the caller's, in the second stage": (lambda: [View(), Doubles(4, 4), linear()], [1, 2]),
    "the caller's, in the third": (lambda: [View(), nn.Identity(), Doubles(4, 4)], [1, 1, 1]),
    "with dropout in it": (lambda: [linear(), nn.Dropout(0.5, inplace=True), linear()], [1, 2]),
}


def gradients(model: nn.Module, x: Tensor, step: bool = False) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(3)
    if step:
        loss_fn = lambda y, _: y.square().sum()  # noqa: E731
        model.step(x, torch.zeros(len(x)), loss_fn=loss_fn, reduce="sum")
    else:
        model(x).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


class MicroBatches(nn.Module):
    """The layers, in the order of a pipeline, on copies of the rows; a backward for each if it is a step."""

    def __init__(self, layers: nn.Sequential, chunks: int) -> None:
        super().__init__()
        self.layers, self.chunks = layers, chunks

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.layers(rows.clone()) for rows in x.chunk(self.chunks)])

    def step(self, x: Tensor, *_: Any, **__: Any) -> None:
        for rows in x.chunk(self.chunks):
            self.layers(rows.clone()).square().sum().backward()


@few(9)
@pytest.mark.parametrize("make", RIGHT.values(), ids=RIGHT)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("step", [False, True], ids=["forward", "step"])
def test_right_where_nobody_else_reads_it(make: Any, mode: Any, chunks: int, step: bool) -> None:
    layers, balance = nn.Sequential(*make[0]()), make[1]
    x = torch.randn(8, 4)
    expected = gradients(MicroBatches(layers, chunks), x, step)
    pipe, before = Pipe(layers, balance, chunks=chunks, checkpoint=mode), x.clone()
    # In the order of 1F1B dropout draws other numbers than micro-batch by micro-batch.
    draws = step and any(isinstance(layer, nn.Dropout) for layer in layers)
    for _ in range(2):  # what a stage changes is known in the second
        received = gradients(pipe, x, step)
        assert draws or all(map(torch.equal, received, expected))
    assert torch.equal(x, before), "a pipeline does not change what its caller has"


@pytest.mark.parametrize("mode", MODES)
def test_an_input_that_requires_grad(mode: Any) -> None:
    layers, x = nn.Sequential(linear(), nn.ReLU(inplace=True), linear()), torch.randn(4, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(layers(x).square().sum(), x)
    output = Pipe(layers, [1, 2], chunks=1, checkpoint=mode)(x)
    assert torch.equal(torch.autograd.grad(output.square().sum(), x)[0], expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("step", [False, True], ids=["forward", "step"])
def test_what_goes_whole_to_every_micro_batch_is_changed_for_each(mode: Any, step: bool) -> None:
    layers, x, table = nn.Sequential(Table(4, 4), nn.Tanh()), torch.randn(4, 4), torch.randn(4)
    expected = layers[1](layers[0](x, table.clone()))
    pipe = Pipe(layers, [1, 1], chunks=4, checkpoint=mode)
    if step:
        loss = pipe.step(x, NoChunk(table), target=x, loss_fn=lambda y, _: y.sum(), reduce="sum")
        assert torch.allclose(loss, expected.sum())
    else:
        assert torch.allclose(pipe(x, NoChunk(table)), expected)


WORKS = "works:    the operation out of place, such as ReLU(inplace=False) or x = x + 1"


@pytest.mark.parametrize("step", [False, True], ids=["forward", "step"])
def test_views_of_one_tensor_between_stages_are_refused_in_the_forward(step: bool) -> None:
    layers, x = nn.Sequential(Pair(4, 4), ChangesTheSecond()), torch.randn(8, 4)
    expected = gradients(MicroBatches(layers, 4), x)
    assert all(map(torch.equal, gradients(Pipe(layers, [1, 1], chunks=4, checkpoint="never"), x), expected))
    assert all(map(torch.equal, gradients(Pipe(layers, [2], chunks=4, checkpoint="always"), x), expected))
    pipe = Pipe(layers, [1, 1], chunks=4, checkpoint="always")
    for _ in range(2):
        with pytest.raises(ArgumentError) as raised:
            gradients(pipe, x, step)
        assert str(raised.value) == (
            f"{'Pipe.step()' if step else 'Pipe'}: a stage changes an input in place that something else may read\n"
            f"  received: tensor {0 if step else 1} of Pipe stage 1 (layers 1 to 1), changed by layer 1 "
            "(ChangesTheSecond): it shares "
            f"memory with another tensor or with a skip\n  {WORKS}"
        )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("step", [False, True], ids=["forward", "step"])
@pytest.mark.parametrize("between", [[], [View()], [View(), nn.Identity()]], ids=len)
def test_a_skip_in_the_memory_of_what_a_stage_changes(mode: Any, step: bool, between: Any) -> None:
    layers = nn.Sequential(Stashes(4, 4), *between, Doubles(4, 4), Pops())
    pipe = Pipe(layers, [1] * len(layers), chunks=4, checkpoint=mode)
    with pytest.raises(ArgumentError, match=r"changed by|was changed in place"):
        gradients(pipe, torch.randn(8, 4), step)


def test_a_stage_that_changes_its_input_at_first_in_a_later_run_is_an_error_once() -> None:
    class Now(nn.Linear):
        now = False

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(2) if self.now else x * 2)

    layers, x = nn.Sequential(linear(), Now(4, 4)), torch.randn(8, 4)
    expected = gradients(MicroBatches(layers, 4), x)
    pipe = Pipe(layers, [1, 1], chunks=4, checkpoint="always")
    assert all(map(torch.equal, gradients(pipe, x), expected))
    layers[1].now = True
    text = r"layer 1 \(Now\): the first run of the stage in this mode did not change it"
    with pytest.raises(ArgumentError, match=text):
        gradients(pipe, x)
    assert all(map(torch.equal, gradients(pipe, x), expected))


def test_only_the_first_run_and_stages_that_change_their_input_work_on_copies() -> None:
    layers = nn.Sequential(linear(), nn.Tanh(), nn.ReLU(inplace=True), linear())
    pipe, x = Pipe(layers, [1, 1, 2], chunks=2, checkpoint="always"), torch.randn(4, 4)
    copies = []
    for _ in range(2):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            pipe(x)
        copies.append(sum(event.count for event in profile.key_averages() if event.key == "aten::clone"))
    #         the first micro-batch of each stage, the second of the last; then both of the last
    assert copies == [3 + 1, 2]
    assert [[*stage.in_place.values()] for stage in pipe.stages] == [[set()], [set()], [{0}]]


class UnlessLeaf(nn.Module):
    """Changes its input in place where autograd lets it."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.is_leaf and x.requires_grad else x.mul_(2)


class OnlyInGrad(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2) if torch.is_grad_enabled() else x * 2


def nothing(pipe: Pipe, x: Tensor) -> None:
    pass


def validation(pipe: Pipe, x: Tensor) -> None:
    with torch.no_grad():
        pipe.eval()(x)


def inference(pipe: Pipe, x: Tensor) -> None:
    with torch.inference_mode():
        pipe.eval()(x)
        pipe.train()(x.clone())


def gradient_of_the_input(pipe: Pipe, x: Tensor) -> None:
    with suppress(RuntimeError):  # most may not change a leaf
        pipe(x.clone().requires_grad_())


MODELS: dict[str, Any] = {
    "dropout": lambda: [nn.Dropout(0.5, inplace=True)],
    "dropout inside": lambda: [nn.Sequential(nn.Identity(), nn.Dropout(0.5, inplace=True))],
    "unless it is a leaf": lambda: [UnlessLeaf()],
    "only where there are gradients": lambda: [OnlyInGrad()],
    "always": lambda: [nn.ReLU(inplace=True)],
}


@few(10)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("options", [{"checkpoint": mode} for mode in MODES] + [{"budget": 10**9}], ids=str)
@pytest.mark.parametrize("before", [validation, inference, gradient_of_the_input])
@pytest.mark.parametrize("chunks", [1, 2])
def test_what_a_stage_changes_is_known_by_mode(make: Any, options: Any, before: Any, chunks: int) -> None:
    received, x = [], torch.randn(4, 4)
    for first in (nothing, before):
        torch.manual_seed(0)
        pipe, own = Pipe(nn.Sequential(*make(), linear()), [2], chunks=chunks, **options), x.clone()
        first(pipe, own)
        for module in pipe.train().modules():  # those inside alone
            module.training = isinstance(module, nn.Dropout)
        received.append(gradients(pipe, own))
        assert torch.equal(own, x), "a pipeline does not change what its caller has"
    assert all(map(torch.equal, *received))


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("chunks", [1, 2])
def test_without_gradients_the_input_of_the_caller_stays(guard: Any, requires_grad: bool, chunks: int) -> None:
    layers, own = nn.Sequential(nn.ReLU(inplace=True), linear()), torch.randn(4, 4)
    pipe, x = Pipe(layers, [2], chunks=chunks), own.clone().requires_grad_(requires_grad)
    for _ in range(2):
        with guard():
            # Products of all rows at once may round otherwise.
            of_chunks = torch.cat([layers(part) for part in own.clone().chunk(chunks)])
            assert torch.equal(pipe(x), of_chunks)
            assert torch.equal(pipe(own.clone()), of_chunks)
        assert torch.equal(x, own)


def test_places_of_shared_memory() -> None:
    a, b, c = torch.zeros(4), torch.zeros(4), torch.zeros(4)
    assert shared_places([a, b, c]) == frozenset()
    assert shared_places([a, b, a[1:], c.view(2, 2)]) == {0, 2}
    assert shared_places([a, b], [b[:1], c]) == {1}
    assert shared_places([a.to_sparse(), a]) == frozenset()
    memory = Memory.of_caller([a, b])
    assert memory == Memory(frozenset(), frozenset({0, 1}))
    assert memory.on_leaving([c, a[1:]], [], [a, b]) == Memory(frozenset(), frozenset({1}), frozenset({1}))
    assert memory.on_leaving([c, c[1:]], [], [a, b]) == Memory(frozenset({0, 1}), frozenset(), frozenset({1}))
    assert Memory().on_leaving([a], [], [b]) == Memory() == Memory(views=frozenset({0})).on_leaving([a], [], [b[:2]])
    assert Memory(kept=frozenset({0})).on_leaving([b[:2]], [], [b]) == Memory(frozenset(), *[frozenset({0})] * 2)
