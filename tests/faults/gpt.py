"""A small GPT with dropout, and with running statistics, of which a step has some hundred operators."""
from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["ROWS", "TOKENS", "WORDS", "Block", "Embedding", "Gpt", "Head", "batch", "loss_of"]

WORDS, WIDTH, TOKENS, ROWS = 11, 8, 6, 4


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(TOKENS, WIDTH) / 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.dropout(self.words(tokens) + self.places, 0.1, self.training)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.statistics = nn.LayerNorm(WIDTH), nn.BatchNorm1d(TOKENS)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.view(*x.shape[:2], 2, -1).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + F.dropout(self.out(mixed), 0.1, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.statistics(x)))), 0.1, self.training)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.words = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.words(self.norm(x))


class Gpt(nn.Sequential):
    """Its layers: an embedding, ``depth`` blocks, a head."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__(Embedding(), *(Block() for _ in range(depth)), Head())


def batch(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Tokens, and those that come next."""
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(WORDS, (rows, TOKENS), generator=generator) for _ in range(2))  # type: ignore[return-value]


def loss_of(outputs: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), target.flatten())
