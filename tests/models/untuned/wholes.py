"""Wholes: models as they are written, by what is peculiar about them."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import torchckpt
from tests.models.untuned.model import Loss, model


@model((3, 1, 12, 12))
class Capsules(Loss):
    """Routing by agreement between capsules."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 16, 5), nn.Conv2d(16, 32, 3, stride=2)
        self.votes = nn.Parameter(torch.randn(1, 36, 5, 16, 8) * 0.1)

    @staticmethod
    def squash(s):
        size = s.norm(dim=-1, keepdim=True)
        return size / (1 + size**2) * s

    def forward(self, x):
        h = self.second(self.first(x).relu())
        u = self.squash(h.view(3, 4, 8, 9).transpose(2, 3).reshape(3, 36, 8))
        votes = (self.votes @ u[:, :, None, :, None]).squeeze(-1)
        logits = torch.zeros(3, 36, 5)
        for _ in range(3):
            v = self.squash((logits.softmax(2)[..., None] * votes).sum(1))
            logits = logits + (votes * v[:, None]).sum(-1)
        return self.loss(v.norm(dim=-1), v)


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x.round() * scale

    @staticmethod
    def backward(ctx, gradient):
        x, scale = ctx.saved_tensors
        return gradient * scale * (x.abs() < 2), (gradient * x.round()).sum()


class _Swish(torch.autograd.Function):
    """It saves less than autograd would, and two outputs, one without a gradient."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        big = x > 1
        ctx.mark_non_differentiable(big)
        return x * x.sigmoid(), big

    @staticmethod
    def backward(ctx, gradient, _):
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return gradient * (s + x * s * (1 - s))


@model((16, 12))
class Custom(Loss):
    """Custom autograd Functions."""

    def __init__(self):
        super().__init__()
        self.layers, self.scale = nn.ModuleList(nn.Linear(12, 12) for _ in range(4)), nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        for layer in self.layers:
            x, big = _Swish.apply(layer(x))
            x = _Straight.apply(x * 3, self.scale) + x * big
        return self.loss(x)


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 16), nn.Tanh())

    def forward(self, x):
        return x + self.layers(x)


@model((32, 16))
class Checkpointed(Loss):
    """Regions of torch.utils.checkpoint, one in another."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(6))

    def pair(self, x, first):
        x = self.blocks[first](x)
        return torch_checkpoint(self.blocks[first + 1], x, use_reentrant=False)

    def forward(self, x):
        for first in (0, 2, 4):
            x = torch_checkpoint(self.pair, x, first, use_reentrant=False)
        return self.loss(x)


@model((32, 16))
class CheckpointedHere(Checkpointed):
    """Regions of this package."""

    def forward(self, x):
        for first in (0, 2, 4):
            x = torchckpt.checkpoint(self.pair, x, first)
        return self.loss(x)


@model((8, 10))
class Normed(Loss):
    """Weights that are made of others: normed, orthogonal, shared."""

    def __init__(self):
        super().__init__()
        self.a, self.b = parametrizations.weight_norm(nn.Linear(10, 10)), parametrizations.orthogonal(nn.Linear(10, 10))
        self.c, self.d = parametrizations.spectral_norm(nn.Linear(10, 10)), nn.Linear(10, 10)
        self.e = nn.Linear(10, 10)
        self.e.weight = self.d.weight

    def forward(self, x):
        h = self.d(self.c(self.b(self.a(x).tanh()).tanh()).tanh())
        return self.loss(F.linear(self.e(h).tanh(), self.d.weight.T))


