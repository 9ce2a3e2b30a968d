"""Transformer: the transformer block and the embedding that the benchmarks use."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

__all__ = ["Block", "Embedding", "fused_causal", "written_out"]


def written_out(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention from plain operators, whose FLOPs torch can count on every device; some fused kernels it cannot."""
    return (query @ key.mT / query.size(-1) ** 0.5).softmax(-1) @ value


fused_causal = partial(scaled_dot_product_attention, is_causal=True)


class Block(nn.Module):
    """Attention and MLP without dropout, each behind a LayerNorm, with residuals."""

    def __init__(
        self, width: int, heads: int, attention: Callable[[Tensor, Tensor, Tensor], Tensor] = fused_causal
    ) -> None:
        super().__init__()
        self.heads, self.attention = heads, attention
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attention(*parts).transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(gelu(self.up(self.norm_2(x))))
        return y


class Embedding(nn.Module):
    """Embedding of tokens and positions. Tokens may be floats, since a pipeline sends only floating tensors."""

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)

    def forward(self, text: Tensor) -> Tensor:
        x: Tensor = self.tokens(text.long()) + self.places.weight
        return x
