"""Shapes: what gathers, scatters, sorts, cuts and puts together."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.models.untuned.model import Loss, model


@model((32, 16), lambda: torch.randint(32, (2, 80)))
class Graph(Loss):
    """Messages over edges, and several ways to reduce them."""

    def __init__(self):
        super().__init__()
        self.message, self.update = nn.Linear(32, 16), nn.Linear(64, 16)

    def forward(self, x, edges):
        into, of = edges
        for _ in range(2):
            sent = self.message(torch.cat([x[into], x[of]], 1)).relu()
            place = into[:, None].expand_as(sent)
            zeros = torch.zeros_like(x)
            parts = [
                zeros.index_add(0, into, sent), zeros.scatter_add(0, place, sent),
                zeros.scatter_reduce(0, place, sent, "amax"), zeros.scatter_reduce(0, place, sent, "mean"),
            ]
            x = self.update(torch.cat(parts, 1)).tanh()
        return self.loss(x)


@model((8, 24))
class Sorted(Loss):
    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x):
        h = self.before(x).sin()
        values, places = h.sort(-1, descending=True)
        top, where = h.topk(6, -1)
        middle = h.median(-1).values, h.kthvalue(5, -1).values, h.quantile(0.3, dim=-1), h.nanmean(-1)
        back = torch.zeros_like(h).scatter(1, where, top).gather(1, places)
        ranked = self.after(values * back.cumsum(1))
        others = h.var(0), h.amax(0), h.argsort(-1).to(h.dtype) * h, torch.aminmax(h, dim=1)[0]
        return self.loss(ranked, *middle, *others)


@model((2, 4, 8, 8))
class Cut(Loss):
    """Pixel shuffle, unfold and fold, rolls, flips, windows."""

    def __init__(self):
        super().__init__()
        self.rise, self.fall = nn.Conv2d(4, 16, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        h = F.pixel_shuffle(self.rise(x), 2)
        patches = F.unfold(h, 4, stride=2, padding=1)
        h = F.fold(patches.softmax(1) * patches, (16, 16), 4, stride=2, padding=1)
        h = F.pixel_unshuffle(self.fall(h.roll((1, 2), (2, 3)).flip(3)), 2)
        windows = h.unfold(2, 4, 2).unfold(3, 4, 2).amax((-1, -2))
        return self.loss(windows, F.channel_shuffle(h, 4), h.rot90(1, (2, 3)).tril(), h.diagonal(0, 2, 3))


@model((2, 3, 10, 10), (2, 2, 3))
class Resampled(Loss):
    def __init__(self):
        super().__init__()
        self.before = nn.Conv2d(3, 6, 3, padding=1)

    def forward(self, x, angles):
        h = self.before(x).relu()
        grid = F.affine_grid(angles, (2, 6, 7, 7), align_corners=False)
        kinds = ["bilinear", "bicubic", "nearest", "area", "nearest-exact"]
        sized = [F.interpolate(h, size=(13, 15), mode=kind) for kind in kinds]
        smooth = F.interpolate(h, scale_factor=0.5, mode="bilinear", antialias=True)
        sampled = [F.grid_sample(h, grid, kind, align_corners=False) for kind in ("bilinear", "bicubic", "nearest")]
        return self.loss(*sized, smooth, *sampled)


@model((6, 5, 4))
class InPlace(Loss):
    """Assignments to slices, activations in place, views of views."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.a(x)
        h[:, 1:] += h[:, :-1].clone().sin_()
        h[h > 1] = 0.5
        h[:, 0].mul_(2).add_(1)
        h = F.relu(h, inplace=True)
        rest = h.transpose(0, 1)[1:].exp()
        made = torch.empty(6, 5, 4)
        made[:3] = self.b(h[:3])
        made[3:] = self.b(h[3:]).tanh_()
        made.index_copy_(1, torch.tensor([4, 0]), made[:, :2].clone())
        made.masked_fill_(made > 2, 0).clamp_(-1, 1)
        return self.loss(made, rest, *h.unbind(1), torch.stack(h.split([1, 3, 2])[1].chunk(3)))


@model((16, 12), lambda: torch.randint(4, (16,)))
class Experts(Loss):
    """A mixture of experts, of a capacity, whose router picks two."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(12, 4)
        self.rise, self.fall = nn.Parameter(torch.randn(4, 12, 24) / 4), nn.Parameter(torch.randn(4, 24, 12) / 4)

    def forward(self, x, noise):
        gates = (self.router(x) + 0.1 * torch.randn(16, 4)).softmax(-1)
        weights, chosen = gates.topk(2, -1)
        mask = F.one_hot(chosen, 4).permute(2, 1, 0)
        places = mask.flatten(1).cumsum(1).view(4, 2, 16) * mask - 1
        kept = (places >= 0) & (places < 10)
        slots = F.one_hot(places.clamp(0, 9), 10).to(x.dtype) * kept[..., None]
        given = torch.einsum("eksc,sd->ecd", slots, x)
        made = torch.bmm(F.silu(torch.bmm(given, self.rise)), self.fall)
        out = torch.einsum("eksc,sk,ecd->sd", slots, weights, made)
        balance = (gates.mean(0) * mask.sum((1, 2)).to(x.dtype)).sum()
        return self.loss(out, balance, gates[torch.arange(16), noise])


@model((5, 20), lambda: torch.rand(5, 20))
class Splines(Loss):
    """Knots that are searched for, tables that are looked up."""

    def __init__(self):
        super().__init__()
        self.table, self.before = nn.Parameter(torch.randn(9, 20)), nn.Linear(20, 20)
        self.register_buffer("knots", torch.linspace(-2, 2, 8))

    def forward(self, x, shift):
        h = self.before(x)
        place = torch.bucketize(h.detach(), self.knots)
        low = self.table.gather(0, place.clamp(max=7))
        high = torch.take_along_dim(self.table, place.clamp(max=7) + 1, 0)
        mixed = torch.lerp(low, high, (h - h.floor()) * shift)
        histogram = torch.histc(h.detach(), 8)
        return self.loss(mixed, self.table[place[0], torch.arange(20)], histogram * h.mean(), h.take(place.view(-1)))
