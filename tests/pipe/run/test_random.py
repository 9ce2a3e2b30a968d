"""Two hundred random Sequentials: the pipeline is the plain module micro-batch by micro-batch, to the bit."""
from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import torchckpt
from tests.pipe.skips import Pop, Stash
from tests.slow import few, slow

MODES: Any = ["always", "except_last", "never"]


@dataclass
class Case:
    module: nn.Sequential
    x: Tensor
    balance: list[int]
    chunks: int
    lookahead: int
    has_dropout: bool

    def pipe(self, checkpoint: Any) -> torchckpt.Pipe:
        module = copy.deepcopy(self.module)
        return torchckpt.Pipe(module, self.balance, chunks=self.chunks, checkpoint=checkpoint, lookahead=self.lookahead)

    @property
    def shares_across_stages(self) -> bool:
        """Whether a layer is in several stages: its gradient is a sum of more than two terms, in the stages' order."""
        layers = iter(self.module._modules.values())
        stages = [{next(layers) for _ in range(count)} for count in self.balance]
        return len(set().union(*stages)) < sum(map(len, stages))


class Keep(Stash):
    """Stashes a tensor of its own, so that two gradients come together in it, and not three, in whatever order."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 1.25)


class Conv(nn.Conv1d):
    """Over the features, in as many channels."""

    def __init__(self) -> None:
        super().__init__(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, None])[:, 0]


KINDS = ["linear", "wide", "norm", "batch", "act", "drop", "shared", "shared", "conv", "stash", "pop", "frozen"]


def layers(draw: random.Random, width: int, has_dropout: bool) -> list[nn.Module]:
    """Some layers that keep ``width``. Every skip that is stashed is popped."""
    shared, skips, modules = nn.Linear(width, width), list[str](), list[nn.Module]()
    make: dict[str, Any] = {
        "linear": lambda: nn.Linear(width, width),
        "wide": lambda: nn.Sequential(nn.Linear(width, 2 * width + 1), nn.GELU(), nn.Linear(2 * width + 1, width)),
        "norm": lambda: nn.LayerNorm(width),
        "batch": lambda: nn.BatchNorm1d(width),
        "act": lambda: draw.choice([nn.ReLU, nn.Tanh, nn.SiLU, nn.Identity])(),
        "drop": lambda: nn.Dropout(0.4) if has_dropout else nn.Sigmoid(),
        "shared": lambda: shared,
        "conv": Conv,
        "stash": lambda: Keep(skips[-1]),
        "pop": lambda: Pop(skips.pop(draw.randrange(len(skips)))),
        "frozen": lambda: nn.Linear(width, width).requires_grad_(False),
    }
    for number in range(draw.randint(1, 9)):
        kind = draw.choice(KINDS)
        if kind == "stash":
            skips.append(f"skip {number}")
        if kind != "pop" or skips:
            modules.append(make[kind]())
    return modules + [Pop(name) for name in reversed(skips)]


def case(seed: int) -> Case:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    width, has_dropout, has_ids = draw.randint(1, 9), draw.random() < 0.5, seed % 4 == 0
    first = nn.Embedding(11, width) if has_ids else nn.Linear(3, width)
    module = nn.Sequential(first, *layers(draw, width, has_dropout), nn.Linear(width, 2))
    cuts = sorted(draw.sample(range(1, len(module)), draw.randint(0, min(3, len(module) - 1))))
    balance = [end - start for start, end in zip([0, *cuts], [*cuts, len(module)])]
    chunks = draw.randint(1, 5)
    rows = draw.randint(2 * chunks, 3 * chunks)  # BatchNorm wants two of each micro-batch
    x = torch.randint(11, (rows,)) if has_ids else torch.randn(rows, 3)
    return Case(module, x, balance, chunks, draw.randint(1, 3), has_dropout)


def result(module: nn.Module, output: Tensor) -> list[Tensor]:
    """The output, the gradients and the running statistics."""
    grads = [torch.zeros(()) if parameter.grad is None else parameter.grad for parameter in module.parameters()]
    return [output.detach(), *grads, *module.buffers()]


def forward_and_backward(pipe: torchckpt.Pipe, x: Tensor, seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    output = pipe(x)
    output.backward(torch.linspace(-1, 1, output.numel()).view_as(output))
    return result(pipe, output)


def stepped(pipe: torchckpt.Pipe, x: Tensor, target: Tensor, seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    return result(pipe, pipe.step(x, target, loss_fn=mse_loss))


def is_close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def assert_equal(ours: list[Tensor], expected: list[Tensor], is_same: Any = torch.equal) -> None:
    assert len(ours) == len(expected)
    assert [place for place, (a, b) in enumerate(zip(ours, expected)) if not is_same(a, b)] == []


@few(2)
@pytest.mark.parametrize("seed", [*range(20), *slow(range(20, 200))])
def test_a_random_sequential(seed: int) -> None:
    drawn = case(seed)
    always, *others = [forward_and_backward(drawn.pipe(mode), drawn.x, seed) for mode in MODES]
    for other in others:
        assert_equal(other, always)
    rows = len(drawn.x)
    target = torch.randn(rows, 2)
    ahead, *others = [stepped(drawn.pipe(mode), drawn.x, target, seed) for mode in MODES]
    for other in others:
        assert_equal(other, ahead)
    if drawn.has_dropout:
        return
    is_same = is_close if drawn.shares_across_stages else torch.equal
    plain = copy.deepcopy(drawn.module)
    outputs = [plain(part) for part in drawn.x.tensor_split(drawn.chunks)]
    grads = torch.linspace(-1, 1, 2 * rows).view(rows, 2).tensor_split(drawn.chunks)
    torch.autograd.backward(outputs, grads)  # in one graph, whose last micro-batch goes back first
    assert_equal(always, result(plain, torch.cat(outputs)), is_same)
    plain, losses = copy.deepcopy(drawn.module), []
    for part, target_part in zip(drawn.x.tensor_split(drawn.chunks), target.tensor_split(drawn.chunks)):
        loss = mse_loss(plain(part), target_part) * (len(part) / rows)
        loss.backward()
        losses.append(loss.detach())
    assert_equal(ahead, result(plain, torch.stack(losses).sum()), is_same)


def test_the_cases_are_what_they_are_meant_to_be() -> None:
    cases = [case(seed) for seed in range(200)]
    exact = [drawn for drawn in cases if not drawn.has_dropout and not drawn.shares_across_stages]
    layers = [{type(layer).__name__ for layer in drawn.module} for drawn in exact]
    assert len(exact) > 60
    assert len([drawn for drawn in cases if drawn.shares_across_stages]) > 5
    assert len([drawn for drawn in exact if len(set(drawn.module)) < len(drawn.module)]) > 5  # a layer twice in a stage
    for kind in ("Keep", "Pop", "Embedding", "BatchNorm1d", "LayerNorm", "Conv", "Sequential"):
        assert len([names for names in layers if kind in names]) > 10, kind
