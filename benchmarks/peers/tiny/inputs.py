"""Inputs: a batch of two for a model of transformers, by the names of what its forward takes."""
from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["inputs_for"]

BATCH, TOKENS, DECODER_TOKENS, WORDS = 2, 12, 8, 90


def inputs_for(model: nn.Module, generator: torch.Generator) -> Iterator[dict[str, Any]]:
    """What may be an input, the fullest first: pictures and sound beside tokens, then tokens alone."""
    takes = inspect.signature(model.forward).parameters
    config: Any = model.config
    text = _tokens("input_ids", takes, generator)
    if "decoder_input_ids" in takes:
        text |= {"decoder_input_ids": torch.randint(5, WORDS, (BATCH, DECODER_TOKENS), generator=generator)}
    for senses in _senses(takes, config, generator):
        yield text | senses
        yield senses
    yield text


def _tokens(name: str, takes: Any, generator: torch.Generator) -> dict[str, Tensor]:
    return {name: torch.randint(5, WORDS, (BATCH, TOKENS), generator=generator)} if name in takes else {}


def _senses(takes: Any, config: Any, generator: torch.Generator) -> Iterator[dict[str, Tensor]]:
    if "pixel_values" in takes:
        yield {"pixel_values": _picture(config, generator)}
    if "pixel_values_videos" in takes:
        yield {"pixel_values_videos": _picture(config, generator)[:, None].repeat(1, _of(config, "num_frames", 4), 1, 1, 1)}
    for name in ("input_features", "input_values"):
        if name in takes:
            for shape in _sounds(config):
                yield {name: torch.randn(*shape, generator=generator)}


def _picture(config: Any, generator: torch.Generator) -> Tensor:
    edges = _of(config, "image_size", 64)
    height, width = edges if isinstance(edges, (list, tuple)) else (edges, edges)
    return torch.randn(BATCH, _of(config, "num_channels", 3), height, width, generator=generator)


def _sounds(config: Any) -> Iterator[tuple[int, ...]]:
    bands = _of(config, "num_mel_bins", 80)
    frames = 2 * _of(config, "max_source_positions", 32)
    yield BATCH, bands, frames
    yield BATCH, _of(config, "max_length", 64), bands
    yield BATCH, 4000
    yield BATCH, 1, 4000


def _of(config: Any, name: str, default: Any) -> Any:
    """The setting ``name`` of ``config``, or of a configuration in it."""
    if getattr(config, name, None) is not None:
        return getattr(config, name)
    for part in vars(config).values():
        if hasattr(part, "model_type") and _of(part, name, None) is not None:
            return _of(part, name, None)
    return default
