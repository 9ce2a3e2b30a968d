"""Latents: a batch of two for a model of diffusers, by the names of what its forward takes."""
from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["latents_for"]

EDGE, FRAMES, ROWS, TEXTS = 8, 3, 16, 6
_TEXT_WIDTHS = (
    "joint_attention_dim", "caption_channels", "text_dim", "cross_attention_dim", "text_embed_dim", "caption_dim",
    "cap_feat_dim", "context_dim",
)  # fmt: skip


def latents_for(model: nn.Module, generator: torch.Generator) -> Iterator[dict[str, Any]]:
    """What may be an input: pictures, films, rows of patches; times as numbers of steps or as fractions."""
    config: Any = model.config
    parameters = inspect.signature(model.forward).parameters
    channels = getattr(config, "in_channels", None) or 4
    shapes: list[tuple[int, ...]] = [
        (2, channels, EDGE, EDGE), (2, channels, FRAMES, EDGE, EDGE), (2, FRAMES, channels, EDGE, EDGE),
        (2, ROWS, channels), (2, channels, ROWS),
    ]  # fmt: skip
    for shape, is_whole in itertools.product(shapes, (False, True)):
        makes = _makers(config, shape, is_whole, generator)
        wanted = [name for name, one in parameters.items() if one.default is inspect.Parameter.empty or name in makes]
        if all(name in makes for name in wanted if name not in ("args", "kwargs", "self")):
            yield {name: makes[name] for name in wanted if name in makes}


def _makers(config: Any, shape: tuple[int, ...], is_whole: bool, generator: torch.Generator) -> dict[str, Any]:
    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    width = next((getattr(config, name) for name in _TEXT_WIDTHS if isinstance(getattr(config, name, None), int)), 24)
    time = torch.tensor([3, 7]) if is_whole else torch.tensor([0.3, 0.7])
    latents = normal(*shape)
    found: dict[str, Any] = {
        "hidden_states": latents, "sample": latents, "latent": latents, "x": latents,
        "timestep": time, "timesteps": time, "t": time, "timestep_r": time,
        "encoder_hidden_states": normal(2, TEXTS, width),
        "encoder_attention_mask": torch.ones(2, TEXTS, dtype=torch.bool),
        "encoder_hidden_states_mask": torch.ones(2, TEXTS, dtype=torch.bool),
        "pooled_projections": normal(2, getattr(config, "pooled_projection_dim", None) or 24),
    }  # fmt: skip
    if len(shape) == 3:
        ids = torch.zeros(ROWS, 3)
        ids[:, 1], ids[:, 2] = torch.arange(ROWS) // 4, torch.arange(ROWS) % 4
        found |= {"img_ids": ids, "txt_ids": torch.zeros(TEXTS, 3)}
    if getattr(config, "guidance_embeds", False):
        found["guidance"] = torch.tensor([3.0, 3.0])
    return found
