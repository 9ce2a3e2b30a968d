"""Random programs whose tensors have all kinds of layouts, in regions and without, to the bit."""
from __future__ import annotations

import collections
import functools
import random

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.helpers import assert_equal, by_hand, leaf, plain, prefetched
from tests.slow import few
from torchckpt import checkpoint


def own_strides(x, chosen):
    """With gaps, and with strides that nobody computes where a dimension has size one."""
    wide = functional.pad(x, [place * chosen.randrange(3) for _ in x.shape for place in (0, 1)])
    part = wide[tuple(slice(0, size) for size in x.shape)]
    return part.as_strided(x.shape, [stride + 5 * (size == 1) for size, stride in zip(x.shape, part.stride())])


LAYOUTS = {
    "contiguous": lambda x, chosen: x.contiguous(),
    "channels last": lambda x, chosen: x.contiguous(memory_format=torch.channels_last),
    "permuted": lambda x, chosen: x.permute(chosen.sample(range(4), 4)),
    "transposed": lambda x, chosen: x.transpose(2, 3),
    "a batch of one": lambda x, chosen: x[:1],
    "one of a batch": lambda x, chosen: x[-1:].contiguous(memory_format=torch.channels_last),
    "one channel": lambda x, chosen: x[:, :1],
    "expanded": lambda x, chosen: x[:, :, :1].expand(-1, -1, chosen.randint(1, 3), -1),
    "expanded by none": lambda x, chosen: x[None, :1, 0].expand(1, 1, -1, -1) if x.shape[1] else x,
    "steps": lambda x, chosen: x[..., ::2],
    "reversed order": lambda x, chosen: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "zero-size": lambda x, chosen: x[:0] if chosen.random() < 0.2 else x[:, :, chosen.random() < 0.2 :],
    "strides of its own": own_strides,
    "overlapping": lambda x, chosen: x.unfold(3, 1, 1)[..., 0] if x.shape[3] else x,
}

OPERATORS = {
    "dropout": lambda x, weight: functional.dropout(x, 0.4),
    "dropout of channels": lambda x, weight: functional.dropout2d(x, 0.4),
    "alpha dropout": lambda x, weight: functional.alpha_dropout(x, 0.3, training=True),
    "noise": lambda x, weight: x * torch.rand_like(x),
    "mask": lambda x, weight: x * torch.empty_like(x).bernoulli_(0.6),
    "sine": lambda x, weight: x.sin(),
    "in place": lambda x, weight: functional.relu_(x.mul(1.5)),
    "convolution": lambda x, weight: functional.conv2d(x, weight(x.shape[1], x.shape[1], 3, 3), padding=1),
    "by point": lambda x, weight: functional.conv2d(x, weight(2, x.shape[1], 1, 1), weight(2)),
    "linear": lambda x, weight: functional.linear(x, weight(3, x.shape[3]), weight(3)),
    "frozen linear": lambda x, weight: functional.linear(x, weight(2, x.shape[3]).detach(), weight(2).detach()),
    "product": lambda x, weight: x @ x.transpose(2, 3),
    "layer norm": lambda x, weight: functional.layer_norm(x, x.shape[3:], weight(x.shape[3])),
    "group norm": lambda x, weight: functional.group_norm(x, 1, weight(x.shape[1])) if x.numel() > 1 else x,
    "batch norm": lambda x, weight: functional.batch_norm(x, None, None, training=True) if _many(x) else x,
    "softmax": lambda x, weight: x.softmax(1),
    "mean": lambda x, weight: x - x.mean((0, 2), keepdim=True) if x.numel() else x,
    "halves": lambda x, weight: torch.cat([x[..., 1:].cos(), x[..., :1]], 3),
    "like it": lambda x, weight: torch.empty_like(x).copy_(x.detach()) * x,
    "flat": lambda x, weight: functional.dropout(x.flatten(1), 0.5).view(x.shape),
}


def _many(x):
    return x.numel() > x.shape[1] > 0


