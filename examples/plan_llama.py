"""A Llama of 70 billion parameters in eight stages, to plan its training before any GPU is rented.

    python -m torchckpt plan examples.plan_llama:stages --device h100 --microbatches 32 --schedule all \\
        --budget 60GB --svg plan.svg

The stages are not run: their tensors have no memory. ``tiny`` has the same stages, small enough to run.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Block", "Size", "Stage", "made", "stages", "tiny"]

Made: TypeAlias = "tuple[list[Stage], Tensor, Callable[[Tensor], Tensor]]"


@dataclass(frozen=True)
class Size:
    """The sizes of the model; the defaults are those of Llama 2 70B (Touvron et al., 2023)."""

    blocks: int = 80
    width: int = 8192
    heads: int = 64
    key_heads: int = 8
    hidden: int = 28672
    vocabulary: int = 32000
    tokens: int = 4096
    rows: int = 1  # sequences in a micro-batch
    stages: int = 8
    dropout: float = 0.0

    @property
    def head(self) -> int:
        return self.width // self.heads


class Rotary(nn.Module):
    """Rotary embedding: rotates queries and keys by an angle that depends on their position (Su et al., 2021)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        speeds = 10000.0 ** (-torch.arange(0, size.head, 2, dtype=torch.float32) / size.head)
        angles = torch.outer(torch.arange(size.tokens, dtype=torch.float32), speeds)
        angles = torch.cat([angles, angles], -1)
        self.register_buffer("cos", angles.cos().to(torch.get_default_dtype()), persistent=False)
        self.register_buffer("sin", angles.sin().to(torch.get_default_dtype()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return x * self.cos + torch.cat([-right, left], -1) * self.sin


class Attention(nn.Module):
    """Grouped-query attention: each of the ``key_heads`` key and value heads serves several query heads."""

    def __init__(self, size: Size, rotary: Rotary) -> None:
        super().__init__()
        self.size = size
        self.rotary = rotary
        self.query = nn.Linear(size.width, size.heads * size.head, bias=False)
        self.key = nn.Linear(size.width, size.key_heads * size.head, bias=False)
        self.value = nn.Linear(size.width, size.key_heads * size.head, bias=False)
        self.out = nn.Linear(size.heads * size.head, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = (self._by_head(one(x)) for one in (self.query, self.key, self.value))
        queries, keys = self.rotary(queries), self.rotary(keys)
        found = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        return self.out(found.transpose(1, 2).flatten(2))

    def _by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.size.head)).transpose(1, 2)


class FeedForward(nn.Module):
    """A feed-forward layer with SwiGLU (Shazeer, 2020)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate = nn.Linear(size.width, size.hidden, bias=False)
        self.up = nn.Linear(size.width, size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A transformer block: the unit that the planner keeps or recomputes."""

    def __init__(self, size: Size, rotary: Rotary) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(size.width, eps=1e-5)
        self.attention = Attention(size, rotary)
        self.feed_forward_norm = nn.RMSNorm(size.width, eps=1e-5)
        self.feed_forward = FeedForward(size)
        self.dropout = nn.Dropout(size.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class Stage(nn.Module):
    """A row of blocks; the first stage begins with the embedding, the last stage ends with the head."""

    def __init__(self, size: Size, at: int) -> None:
        super().__init__()
        few, more = divmod(size.blocks, size.stages)
        rotary = Rotary(size)
        self.embedding = nn.Embedding(size.vocabulary, size.width) if at == 0 else None
        self.blocks = nn.ModuleList(Block(size, rotary) for _ in range(few + (at < more)))
        self.head = None
        if at == size.stages - 1:
            self.head = nn.Sequential(nn.RMSNorm(size.width), nn.Linear(size.width, size.vocabulary, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


def made(size: Size) -> Made:
    """The stages, a micro-batch, and the loss function of the last stage's output."""
    tokens = torch.randint(size.vocabulary, (size.rows, size.tokens))

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    return [Stage(size, at) for at in range(size.stages)], tokens, loss


def stages() -> Made:
    """Llama 2 70B, in bfloat16."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return made(Size())
    finally:
        torch.set_default_dtype(before)


def tiny() -> Made:
    """The same stages, in sizes that run on a laptop."""
    return made(Size(8, 64, 8, 2, 224, 256, 32, 2, 4))
