"""Model: the sizes of a transformer, and the parameters that follow from them.

And what is wrong with the fields of a description, of a model or of another: those that have another type than they
may, are out of range, or none of some choices.
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cached_property
from numbers import Integral, Real
from typing import Any, cast

from torchckpt.errors import Fault, brief, called, check

__all__ = ["Model", "odd_fields"]

_KINDS = {
    "int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false",
    "bool | None": "true or false",
}  # fmt: skip
_EXAMPLES = {"float": 7e9, "str": "llama3-8b", "bool": True, "bool | None": True}


def odd_fields(
    described: Any,
    name: str,
    ranges: Mapping[str, tuple[float, float]],
    choices: Mapping[str, Sequence[str]] | None = None,
) -> Iterator[Fault]:
    """The faults of a dataclass, which is a ``name``.

    Args:
        ranges: of numbers, what one may be, and the most. The least is 0, or 1 where a whole number's default is not 0.
        choices: of texts, and of tuples of texts.
    """
    choices = choices or {}
    for each in fields(described):
        kind, value = str(each.type), getattr(described, each.name)
        if each.name in choices:
            yield from _odd_choice(f"{each.name} of the {name}", each.name, value, choices[each.name], kind != "str")
        elif kind in _KINDS:
            example, most = ranges.get(each.name, (0, 1e18))
            least, words = int(kind == "int" and each.default != 0), _KINDS[kind]
            if each.name in ranges:
                words += f" from {least} to {most}"
            if not _is(kind, value, least, most):
                works = example if each.name in ranges else _EXAMPLES.get(kind, example)
                yield Fault(
                    f"{each.name} of the {name} is not {words}", f"{each.name}={brief(value)}", f"{each.name}={works!r}"
                )


def _odd_choice(words: str, name: str, value: object, options: Sequence[str], is_tuple: bool) -> Iterator[Fault]:
    several = value if is_tuple and isinstance(value, tuple) else (value,)
    wrong = [each for each in several if not isinstance(each, str) or each not in options]
    if wrong or isinstance(value, tuple) != is_tuple:
        near = get_close_matches(str(next(iter(wrong), value)), options, n=1, cutoff=0.0)[0]
        rule = f"{words} is not {'a tuple of some' if is_tuple else 'one'} of {', '.join(options)}"
        yield Fault(rule, f"{name}={brief(value)}", f"{name}={(near,) if is_tuple else near!r}")


def _is(kind: str, value: object, least: float, most: float) -> bool:
    if kind == "str":
        return isinstance(value, str)
    if kind.startswith("bool"):
        return isinstance(value, bool) or (value is None and kind != "bool")
    is_number = isinstance(value, Integral if kind == "int" else Real) and not isinstance(value, bool)
    return is_number and least <= cast("float", value) <= most


_RANGES = {
    "layers": (32, 2**8), "hidden": (4096, 2**20), "heads": (32, 2**16), "ffn": (14336, 2**24),
    "vocab": (128256, 2**24), "kv_heads": (8, 2**16), "head_dim": (128, 2**16), "positions": (2048, 2**24),
    "experts": (8, 2**16), "active": (2, 2**16), "shared": (1, 2**16), "expert_ffn": (14336, 2**24),
    "dense_layers": (1, 2**8), "query_rank": (1536, 2**20), "kv_rank": (512, 2**20), "rotated": (64, 2**16),
    "value_dim": (128, 2**16),
}  # fmt: skip
"""Of each size: what a model has, and the most. More layers would be planned for minutes."""


@dataclass(frozen=True)
class Model:
    """A decoder: an embedding, layers of attention and an MLP or experts, a norm, a head.

    >>> llama = Model("llama3-8b", layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256)
    >>> llama.parameters
    8030261248

    Raises:
        ArgumentError: sizes that are no whole numbers, out of range, or do not divide. The message lists all of them.
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
    kv_rank: int = 0
    """Latent attention (DeepSeek): keys and values are products of so many numbers of a token. Default: of all of
    ``hidden``."""
    query_rank: int = 0
    """Of latent attention the same of queries."""
    rotated: int = 0
    """Of latent attention: the numbers of a key that are rotated, which all heads share."""
    value_dim: int = 0
    """Default: as wide as a key, which is ``head_dim``."""
    published: float = 0.0
    """The parameters that its publisher states."""
    source: str = ""

    @called("Model()")
    def __post_init__(self) -> None:
        check(list(odd_fields(self, "model", _RANGES)) or _odd_sizes(self))

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden // self.heads

    @property
    def query_width(self) -> int:
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        """The width of the keys."""
        return (self.kv_heads or self.heads) * self.head_size

    @property
    def value_share(self) -> float:
        """The width of a value, of that of a key."""
        return (self.value_dim or self.head_size) / self.head_size

    @property
    def output_width(self) -> float:
        """The width of what attention gives to its last product."""
        return self.query_width * self.value_share

    @property
    def latent(self) -> int:
        """The numbers of a token that queries, keys and values of latent attention are made of."""
        return self.query_rank + self.kv_rank + self.rotated

    def kv_held(self, tp: int) -> int:
        """The width of the keys on ``tp`` ranks together: each has at least a head, which is not split."""
        return max(self.kv_width, tp * self.head_size)

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
        rows, columns = self.made_of, self.made
        products = sum(inner * wide for inner, wide in zip(rows, columns)) + self.hidden * round(self.output_width)
        norms = (2 * self.hidden + self.query_rank + self.kv_rank) * (1 if self.gated else 2)
        return products + self.hidden * self.latent + norms + (sum(columns) + self.hidden if self.has_biases else 0)

    @property
    def made(self) -> tuple[int, int]:
        """The widths of queries, and of keys with values, but for what all heads share."""
        keys = self.kv_width - self.rotated * (self.kv_heads or self.heads)
        return self.query_width, keys + round(self.kv_width * self.value_share)

    @property
    def made_of(self) -> tuple[int, int]:
        """The inner widths of the products that make them."""
        return self.query_rank or self.hidden, self.kv_rank or self.hidden

    def mlp_parameters(self, width: float) -> float:
        """Of one MLP, or of one expert; of so much of its width on a rank."""
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
        summed = 1 + (1 if self.is_dense(layer) else self.shared) if self.has_biases else 0
        count = 2 * (1 if self.gated else 2) + summed
        latent = self.hidden * self.latent + (self.query_rank + self.kv_rank) * (1 if self.gated else 2)
        return count * self.hidden + latent + (0 if self.is_dense(layer) else self.router_parameters)

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
        return round(layers) + self.norm_parameters + self.embedding_parameters

    def flops_per_token(self, sequence: int) -> float:
        """FLOPs of a forward and backward that papers count: ``6 N + 12 L h s``, N without the embedding, nothing
        recomputed, attention not halved (Chowdhery et al. 2022, arXiv:2204.02311, appendix B)."""
        return 6.0 * self.active_parameters + 6.0 * self.layers * (self.query_width + self.output_width) * sequence


