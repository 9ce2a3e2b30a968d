"""Layers: convolutions, norms, pools, activations, embeddings."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.models.untuned.model import Loss, model


@model(lambda: torch.randint(50, (64,)), lambda: torch.arange(0, 64, 4), lambda: torch.rand(64))
class Bags(Loss):
    """EmbeddingBags, summed with weights, averaged and by their maximum, of bags of several sizes."""

    def __init__(self):
        super().__init__()
        self.sums, self.means, self.tops = (nn.EmbeddingBag(50, 32, mode=mode) for mode in ("sum", "mean", "max"))
        self.mix = nn.Sequential(nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, words, starts, weights):
        bags = self.sums(words, starts, weights), self.means(words, starts), self.tops(words, starts)
        return self.loss(self.mix(torch.cat(bags, 1)))


@model(lambda: torch.randint(200, (16, 12)))
class BagsOnly(Loss):
    """Nothing but bags, of one size."""

    def __init__(self):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(200, 24, mode=mode) for mode in ("sum", "mean", "max") for _ in "ab")

    def forward(self, words):
        return self.loss(torch.stack([bag(words) for bag in self.bags]).tanh())


@model(lambda: torch.randint(100, (8, 12)))
class SparseBags(Loss):
    def __init__(self):
        super().__init__()
        self.words, self.bag = nn.Embedding(100, 16, sparse=True), nn.EmbeddingBag(100, 16, sparse=True, mode="mean")
        self.scaled, self.padded = nn.Embedding(100, 16, scale_grad_by_freq=True), nn.Embedding(100, 16, padding_idx=0)
        self.head = nn.Linear(16, 16)

    def forward(self, words):
        h = self.words(words) + self.scaled(words) + self.padded(words)
        return self.loss(self.head(h).tanh(), self.bag(words))


@model((4, 8, 16, 16))
class Convolutions(Loss):
    """Depthwise, grouped, dilated, strided, transposed, pointwise."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.ReLU6(), nn.Conv2d(8, 16, 1), nn.Hardswish(),
            nn.Conv2d(16, 16, 3, padding=2, dilation=2), nn.SiLU(), nn.Conv2d(16, 16, 3, stride=2, padding=1, groups=4),
            nn.Mish(), nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.Softplus(),
            nn.ConvTranspose2d(8, 8, 3, dilation=2, groups=2),
        )

    def forward(self, x):
        return self.loss(self.body(x))


@model((4, 4, 40), (2, 3, 6, 6, 6))
class OtherDimensions(Loss):
    """Of one and three dimensions, with padding of several kinds."""

    def __init__(self):
        super().__init__()
        self.one = nn.Sequential(
            nn.Conv1d(4, 8, 5, padding=2, padding_mode="reflect"), nn.BatchNorm1d(8), nn.ELU(),
            nn.Conv1d(8, 8, 3, padding=4, dilation=4), nn.GLU(1), nn.ConvTranspose1d(4, 4, 3),
        )
        self.three = nn.Sequential(
            nn.Conv3d(3, 6, 3, padding=1), nn.BatchNorm3d(6), nn.LeakyReLU(), nn.MaxPool3d(2),
            nn.ConvTranspose3d(6, 3, 2, 2),
        )

    def forward(self, x, y):
        return self.loss(self.one(F.pad(x, (1, 2), mode="replicate")), self.three(F.pad(y, (1,) * 6, mode="constant")))


@model((6, 12, 8, 8))
class Norms(Loss):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([
            nn.GroupNorm(3, 12), nn.InstanceNorm2d(12, affine=True, track_running_stats=True), nn.BatchNorm2d(12),
            nn.LayerNorm([12, 8, 8]), nn.LocalResponseNorm(3), nn.InstanceNorm2d(12), nn.BatchNorm2d(12, momentum=0.3),
            nn.RMSNorm([8]), nn.BatchNorm2d(12, affine=False),
        ])
        self.between = nn.ModuleList(nn.Conv2d(12, 12, 1) for _ in self.norms)

    def forward(self, x):
        for norm, between in zip(self.norms, self.between):
            x = x + F.gelu(norm(between(x)), approximate="tanh")
        return self.loss(F.normalize(x, dim=1))


@model((4, 6, 12, 12))
class Pools(Loss):
    def __init__(self):
        super().__init__()
        self.before = nn.Conv2d(6, 6, 3, padding=1)
        self.pool, self.back = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)
        self.others = nn.ModuleList([
            nn.AvgPool2d(3, 2, 1), nn.AdaptiveAvgPool2d(5), nn.AdaptiveMaxPool2d(4), nn.LPPool2d(2, 3),
            nn.FractionalMaxPool2d(2, output_size=5), nn.MaxPool2d(3, 2, dilation=2), nn.AvgPool2d(2, ceil_mode=True),
        ])

    def forward(self, x):
        h = self.before(x).tanh()
        small, places = self.pool(h)
        h = h + self.back(small.exp(), places)
        return self.loss(*(other(h) for other in self.others))


@model((8, 32))
class Activations(Loss):
    def __init__(self):
        super().__init__()
        kinds = [
            nn.PReLU(4), nn.RReLU(), nn.CELU(), nn.SELU(), nn.GELU(), nn.Hardtanh(), nn.LogSigmoid(), nn.Softshrink(),
            nn.Hardshrink(), nn.Softsign(), nn.Tanhshrink(), nn.Threshold(0.1, 0.2), nn.Softmin(-1), nn.LogSoftmax(-1),
            nn.Hardsigmoid(), nn.AlphaDropout(0.2), nn.Dropout(0.3), nn.FeatureAlphaDropout(0.1), nn.Dropout1d(0.2),
        ]
        self.kinds, self.mix = nn.ModuleList(kinds), nn.ModuleList(nn.Linear(8, 8) for _ in kinds)

    def forward(self, x):
        h = x.view(8, 4, 8)
        for kind, mix in zip(self.kinds, self.mix):
            h = h + kind(mix(h))
        return self.loss(h)


@model((2, 8, 8, 8))
class ChannelsLast(Loss):
    """Convolutions of another memory format, a squeeze-and-excite, a stochastic depth."""

    def __init__(self):
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(4))
        self.squeeze, self.excite = nn.Linear(8, 2), nn.Linear(2, 8)

    def forward(self, x):
        x = x.contiguous(memory_format=torch.channels_last)
        for convolution, norm in zip(self.convolutions, self.norms):
            h = norm(convolution(x)).relu_()
            h = h * self.excite(self.squeeze(h.mean((2, 3))).relu()).sigmoid()[:, :, None, None]
            x = x + h * torch.bernoulli(torch.full((x.shape[0], 1, 1, 1), 0.8))
        return self.loss(x)
