"""Large: the three models of the GPU benchmarks of pipelines, each as a Sequential with a mini-batch."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

from benchmarks.losses import next_token
from benchmarks.pipe.variants import Job
from benchmarks.transformer import Block, Embedding
from torchckpt.pipe.skip import Namespace, pop, stash

__all__ = ["SMALL", "gpt", "resnet", "unet"]


# ResNet-101 ---------------------------------------------------------------------------------------------------------


def resnet(
    device: torch.device | str, rows: int, side: int = 224, width: int = 64, counts: Sequence[int] = (3, 4, 23, 3)
) -> Job:
    """He et al., 2015, with as many bottlenecks in its four parts as ``counts``; by default 101 layers."""
    torch.manual_seed(0)
    stem = nn.Sequential(*_convolved(3, width, 7, 2), nn.MaxPool2d(3, 2, 1))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width * 2 ** (len(counts) + 1), 1000))
    model = nn.Sequential(stem, *_bottlenecks(width, counts), head)
    x = torch.randn(rows, 3, side, side, device=device)
    return Job(model, x, torch.randint(1000, (rows,), device=device), cross_entropy)


def _bottlenecks(width: int, counts: Sequence[int]) -> Iterator[nn.Module]:
    inner = width
    for part, count in enumerate(counts):
        for block in range(count):
            middle = width * 2**part
            yield Bottleneck(inner, middle, stride=2 if part and not block else 1)
            inner = 4 * middle


class Bottleneck(nn.Module):
    def __init__(self, inner: int, middle: int, stride: int) -> None:
        super().__init__()
        outer = 4 * middle
        self.layers = nn.Sequential(
            *_convolved(inner, middle, 1),
            *_convolved(middle, middle, 3, stride),
            *_convolved(middle, outer, 1)[:-1],
        )
        self.shortcut = nn.Sequential(*_convolved(inner, outer, 1, stride)[:-1]) if inner != outer else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = (self.layers(x) + self.shortcut(x)).relu()
        return y


def _convolved(inner: int, outer: int, size: int, stride: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(inner, outer, size, stride, padding=size // 2, bias=False)
    return [convolution, nn.BatchNorm2d(outer), nn.ReLU()]


# U-Net --------------------------------------------------------------------------------------------------------------


def unet(
    device: torch.device | str, rows: int, side: int = 192, depth: int = 5, convolutions: int = 5, channels: int = 64
) -> Job:
    """A U-Net: ``convolutions`` convolutions at each of ``depth`` levels, down and up; channels double per level."""
    torch.manual_seed(0)
    spaces = [Namespace() for _ in range(depth)]
    widths = [channels * 2**level for level in range(depth + 1)]
    downs, ups = [], []
    for space, inner, outer in zip(spaces, [3, *widths], widths):
        downs += [*_several(inner, outer, convolutions), Down(space)]
        ups += [*reversed(_several(3 * outer, outer, convolutions)), Up(space)]  # reversed below
    bottom = _several(widths[-2], widths[-1], convolutions)
    model = nn.Sequential(*downs, *bottom, *reversed(ups), nn.Conv2d(channels, 1, 1))
    x, target = torch.randn(2, rows, 3, side, side, device=device)
    return Job(model, x, target[:, :1], nn.functional.mse_loss)


def _several(inner: int, outer: int, count: int) -> list[nn.Module]:
    return [nn.Sequential(*_convolved(outer if layer else inner, outer, 3)) for layer in range(count)]


class Down(nn.Module):
    def __init__(self, space: Namespace) -> None:
        super().__init__()
        self.space = space

    def forward(self, x: Tensor) -> Tensor:
        stash("features", x, self.space)
        return nn.functional.max_pool2d(x, 2)


class Up(nn.Module):
    def __init__(self, space: Namespace) -> None:
        super().__init__()
        self.space = space

    def forward(self, x: Tensor) -> Tensor:
        features = pop("features", self.space)
        return torch.cat([interpolate(x, size=features.shape[2:]), features], dim=1)


# GPT ----------------------------------------------------------------------------------------------------------------


def gpt(
    device: torch.device | str,
    rows: int,
    length: int = 512,
    width: int = 768,
    heads: int = 12,
    blocks: int = 12,
    vocabulary: int = 50304,
    dtype: torch.dtype = torch.bfloat16,
) -> Job:
    """Like GPT-2 small, except that its embedding and its head do not share weights."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False))
    model = nn.Sequential(Embedding(vocabulary, length, width), *(Block(width, heads) for _ in range(blocks)), head)
    text = torch.randint(vocabulary, (rows, length + 1), device=device)
    return Job(model.to(dtype), text[:, :-1], text[:, 1:], next_token)


# for a CPU ----------------------------------------------------------------------------------------------------------

SMALL: dict[str, Callable[..., Job]] = {
    "ResNet": partial(resnet, rows=8, side=32, width=4, counts=(1, 1, 2, 1)),
    "U-Net": partial(unet, rows=4, side=32, depth=3, convolutions=2, channels=4),
    "GPT": partial(gpt, rows=4, length=16, width=32, heads=2, blocks=3, vocabulary=64, dtype=torch.float32),
}
"""The same three models, small: for counts without times, and for rehearsals."""