@model((4, 3, 8, 8))
class Quantized(Loss):
    """A codebook with a straight-through gradient, and statistics that the forward updates."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Conv2d(3, 8, 4, 2, 1), nn.ConvTranspose2d(8, 3, 4, 2, 1)
        self.codes = nn.Parameter(torch.randn(16, 8))
        self.register_buffer("uses", torch.zeros(16))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        z = self.encode(x).permute(0, 2, 3, 1)
        flat = z.reshape(-1, 8)
        nearest = torch.cdist(flat, self.codes).argmin(1)
        with torch.no_grad():
            self.uses.mul_(0.9).add_(F.one_hot(nearest, 16).sum(0))
            self.mean = self.mean * 0.9 + flat.mean(0) * 0.1
        q = self.codes[nearest].view_as(z)
        straight = z + (q - z).detach()
        made = self.decode((straight - self.mean).permute(0, 3, 1, 2))
        return self.loss(made, (q - z.detach()).square(), (q.detach() - z).square() * self.uses.mean())


@model((6, 8))
class Flow(Loss):
    """A normalizing flow: couplings with masks, and logarithms of determinants."""

    def __init__(self):
        super().__init__()
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(4))
        self.turn = nn.Parameter(torch.linalg.qr(torch.randn(8, 8)).Q)

    def forward(self, x):
        volume = torch.zeros(6)
        for place, net in enumerate(self.nets):
            mask = (torch.arange(8) % 2 == place % 2).float()
            scale, shift = net(x * mask).chunk(2, -1)
            scale = scale.tanh() * (1 - mask)
            x = x * mask + (1 - mask) * (x * scale.exp() + shift)
            volume = volume + scale.sum(-1) + torch.slogdet(self.turn).logabsdet
            x = x @ self.turn
        return self.loss(x, volume, torch.distributions.Normal(0.0, 1.0, validate_args=False).log_prob(x))


@model((4, 6), (4, 3, 6, 6))
class Hyper(Loss):
    """Weights of convolutions that are made of the input, by groups for each sample."""

    def __init__(self):
        super().__init__()
        self.make = nn.Linear(6, 5 * 3 * 9)

    def forward(self, code, x):
        weight = self.make(code).view(20, 3, 3, 3)
        made = F.conv2d(x.view(1, 12, 6, 6), weight, padding=1, groups=4).view(4, 5, 6, 6)
        return self.loss(made.relu(), F.conv_transpose2d(made, weight[:5], stride=2))


@model((16, 8))
class Sampled(Loss):
    """Noise of many kinds, and samples."""

    def __init__(self):
        super().__init__()
        self.mean, self.spread, self.choose = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        z = self.mean(x) + self.spread(x).exp() * torch.randn(16, 8)
        z = z * torch.rand_like(z).add(0.5) + torch.normal(0.0, 0.1, (16, 8)) + torch.empty(16, 8).exponential_().log()
        logits = self.choose(z)
        soft, hard = F.gumbel_softmax(logits, tau=0.5), F.gumbel_softmax(logits, hard=True)
        picked = torch.multinomial(logits.softmax(-1).detach(), 1)
        order = torch.randperm(16)
        return self.loss(z[order], soft, hard, logits.gather(1, picked), torch.poisson(torch.ones(16)) * z.mean(1))


@model((8, 12))
class Mixed(Loss):
    """Parts of other dtypes, and an autocast inside."""

    def __init__(self):
        super().__init__()
        self.low, self.high, self.cast = nn.Linear(12, 12).bfloat16(), nn.Linear(12, 12).double(), nn.Linear(12, 12)
        self.norm = nn.LayerNorm(12)

    def forward(self, x):
        h = self.low(x.bfloat16()).float()
        h = h + self.high(h.double()).sin().float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.norm(self.cast(self.cast(h).relu()))
            h = h @ h.T
        return self.loss(h, h.half())


@model((8, 6), (8, 6))
class Twins(Loss):
    """One tower for two inputs, a part that no output needs, a gradient that is reversed."""

    def __init__(self):
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))
        self.unused, self.judge = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x, y):
        a, b = self.tower(x), self.tower(y)
        self.unused(a)
        reversed_ = a + 0
        reversed_.register_hook(lambda gradient: -gradient)
        return self.loss(F.cosine_similarity(a, b), self.judge(reversed_))
