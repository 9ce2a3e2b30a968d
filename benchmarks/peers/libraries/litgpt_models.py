"""litgpt: its GPT, once for each combination of what its configurations choose."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers

from benchmarks.peers.case import Case
from benchmarks.peers.libraries import Library

__all__ = ["library"]

_CHOICES = (
    "norm_class_name", "mlp_class_name", "parallel_residual", "shared_attention_norm", "norm_qk", "norm_qk_type",
    "post_attention_norm", "post_mlp_norm", "attention_logit_softcapping", "attn_bias", "bias", "rope_interleave",
    "n_expert",
)  # fmt: skip


def library() -> Library:
    from importlib.metadata import version

    return Library("litgpt", version("litgpt"), lambda: [*_configs()], case)


@cache
def _configs() -> dict[str, dict[str, Any]]:
    """The first configuration of each combination of choices."""
    from litgpt.config import Config, configs

    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for settings in configs:
        config = Config(**settings)
        chosen = (getattr(config, name) for name in _CHOICES)
        key = tuple(bool(choice) if isinstance(choice, (int, float)) else choice for choice in chosen)
        found.setdefault(key, settings)
    return {settings["name"]: settings for settings in found.values()}


def case(family: str) -> Case:
    tokens = torch.randint(128, (2, 12), generator=torch.Generator().manual_seed(1))
    return Case(family, lambda: (made(_configs()[family]), {"idx": tokens}), switch)


def made(settings: dict[str, Any]) -> nn.Module:
    from litgpt.config import Config
    from litgpt.model import GPT

    large = Config(**settings)
    groups = 4 if large.n_query_groups == large.n_head else 1 if large.n_query_groups == 1 else 2
    small = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_query_groups": groups, "head_size": 8, "block_size": 32}
    small |= {"vocab_size": 128, "padded_vocab_size": 128, "intermediate_size": 64, "rope_indices": None}
    if large.n_expert:
        small |= {"n_expert": 4, "n_expert_per_token": 2, "moe_intermediate_size": 32}
    known = Config.__dataclass_fields__
    model: nn.Module = GPT(Config(**{**settings, **{name: small[name] for name in small if name in known}}))
    return model


@contextmanager
def switch(model: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """As Lightning's strategies do it, with which litgpt trains: torch's wrapper around each block."""
    from litgpt.model import Block

    wrapper = partial(wrappers.CheckpointWrapper, checkpoint_fn=partial(function, use_reentrant=False))
    wrappers.apply_activation_checkpointing(model, wrapper, check_fn=lambda module: isinstance(module, Block))
    yield
