"""Convolutions: CIFAR ResNets and a U-Net, with batch norms in training mode and ReLUs in place."""
from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from tests.models.case import Parts, case, classify

__all__ = ["Basic", "Bottleneck", "UNet", "resnet", "unet"]


def conv(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


def norm(channels: int) -> list[nn.Module]:
    return [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]


class Basic(nn.Module):
    """Two convolutions; the norms come after them (He et al., 2015)."""

    expansion, convolutions = 1, 2

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        first, second = conv(inputs, width, 3, stride), conv(width, width)
        self.body = nn.Sequential(first, *norm(width), second, nn.BatchNorm2d(width))
        same = inputs == width and stride == 1
        self.skip = nn.Identity() if same else nn.Sequential(conv(inputs, width, 1, stride), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(x) + self.skip(x)).relu_()


class Bottleneck(nn.Module):
    """Three convolutions; the norms come before them, and nothing after the sum (He et al., 2016)."""

    expansion, convolutions = 4, 3

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.before = nn.Sequential(*norm(inputs))
        self.body = nn.Sequential(
            conv(inputs, width, 1), *norm(width), conv(width, width, 3, stride), *norm(width), conv(width, outputs, 1)
        )
        self.skip = None if inputs == outputs and stride == 1 else conv(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        ready = self.before(x)
        return self.body(ready) + (x if self.skip is None else self.skip(ready))


BLOCKS = {"basic": Basic, "bottleneck": Bottleneck}


@case("resnet20", depth=20)
@case("resnet110", depth=110)
@case("resnet200", depth=200, block="bottleneck")
def resnet(
    depth: int, block: str = "basic", width: int = 2, side: int = 8, batch: int = 4, classes: int = 10
) -> Parts:
    """A convolution, three stages of blocks, of ``width``, twice and four times it, and a linear head."""
    kind = BLOCKS[block]
    count = (depth - 2) // (3 * kind.convolutions)
    channels, body = width, [conv(3, width), *(norm(width) if kind is Basic else [])]
    for stage in range(3):
        for place in range(count):
            body.append(kind(channels, width << stage, stride=2 if stage and not place else 1))
            channels = (width << stage) * kind.expansion
    tail = [] if kind is Basic else norm(channels)
    model = nn.Sequential(*body, *tail, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
    return model, lambda: (torch.randn(batch, 3, side, side),), classify


def twice(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(conv(inputs, outputs), *norm(outputs), conv(outputs, outputs), *norm(outputs))


class UNet(nn.Module):
    """Down by max pooling, up by transposed convolutions, and at each level a skip that is concatenated."""

    def __init__(self, levels: int, width: int, classes: int) -> None:
        super().__init__()
        widths = [width << level for level in range(levels + 1)]
        self.down = nn.ModuleList(twice(*pair) for pair in zip([3, *widths], widths[:-1]))
        self.bottom = twice(widths[-2], widths[-1])
        pairs = list(pairwise(widths))[::-1]
        self.up = nn.ModuleList(nn.ConvTranspose2d(wide, narrow, 2, stride=2) for narrow, wide in pairs)
        self.merge = nn.ModuleList(twice(wide, narrow) for narrow, wide in pairs)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.down:
            skips.append(x := down(x))
            x = nn.functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for up, merge in zip(self.up, self.merge):
            x = merge(torch.cat([skips.pop(), up(x)], 1))
        return self.head(x)


@case("unet")
def unet(levels: int = 2, width: int = 4, side: int = 8, batch: int = 2, classes: int = 3) -> Parts:
    return UNet(levels, width, classes), lambda: (torch.randn(batch, 3, side, side),), classify
