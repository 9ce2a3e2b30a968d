"""Model: the sizes of a transformer, and the parameters that follow from them."""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

__all__ = ["Model"]


@dataclass(frozen=True)
class Model:
    """A decoder: an embedding, layers of attention and an MLP or experts, a norm, a head.

    >>> llama = Model("llama3-8b", layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256)
    >>> llama.parameters
    8030261248
    """

    name: str
    layers: int
    hidden: int
    heads: int
    ffn: int
    """The inner width of the MLP of a layer without experts."""
    vocab: int
    kv_heads: int = 0
    """Heads of keys and values. Default: as many as ``heads``."""
    head_dim: int = 0
    """Default: ``hidden / heads``."""
    gated: bool = True
    """The MLP multiplies two products (SwiGLU), and layers have RMS norms without a bias. If not, it has one product
    (GELU), and norms and products have biases."""
    tied: bool = False
    """The head has the weights of the embedding."""
    positions: int = 0
    """Learned positions, as rows of an embedding. Default: none."""
    biases: bool | None = None
    """Products have biases. Default: unless ``gated``."""
    experts: int = 0
    """Routed experts of a layer. Default: 0, an MLP in every layer."""
    active: int = 0
    """Routed experts of a token."""
    shared: int = 0
    """Experts that every token visits."""
    expert_ffn: int = 0
    dense_layers: int = 0
    """Layers, from the first, that have an MLP in place of experts."""
    published: float = 0.0
    """The parameters that its publisher states."""
    source: str = ""

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden // self.heads

    @property
    def query_width(self) -> int:
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        """The width of the keys, and of the values."""
        return (self.kv_heads or self.heads) * self.head_size

    @property
    def has_biases(self) -> bool:
        return not self.gated if self.biases is None else self.biases

    def is_dense(self, layer: int) -> bool:
        """Whether a layer has an MLP in place of experts."""
        return not self.experts or layer < self.dense_layers

    def width(self, dense: bool) -> int:
        """The inner width of the MLP, or of the experts, that a token meets."""
        return self.ffn if dense else self.expert_ffn * (self.active + self.shared)

    @cached_property
    def attention_parameters(self) -> int:
        """Of one layer, with its two norms."""
        wide = self.query_width + 2 * self.kv_width
        norms = 2 * self.hidden * (1 if self.gated else 2)
        return self.hidden * (wide + self.query_width) + norms + (wide + self.hidden if self.has_biases else 0)

    def mlp_parameters(self, width: int) -> int:
        """Of one MLP, or of one expert."""
        ways = 2 if self.gated else 1
        return (ways + 1) * self.hidden * width + (ways * width + self.hidden if self.has_biases else 0)

    @cached_property
    def router_parameters(self) -> int:
        return self.hidden * self.experts

    def layer_parameters(self, layer: int, experts: float | None = None) -> float:
        """Of a layer that holds so many of its routed experts. Default: all."""
        if self.is_dense(layer):
            return self.attention_parameters + self.mlp_parameters(self.ffn)
        count = self.experts if experts is None else experts
        return self.attention_parameters + self.router_parameters + (count + self.shared) * self.mlp_parameters(
            self.expert_ffn
        )

    def whole_parameters(self, layer: int) -> int:
        """Those of a layer that tensor parallel does not split: norms, biases of what its ranks sum, a router."""
        count = 2 * (1 if self.gated else 2) + (1 + self.is_dense(layer) if self.has_biases else 0)
        return count * self.hidden + (0 if self.is_dense(layer) else self.router_parameters)

    @property
    def norm_parameters(self) -> int:
        """Of the norm before the head."""
        return self.hidden * (1 if self.gated else 2)

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        layers = sum(self.layer_parameters(layer) for layer in range(self.layers))
        ends = self.embedding_parameters * (1 if self.tied else 2) + self.positions * self.hidden
        return round(layers) + ends + self.norm_parameters

    @property
    def active_parameters(self) -> int:
        """Those that one token meets, without the embedding."""
        layers = sum(self.layer_parameters(layer, self.active) for layer in range(self.layers))
        return round(layers) + self.embedding_parameters

    def flops_per_token(self, sequence: int) -> float:
        """FLOPs of a forward and backward that papers count: ``6 N + 12 L h s``, N without the embedding, nothing
        recomputed, attention not halved (Chowdhery et al. 2022, arXiv:2204.02311, appendix B)."""
        return 6.0 * self.active_parameters + 12.0 * self.layers * self.query_width * sequence