def _odd_sizes(model: Model) -> Iterator[Fault]:
    """Sizes that do not go together."""
    hidden, heads, kv_heads = model.hidden, model.heads, model.kv_heads or model.heads
    if not model.head_dim and hidden % heads:
        rule = "hidden of the model does not divide by its heads"
        yield Fault(rule, f"hidden={hidden}, heads={heads}", f"head_dim={-(-hidden // heads)}")
    if heads % kv_heads:
        rule = "heads of the model do not divide by its heads of keys and values"
        yield Fault(rule, f"heads={heads}, kv_heads={kv_heads}", f"kv_heads={math.gcd(heads, kv_heads)}")
    sizes = {name: getattr(model, name) for name in ("active", "expert_ffn", "shared", "dense_layers")}
    for name, size in sizes.items():
        if size and not model.experts:
            yield Fault(f"a model without experts has {name}", f"{name}={size}, experts=0", f"{name}=0")
        elif not size and model.experts and name in ("active", "expert_ffn"):
            works = f"{name}={min(_RANGES[name][0], model.experts if name == 'active' else model.ffn)}"
            yield Fault(f"a model with experts lacks {name}", f"experts={model.experts}", works)
    latent = {name: getattr(model, name) for name in ("query_rank", "rotated", "value_dim")}
    for name, size in latent.items():
        if size and not model.kv_rank:
            yield Fault(f"a model without latent attention has {name}", f"{name}={size}, kv_rank=0", f"{name}=0")
    if model.kv_rank and kv_heads != heads:
        rule = "latent attention has as many heads of keys and values as of queries"
        yield Fault(rule, f"kv_heads={kv_heads}, heads={heads}", "kv_heads=0")
    if model.rotated > (model.head_dim or hidden // heads):
        rule = "more of a key is rotated than it has"
        yield Fault(rule, f"rotated={model.rotated}, head_dim={model.head_dim}", f"head_dim={2 * model.rotated}")
    if model.experts and model.active > model.experts:
        rule = "a token meets more experts than the model has"
        yield Fault(rule, f"active={model.active}, experts={model.experts}", f"active={model.experts}")
    if model.experts and model.dense_layers >= model.layers:
        received = f"dense_layers={model.dense_layers}, layers={model.layers}"
        yield Fault("no layer of the model has experts", received, f"dense_layers={model.layers - 1}")
