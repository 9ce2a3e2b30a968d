"""One tensor stays one tensor in a pipeline: for its layers, and for the caller who gets the outputs."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import same_or_not
from tests.slow import few
from torchckpt import Pipe
from torchckpt.pipe import NoChunk
from torchckpt.pipe.skip import pop, stash

MODES = ["never", "except_last", "always"]


class Two(nn.Linear):
    """Its two inputs, in whatever shape, are one tensor or two."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        a, b = torch.utils._pytree.tree_leaves((args, kwargs))[:2]
        return super().forward(same_or_not(a, b))


class Twice(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        h = super().forward(x)
        return {"one": h, "other": [h]}


class Third(nn.Linear):
    """Returns one tensor twice, and another once."""

    def forward(self, x: Any) -> Any:  # type: ignore[override]
        a, b = torch.utils._pytree.tree_leaves(x)[:2]
        h = super().forward(same_or_not(a, b))
        return h, (h, h * 2)


class Marked(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x * getattr(x, "factor", 1)).sin()
        h.factor = 3
        return h


def losses(outputs: Any) -> Tensor:
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
    return sum((leaf.square().sum() * (place + 1) for place, leaf in enumerate(leaves)), torch.zeros(()))


def gradients(model: nn.Module, call: Callable[[nn.Module], Any]) -> list[Tensor]:
    model.zero_grad()
    call(model)
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None for gradient in gradients)
    return [gradient.clone() for gradient in gradients if gradient is not None]


def by_forward(*args: Any, **kwargs: Any) -> Callable[[nn.Module], Any]:
    return lambda model: losses(model(*args, **kwargs)).backward()


def by_step(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    target = torch.zeros(4)
    return lambda pipe: pipe.step(*args, target=target, loss_fn=lambda y, _: losses(y), reduce="sum", **kwargs)


X = torch.linspace(-1, 2, 16).reshape(4, 4)
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "two arguments": ((X, X), {}),
    "a list": (([X, X],), {}),
    "a list and a dict": (([X], {"x": X}), {}),
    "argument and keyword": ((X,), {"x": X}),
}


@few(7)
@pytest.mark.parametrize("args", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("way", [by_forward, by_step])
def test_one_tensor_as_several_inputs_and_between_stages(args: Any, mode: Any, requires_grad: bool, way: Any) -> None:
    x = X.clone().requires_grad_(requires_grad)
    inputs, named = torch.utils._pytree.tree_map_only(Tensor, lambda _: x, args)
    layers = nn.Sequential(Two(4, 4), Twice(4, 4), Two(4, 4), nn.Tanh())

    def plain(model: nn.Module) -> None:
        """The layers, micro-batch by micro-batch: gradients add up in that order."""
        for rows in x.detach().split(2):
            args, kwargs = torch.utils._pytree.tree_map_only(Tensor, lambda _, rows=rows: rows, (inputs, named))
            h = layers[0](*args, **kwargs)
            losses(layers[3](layers[2](layers[1](h)))).backward()

    expected = gradients(layers, plain)
    for balance in [1, 1, 1, 1], [2, 2], [4]:
        received = gradients(Pipe(layers, balance, chunks=2, checkpoint=mode), way(*inputs, **named))
        assert all(map(torch.allclose, received, expected)), balance


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunks", [1, 2])
def test_outputs_are_the_same_tensor_where_those_of_the_module_are(mode: Any, chunks: int) -> None:
    layers = nn.Sequential(Twice(4, 4), Third(4, 4))
    for model in layers, Pipe(layers, [1, 1], chunks=chunks, checkpoint=mode):
        first, (other, third) = model(X)
        assert first is other
        assert third is not first


@pytest.mark.parametrize("mode", MODES)
def test_whole_tensors_given_twice(mode: Any) -> None:
    table, layers = torch.randn(4), nn.Sequential(nn.Linear(4, 4))

    class Adds(nn.Linear):
        def forward(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x * same_or_not(a, b))

    layers = nn.Sequential(Adds(4, 4), nn.Tanh())

    def plain(model: nn.Module) -> None:
        for rows in X.split(2):
            losses(layers[1](layers[0](rows, table, table))).backward()

    expected = gradients(layers, plain)
    for call in by_forward, by_step:
        pipe = Pipe(layers, [1, 1], chunks=2, checkpoint=mode)
        received = gradients(pipe, call(X, NoChunk(table), NoChunk(table)))
        assert all(map(torch.equal, received, expected))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", [by_forward, by_step])
def test_attributes_of_tensors(mode: Any, call: Any) -> None:
    x = X.clone()
    x.factor = 2
    layers = nn.Sequential(Marked(4, 4), Marked(4, 4), Marked(4, 4))

    def plain(model: nn.Module) -> None:
        for rows in x.split(2):
            rows.factor = 2  # type: ignore[attr-defined]
            losses(model(rows)).backward()

    expected = gradients(layers, plain)
    pipe = Pipe(layers, [1, 1, 1], chunks=2, checkpoint=mode)
    assert all(map(torch.equal, gradients(pipe, call(x)), expected))
    assert pipe(x).factor == layers(x).factor == 3


@pytest.mark.parametrize("mode", MODES)
def test_a_skip_that_is_the_output_too(mode: Any) -> None:
    class Stashes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x)
            stash("h", h)
            return h

    class Pops(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(same_or_not(x, pop("h")))

    layers = nn.Sequential(Stashes(4, 4), Pops(4, 4))
    expected = gradients(layers, by_forward(X))
    for call in by_forward, by_step:
        received = gradients(Pipe(layers, [1, 1], chunks=2, checkpoint=mode), call(X))
        assert all(map(torch.allclose, received, expected))


@pytest.mark.parametrize("mode", MODES)
def test_attention_of_a_tensor_to_itself(mode: Any) -> None:
    class Attention(nn.MultiheadAttention):
        def forward(self, *args: Any) -> Tensor:  # type: ignore[override]
            return super().forward(*args)[0]

    layers, x = nn.Sequential(Attention(8, 2, batch_first=True), nn.Linear(8, 8)), torch.randn(4, 3, 8)
    expected = gradients(layers, lambda _: losses(layers[1](layers[0](x, x, x))).backward())
    for call in by_forward, by_step:
        received = gradients(Pipe(layers, [1, 1], chunks=4, checkpoint=mode), call(x, x, x))
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(received, expected))
