"""Inputs: a batch of two for a model of transformers, by the names of what its forward takes."""
from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.bits import loss_of

__all__ = ["fitting"]

BATCH, TOKENS, DECODER_TOKENS, WORDS = 2, 12, 8, 90
_TRIES, _MOST_WORDS = 3, 4096
_WANTED = re.compile(r"tokens:? \d+,? (?:and )?(?:image |audio |video )?features:? (?:torch\.Size\(\[)?(\d+)")


Special = Callable[[Any, torch.Generator], dict[str, Any]]


def fitting(model: nn.Module, special: Special | None, reasons: list[str]) -> dict[str, Any] | None:
    """The first input with which the model has a forward and a backward; else why not, in ``reasons``."""
    generator = torch.Generator().manual_seed(1)
    candidates = [special(model.config, generator)] if special else inputs_for(model, generator)
    for inputs in filter(None, candidates):
        tried: dict[str, Any] | None = inputs
        for _ in range(_TRIES):
            if tried is None:
                break
            try:
                loss_of(model.train()(**tried)).backward()
            except Exception as error:
                names = f"{type(model).__name__}({', '.join(tried)})"
                reasons.append(f"{names}: {type(error).__name__}: {str(error).strip()[:300]}")
                tried = _mended(model, tried, str(error))
            else:
                return tried
    return None


def _mended(model: nn.Module, inputs: dict[str, Any], said: str) -> dict[str, Any] | None:
    """Tokens that stand for a picture or a sound, as many as the error says; None where it says nothing of it."""
    wanted = _WANTED.search(said)
    word = next((word for name in _words(inputs) if (word := getattr(model.config, name, None)) is not None), None)
    if not wanted or word is None or "input_ids" not in inputs:
        return None
    tokens, all_of_them = inputs["input_ids"], int(wanted[1])
    each = all_of_them // len(tokens)
    if each * len(tokens) != all_of_them or each > _MOST_WORDS:
        return None
    return {**inputs, "input_ids": torch.cat([torch.full((len(tokens), each), word), tokens[:, -6:]], dim=1)}


def _words(inputs: dict[str, Any]) -> tuple[str, str]:
    has_sound = any(name.startswith("input_f") for name in inputs)
    kind = "audio" if has_sound else "video" if "pixel_values_videos" in inputs else "image"
    return f"{kind}_token_id", f"{kind}_token_index"


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
        frames = _of(config, "num_frames", 0)
        if frames:
            yield {"pixel_values": _picture(config, generator)[:, None].repeat(1, frames, 1, 1, 1)}
    if "pixel_values_videos" in takes:
        frames = _of(config, "num_frames", 4)
        yield {"pixel_values_videos": _picture(config, generator)[:, None].repeat(1, frames, 1, 1, 1)}
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
    yield BATCH, 64, _of(config, "feature_projection_input_dim", bands)
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
