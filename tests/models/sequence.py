"""Transformers: a GPT, a mixture of experts, and two of the transformers library."""
from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models.case import Parts, case, itself

__all__ = ["GPT", "Attention", "Block", "Experts", "gpt", "gpt2_hf", "llama_hf", "moe"]


class Attention(nn.Module):
    """Causal self-attention, by the fused operator."""

    def __init__(self, width: int, heads: int, p: float) -> None:
        super().__init__()
        self.heads, self.p = heads, p
        self.queries_keys_values, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.queries_keys_values(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.dropout(self.output(mixed.transpose(1, 2).reshape(batch, length, width)), self.p, self.training)


class Block(nn.Module):
    """Attention and a GELU perceptron, each behind a LayerNorm and beside a residual."""

    def __init__(self, width: int, heads: int, p: float) -> None:
        super().__init__()
        self.attend = nn.Sequential(nn.LayerNorm(width), Attention(width, heads, p))
        self.think = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(p)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(x)
        return x + self.think(x)


class GPT(nn.Module):
    """Token and position embeddings, blocks, a head, and the cross entropy with the next tokens."""

    def __init__(self, layers: int, width: int, heads: int, length: int, words: int, p: float) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, p) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.p = p

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = F.dropout(self.tokens(tokens) + self.positions(places), self.p, self.training)
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@case("gpt6", layers=6)
@case("gpt6_without_dropout", layers=6, p=0.0)
@case("gpt24", layers=24)
def gpt(
    layers: int, width: int = 8, heads: int = 2, length: int = 6, words: int = 11, batch: int = 2, p: float = 0.1
) -> Parts:
    """Returns its loss. ``p`` is the dropout's, after embeddings, attention and perceptron."""

    def draw() -> tuple[Tensor, Tensor]:
        text = torch.randint(words, (batch, length + 1))
        return text[:, :-1], text[:, 1:]

    return GPT(layers, width, heads, length, words, p), draw, itself


class Experts(nn.Module):
    """Perceptrons, of which each token sees the ``chosen`` best, as long as there is room in them (GShard, 2020).

    The shapes are static: tokens go to numbered places, and those that find none to one more place that nobody reads.
    """

    def __init__(self, width: int, experts: int, chosen: int, room: int) -> None:
        super().__init__()
        self.experts, self.chosen, self.room = experts, chosen, room
        self.router = nn.Linear(width, experts, bias=False)
        self.rise = nn.Parameter(torch.randn(experts, width, 4 * width) * width**-0.5)
        self.fall = nn.Parameter(torch.randn(experts, 4 * width, width) * (4 * width) ** -0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The mixture, and a loss that is least where all experts are used alike."""
        shares = self.router(x).softmax(-1)
        weights, experts = shares.topk(self.chosen)
        taken = F.one_hot(experts.flatten(), self.experts)
        places = self._places(experts.flatten(), taken)
        rows = x.repeat_interleave(self.chosen, 0)
        filled = x.new_zeros(self.experts * self.room + 1, x.shape[-1]).index_add(0, places, rows)
        hidden = torch.bmm(filled[:-1].view(self.experts, self.room, -1), self.rise)
        made = torch.bmm(F.gelu(hidden), self.fall).flatten(0, 1)
        seen = torch.cat([made, made.new_zeros(1, x.shape[-1])]).index_select(0, places)
        mixed = (seen.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1)
        return mixed, (taken.float().mean(0) * shares.mean(0)).sum() * self.experts

    def _places(self, experts: Tensor, taken: Tensor) -> Tensor:
        """Of each row, its place among all experts' rows; the last place for those that came too late."""
        within = (taken.cumsum(0) - taken).gather(1, experts.unsqueeze(1)).squeeze(1)
        return torch.where(within < self.room, experts * self.room + within, self.experts * self.room)


class Mixture(nn.Module):
    """Layers of experts, each beside a residual."""

    def __init__(self, layers: int, width: int, experts: int, chosen: int, room: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.layers = nn.ModuleList(Experts(width, experts, chosen, room) for _ in range(layers))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        uneven = x.new_zeros(())
        for norm, layer in zip(self.norms, self.layers):
            mixed, more = layer(norm(x))
            x, uneven = x + mixed, uneven + more
        return x, uneven

    @staticmethod
    def loss(outputs: tuple[Tensor, Tensor]) -> Tensor:
        mixed, uneven = outputs
        return mixed.square().mean() + 0.01 * uneven


@case("moe")
def moe(layers: int = 2, width: int = 8, experts: int = 4, chosen: int = 2, tokens: int = 12) -> Parts:
    """Room for what each expert would get if all were used alike: some tokens find none."""
    model = Mixture(layers, width, experts, chosen, room=-(-tokens * chosen // experts))
    return model, lambda: (torch.randn(tokens, width, requires_grad=True),), Mixture.loss


class Language(nn.Module):
    """A causal language model of the transformers library, and the cross entropy with the next tokens.

    Without a mask the library asks the positions' values, in eager alone, whether it needs one: what fake tensors have
    no answer to, and what takes other operators under ``torch.compile``.
    """

    def __init__(self, model: nn.Module, masked: bool) -> None:
        super().__init__()
        self.model, self.masked = model, masked

    def forward(self, tokens: Tensor) -> Tensor:
        mask = _causal(tokens) if self.masked else None
        logits = self.model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _causal(tokens: Tensor) -> Tensor:
    batch, length = tokens.shape
    return torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril().expand(batch, 1, -1, -1)


def text(words: int, batch: int, length: int) -> tuple[Tensor]:
    return (torch.randint(words, (batch, length)),)


@case("gpt2_hf")
def gpt2_hf(
    layers: int = 2, width: int = 16, heads: int = 2, length: int = 8, words: int = 23, batch: int = 2,
    p: float = 0.1, masked: bool = True,
) -> Parts:
    """GPT-2 of the transformers library, with its dropout everywhere."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=heads, n_positions=length, vocab_size=words, bos_token_id=0,
        eos_token_id=0, resid_pdrop=p, embd_pdrop=p, attn_pdrop=p, use_cache=False, attn_implementation="sdpa",
    )
    return Language(GPT2LMHeadModel(config), masked), partial(text, words, batch, length), itself


@case("llama_hf")
def llama_hf(
    layers: int = 2, width: int = 16, heads: int = 4, length: int = 8, words: int = 23, batch: int = 2,
    masked: bool = True,
) -> Parts:
    """Llama of the transformers library, with two query heads to each head of keys and values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=width, intermediate_size=3 * width, num_attention_heads=heads,
        num_key_value_heads=heads // 2, max_position_embeddings=length, vocab_size=words, bos_token_id=0,
        eos_token_id=0, use_cache=False, attn_implementation="sdpa",
    )
    return Language(LlamaForCausalLM(config), masked), partial(text, words, batch, length), itself
