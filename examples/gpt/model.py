"""Model: a small GPT, as an ``nn.Sequential`` of an embedding, blocks and a head."""
from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .text import VOCABULARY

__all__ = ["Block", "Size", "cut", "gpt"]


@dataclass(frozen=True)
class Size:
    """Sizes of the model and its mini-batches."""

    blocks: int
    width: int
    heads: int
    length: int  # characters in a sequence
    rows: int  # sequences in a mini-batch
    chunks: int  # micro-batches in a mini-batch
    dropout: float = 0.1
    block_seconds: float = 0.0  # that a block sleeps in a forward, and twice in a backward

    @property
    def balance(self) -> list[int]:
        """Number of layers in each of the two stages: embedding and half of the blocks; the other half and the head."""
        return [1 + self.blocks // 2, self.blocks - self.blocks // 2 + 1]


def gpt(size: Size) -> nn.Sequential:
    return nn.Sequential(Embedding(size), *(Block(size) for _ in range(size.blocks)), Head(size))


def cut(model: nn.Sequential, stages: int) -> list[nn.Sequential]:
    """Cut the model into stages. The last one, which recomputes nothing, gets 4 blocks for every 3 of another one."""
    blocks = len(model) - 2
    ends = [1 + round(blocks * 3 * stage / (3 * stages + 1)) for stage in range(1, stages)]
    return [model[start:end] for start, end in zip([0, *ends], [*ends, len(model)])]


class Embedding(nn.Sequential):
    def __init__(self, size: Size) -> None:
        super().__init__(nn.Embedding(VOCABULARY, size.width), nn.Dropout(size.dropout))


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attend = nn.Sequential(nn.LayerNorm(size.width), Attention(size))
        self.think = nn.Sequential(
            nn.LayerNorm(size.width),
            nn.Linear(size.width, 4 * size.width),
            nn.GELU(),
            nn.Linear(4 * size.width, size.width),
            nn.Dropout(size.dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(x)
        return x + self.think(x)


class Attention(nn.Module):
    """Causal self-attention from plain operators: torch counts its FLOPs on every device, and repeats are bit-equal."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.queries_keys_values = nn.Linear(size.width, 3 * size.width)
        self.output = nn.Linear(size.width, size.width)
        self.dropout = nn.Dropout(size.dropout)
        self.register_buffer("bias", _bias(size.heads, size.length), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        split = self.queries_keys_values(x).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]) + self.bias[:, :length, :length]
        mixed = self.dropout(scores.softmax(-1)) @ v
        return self.dropout(self.output(mixed.transpose(1, 2).reshape(rows, length, width)))


def _bias(heads: int, length: int) -> Tensor:
    """ALiBi, the bias of the attention scores: distance times a slope of each head (Press et al., 2022); causal."""
    back = torch.arange(length)[:, None] - torch.arange(length)
    slopes = 0.25 ** torch.arange(heads)
    return (-slopes[:, None, None] * back).masked_fill(back < 0, -math.inf)


class Head(nn.Sequential):
    def __init__(self, size: Size) -> None:
        super().__init__(nn.LayerNorm(size.width), nn.Linear(size.width, VOCABULARY))