class Program:
    """A random program of operators, layouts and regions in regions."""

    CALLS = (checkpoint, checkpoint, by_hand, prefetched, functools.partial(checkpoint, determinism_check="values"))

    def __init__(self, seed: int, used: collections.Counter[str] | None = None) -> None:
        chosen = random.Random(seed)
        torch.manual_seed(seed)
        self.seed, self.weights, self.used = seed, {}, collections.Counter() if used is None else used
        self.x = leaf(*chosen.choices([1, 2, 3, 4], k=4), dtype=chosen.choice([torch.float32] * 3 + [torch.float64]))
        self.steps = [self._step(chosen, "layout", 0), *self._steps(chosen, 0), self._step(chosen, "region", 0)]

    def _steps(self, chosen, depth):
        kinds = ["operator", "operator", "layout", "region", "module"] if depth < 2 else ["operator", "layout"]
        return [self._step(chosen, chosen.choice(kinds), depth) for _ in range(chosen.randint(1, 4))]

    def _step(self, chosen, kind, depth):
        inner = self._steps(chosen, depth + 1) if kind == "region" else []
        names = {"operator": OPERATORS, "layout": LAYOUTS}.get(kind, ("dropped", "held"))
        return kind, chosen.choice(list(names)), chosen.choice(self.CALLS), chosen.randrange(2**30), inner

    def run(self, with_regions: bool):
        torch.manual_seed(7)
        self.with_regions, self.held, self.modules = with_regions, [], {}
        y = self._body(self.steps, self.x * 1)
        loss = (y.sin() * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum()
        modules = nn.ModuleList(self.modules.values())
        leaves = [self.x, *self.weights.values(), *modules.parameters()]
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
        return [y.detach(), y.stride(), torch.rand(2), *found, *modules.buffers()]

    def _body(self, steps, x):
        for step in steps:
            x = self._done(*step, x)
        return x

    def _done(self, kind, name, call, seed, inner, x):
        call = call if self.with_regions else plain
        if kind == "operator":
            self.used[name] += 1
            return OPERATORS[name](x, functools.partial(self._weight, seed, x.dtype))
        if kind == "layout":
            found = LAYOUTS[name](x, random.Random(seed))
            self.used[name] += 1
            return found
        if name == "held":
            self.held.append(x)
        if kind == "module":
            key = seed, x.shape[1]
            if key not in self.modules:
                self.modules[key] = self._module(seed, x)
            return call(self.modules[key], x)
        return call(functools.partial(self._body, inner), x * 1 if seed % 2 else x)

    def _weight(self, seed, dtype, *shape):
        key = seed, shape
        if key not in self.weights:
            random_numbers = torch.Generator().manual_seed(seed)
            self.weights[key] = torch.randn(shape, generator=random_numbers, dtype=dtype).requires_grad_()
        return self.weights[key]

    def _module(self, seed, x):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            norm = nn.BatchNorm2d(x.shape[1]) if _many(x) else nn.Identity()
            layers = [nn.Conv2d(x.shape[1], x.shape[1], 1), nn.Dropout(0.4), norm, nn.ReLU(inplace=True)]
            return nn.Sequential(*layers).to(x.dtype)


def differences(seeds):
    """The programs that regions make other programs of."""
    found, used, done = [], collections.Counter[str](), 0
    for seed in seeds:
        program = Program(seed, used)
        try:
            expected = program.run(False)
        except (RuntimeError, ValueError, IndexError):  # an operator that does not take this size or layout
            continue
        done += 1
        try:
            assert_equal(program.run(True), expected)
        except Exception as error:
            found.append((seed, str(error)[:300]))
    return found, used, done


@few(1)
@pytest.mark.parametrize("first", range(0, 100, 50))
def test_random_layouts(first):
    found, _, done = differences(range(first, first + 50))
    assert found == []
    assert done > 35


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op")
@pytest.mark.parametrize("first", range(0, 2100, 350))
def test_two_thousand_random_layouts(first):
    found, used, done = differences(range(first, first + 350))
    assert found == []
    assert done >= 334
    assert all(used[name] > 20 for name in [*LAYOUTS, *OPERATORS]), used
