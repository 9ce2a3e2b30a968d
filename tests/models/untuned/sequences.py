"""Sequences: recurrent layers, attentions, scans, losses of sequences."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.models.untuned.model import Loss, model


@model((7, 4, 8))
class Recurrent(Loss):
    """LSTMs of several layers and both directions, one with a projection, and a plain RNN."""

    def __init__(self):
        super().__init__()
        self.deep = nn.LSTM(8, 8, num_layers=2, bidirectional=True, dropout=0.2)
        self.projected, self.plain = nn.LSTM(16, 12, proj_size=6), nn.RNN(6, 8, nonlinearity="relu")

    def forward(self, x):
        h, _ = self.deep(x)
        h, (last, cell) = self.projected(h)
        h, end = self.plain(h)
        return self.loss(h, last, cell, end)


@model((6, 4, 8))
class Cells(Loss):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = nn.LSTMCell(8, 8), nn.RNNCell(8, 8), nn.RNNCell(8, 8, nonlinearity="relu")

    def forward(self, x):
        state = x.new_zeros(4, 8), x.new_zeros(4, 8)
        second = third = x.new_zeros(4, 8)
        for step in x:
            state = self.one(step, state)
            second, third = self.two(state[0], second), self.three(state[1], third)
        return self.loss(second, third)


@model((2, 12, 16))
class Attentions(Loss):
    """With masks, with biases, with fewer keys than queries, linear, with weights that are returned."""

    def __init__(self):
        super().__init__()
        self.whole = nn.MultiheadAttention(16, 4, dropout=0.1, batch_first=True, add_bias_kv=True)
        self.project, self.bias = nn.Linear(16, 48), nn.Parameter(torch.randn(4, 12, 12))
        self.one_key, self.linear = nn.Linear(16, 8), nn.Linear(16, 48)

    def forward(self, x):
        causal = torch.ones(12, 12, dtype=torch.bool).triu(1)
        whole, weights = self.whole(x, x, x, attn_mask=causal, average_attn_weights=False)
        q, k, v = self.project(x + whole).view(2, 12, 3, 4, 4).permute(2, 0, 3, 1, 4)
        biased = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias)
        dropped = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True)
        key, value = self.one_key(x).chunk(2, -1)
        shared = (q @ key[:, None].mT / 2).softmax(-1) @ value[:, None]
        a, b, c = self.linear(x).chunk(3, -1)
        linear = F.elu(a) @ (F.elu(b).mT @ c)
        return self.loss(weights, biased, dropped, shared, linear)


@model((10, 2, 16), (6, 2, 16))
class EncoderDecoder(Loss):
    def __init__(self):
        super().__init__()
        self.model = nn.Transformer(16, 2, 1, 2, 32, dropout=0.1)

    def forward(self, source, target):
        mask = nn.Transformer.generate_square_subsequent_mask(6)
        return self.loss(self.model(source, target, tgt_mask=mask, tgt_is_causal=True))


@model((4, 24, 8))
class StateSpace(Loss):
    """A scan step by step, a sum by cumulation, a gate."""

    def __init__(self):
        super().__init__()
        self.into, self.gate, self.out = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.decay = nn.Parameter(torch.rand(16))

    def forward(self, x):
        u, state, states = self.into(x), x.new_zeros(4, 16), []
        for step in range(0, 24, 3):
            state = state * torch.exp(-F.softplus(self.decay)) + u[:, step]
            states.append(state)
        sums = (u.cumsum(1) / torch.arange(1, 25)[:, None]) * self.gate(x).sigmoid()
        products = torch.cumprod(u[:, :5].sigmoid(), 1)
        return self.loss(self.out(torch.stack(states, 1)), sums, products, torch.logcumsumexp(u, 1), u.cummax(1).values)


@model((20, 3, 12), lambda: torch.randint(1, 12, (3, 6)))
class Aligned(Loss):
    """Losses of many kinds."""

    def __init__(self):
        super().__init__()
        self.hidden, self.head = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x, targets):
        logits = self.head(self.hidden(x).relu())
        first, second = logits[0], logits[1]
        labels = targets[:, 0]
        return self.loss(
            F.cross_entropy(first, labels, label_smoothing=0.1), F.huber_loss(first, second),
            F.kl_div(first.log_softmax(-1), second.softmax(-1), reduction="batchmean"), F.smooth_l1_loss(first, second),
            F.nll_loss(first.log_softmax(-1), labels, weight=torch.rand(12)), F.poisson_nll_loss(first, second.abs()),
            F.triplet_margin_loss(first, second, logits[2]), F.multi_margin_loss(first, labels),
            F.cosine_embedding_loss(first, second, torch.tensor([1, -1, 1])),
            F.soft_margin_loss(first, second.detach().sign()),
            F.binary_cross_entropy_with_logits(first, second.sigmoid()), F.hinge_embedding_loss(first, second.sign()),
            F.multilabel_margin_loss(first, torch.tensor([[3, 0, -1] + [0] * 9] * 3)),
        )


@model((2, 1, 64))
class Wave(Loss):
    """Dilated causal convolutions with gates."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(1, 8, 1)
        self.layers = nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=2**power) for power in range(4))
        self.skips = nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(4))

    def forward(self, x):
        h, total = self.first(x), 0
        for layer, skip in zip(self.layers, self.skips):
            wave, gate = layer(F.pad(h, (layer.dilation[0], 0))).chunk(2, 1)
            part = wave.tanh() * gate.sigmoid()
            h, total = h + part, total + skip(part)
        return self.loss(total)
