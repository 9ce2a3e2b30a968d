"""Algebra: products of many kinds, decompositions, transforms, complex numbers."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.models.untuned.model import Loss, model


@model((6, 8, 8))
class Decomposed(Loss):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x):
        h = self.mix(x)
        positive = h @ h.mT + 4 * torch.eye(8)
        lower = torch.linalg.cholesky(positive)
        solved = torch.linalg.solve(positive, h)
        values, vectors = torch.linalg.eigh(positive)
        r = torch.linalg.qr(h).R
        s = torch.linalg.svd(h + 3 * torch.eye(8), full_matrices=False).S
        others = torch.linalg.inv(positive), torch.linalg.slogdet(positive).logabsdet, torch.linalg.matrix_exp(h / 8)
        triangular = torch.linalg.solve_triangular(lower, h, upper=False)
        return self.loss(lower, solved, values, vectors.abs(), r, s, *others, triangular, torch.cholesky_inverse(lower))


@model((4, 16, 8), (8, 4))
class Einsums(Loss):
    def __init__(self):
        super().__init__()
        self.core, self.factors = nn.Parameter(torch.randn(4, 4, 8)), nn.Parameter(torch.randn(3, 8, 8))
        self.bilinear = nn.Bilinear(8, 8, 4)

    def forward(self, x, y):
        a = torch.einsum("bsd,df->bsf", x, y)
        b = torch.einsum("bsf,fge,bsg->bse", a, self.core, a)
        c = torch.einsum("bii->bi", b[:, :8] @ self.factors[0])
        d = torch.tensordot(b, self.factors[1], dims=([2], [0]))
        e = torch.linalg.multi_dot([d[0], self.factors[2], self.factors[1]])
        f = torch.kron(y, self.core[0, :2])
        return self.loss(a, c, d, e, f, self.bilinear(b, x), torch.baddbmm(a, x, self.core[:1].expand(4, 4, 8).mT))


@model((4, 16, 16))
class Fourier(Loss):
    """Spectral convolutions."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 16, 9, dtype=torch.complex64))
        self.filter = nn.Parameter(torch.randn(32))

    def forward(self, x):
        h = torch.fft.irfft2(torch.fft.rfft2(x) * self.weight, s=(16, 16))
        h = h + torch.fft.ifft(torch.fft.fft(x.flatten(1, 2), n=300)[:, :256] * 2, dim=-1).real.view(4, 16, 16)
        waves = torch.stft(h.flatten(1), 32, 16, window=torch.hann_window(32), return_complex=True)
        shifted = torch.fft.fftshift(torch.fft.rfft(self.filter))
        return self.loss(h, waves.abs(), shifted, torch.fft.hfft(waves[0], dim=0))


@model((6, 8), (6, 8))
class Complex(Loss):
    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(8, 8, dtype=torch.complex64) / 3) for _ in range(2))

    def forward(self, real, imaginary):
        z = torch.complex(real, imaginary) @ self.a
        z = torch.polar(z.abs().tanh(), z.angle()) @ self.b.conj().T
        w = z * z.conj() + torch.exp(1j * real)
        return self.loss(z, torch.view_as_real(w), w.real.cos(), torch.view_as_complex(torch.stack([real, z.imag], -1)))


@model((10, 6), (8, 6))
class Distances(Loss):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, y):
        a, b = self.a(x), self.b(y)
        pairs = F.cosine_similarity(a[:8], b), F.pairwise_distance(a[:8], b)
        near = torch.cdist(a, b), torch.cdist(a, b, p=1.0), F.pdist(a), *pairs
        kernel = torch.exp(-near[0].square() / 2)
        norms = torch.linalg.vector_norm(a, 3, dim=1), torch.linalg.matrix_norm(b), a.norm(dim=0)
        others = torch.renorm(b, 2, 0, 1.0), torch.cross(a[:, :3], a[:, 3:], dim=1)
        return self.loss(*near, kernel.logsumexp(1), *norms, *others)


@model((12, 6))
class Special(Loss):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(6, 6)

    def forward(self, x):
        h = self.mix(x)
        p = h.abs() + 0.1
        kinds = [
            torch.special.gammaln(p), torch.digamma(p), torch.erf(h), torch.erfinv(h.tanh() * 0.9),
            torch.special.i0e(h), torch.atan2(h, p), torch.hypot(h, p), torch.xlogy(p, p), torch.logaddexp(h, p),
            torch.sinc(h), torch.logit(h.sigmoid()), torch.fmod(h, 0.7), torch.remainder(h, 0.3), torch.frac(h),
            torch.where(h > 0, h.exp(), h.square()), torch.special.entr(p), torch.float_power(p, 1.5),
            torch.addcmul(h, h, p), torch.addcdiv(h, h, p), torch.copysign(h, p), torch.clamp(h, min=p * 0.1),
            torch.maximum(h, p), torch.special.log_ndtr(h), torch.polygamma(1, p), torch.mvlgamma(p + 2, 2),
        ]
        return self.loss(*kinds)


@model((8, 6), (8, 6))
class Functional(Loss):
    """Transforms of torch.func inside a forward."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x, y):
        def energy(row):
            return self.layer(row).sin().sum()

        rows = torch.func.vmap(lambda a, b: self.layer(a) * b)(x, y)
        slopes = torch.func.vmap(torch.func.grad(energy))(x)
        return self.loss(rows, slopes)


@model((6, 4))
class Penalty(Loss):
    """A gradient inside a forward, which is differentiated itself."""

    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        x = x.detach().requires_grad_()
        scores = self.critic(x)
        (slopes,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        return self.loss(scores, (slopes.norm(dim=1) - 1) ** 2)
