"""diffusers: each transformer and U-Net that has gradient checkpointing, small by the numbers of its constructor."""
from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.peers.bits import loss_of, seed
from benchmarks.peers.case import Case
from benchmarks.peers.libraries import Library
from benchmarks.peers.tiny.latents import latents_for
from benchmarks.peers.tiny.settings import DROPOUT
from benchmarks.peers.tiny.special_diffusers import SPECIAL

__all__ = ["library"]

_FOLDERS = ("transformers", "unets")
_RULES: dict[str, Callable[[Any], Any]] = {
    "num_layers": lambda value: min(value, 2),
    "num_single_layers": lambda value: min(value, 2),
    "num_refiner_layers": lambda value: min(value, 2),
    "num_attention_heads": lambda value: 2,
    "num_heads": lambda value: 2,
    "n_heads": lambda value: 2,
    "attention_head_dim": lambda value: 16 if value > 16 else value,
    "axes_dims_rope": lambda value: (4, 6, 6) if len(value) == 3 else value,
    "axes_dim": lambda value: (4, 6, 6) if len(value) == 3 else value,
    "sample_size": lambda value: 8 if isinstance(value, int) else value,
    "dropout": lambda value: DROPOUT,
    "norm_num_groups": lambda value: 8,
    "block_out_channels": lambda value: value if isinstance(value, int) else (*range(8, 8 * len(value) + 1, 8),),
    "layers_per_block": lambda value: 1 if isinstance(value, int) else value,
}
_TEXT = 24
"""The width of what a text encoder would give."""
_TEXTS = (
    "joint_attention_dim", "caption_channels", "text_dim", "cross_attention_dim", "text_embed_dim", "caption_dim",
    "pooled_projection_dim", "cap_feat_dim", "text_embed_dim_2", "context_dim", "caption_projection_dim",
)  # fmt: skip


def library() -> Library:
    import diffusers

    diffusers.utils.logging.set_verbosity_error()
    return Library("diffusers", diffusers.__version__, families, case)


@cache
def _classes() -> dict[str, type[Any]]:
    import diffusers.models

    found = {}
    for folder in _FOLDERS:
        for file in sorted((Path(diffusers.models.__path__[0]) / folder).glob("*.py")):
            if "_supports_gradient_checkpointing = True" not in file.read_text():
                continue
            module = importlib.import_module(f"diffusers.models.{folder}.{file.stem}")
            found.update({cls.__name__: cls for cls in vars(module).values() if _is_model(cls, module)})
    return found


def _is_model(value: Any, module: Any) -> bool:
    is_own = inspect.isclass(value) and value.__module__ == module.__name__
    return is_own and getattr(value, "_supports_gradient_checkpointing", False) and hasattr(value, "from_config")


def families() -> list[str]:
    return [*_classes()]


def case(family: str) -> Case:
    cls, special, reasons = _classes()[family], SPECIAL.get(family, {}), []
    settings = small(cls) | special.get("settings", {})
    model = made(cls, settings)
    generator = torch.Generator().manual_seed(1)
    for inputs in [_filled(special["inputs"], generator)] if special else latents_for(model, generator):
        try:
            loss_of(model.train()(**inputs)).backward()
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {str(error).strip()[:300]}")
            continue
        return Case(family, partial(_built, cls, settings, inputs), switch)
    raise RuntimeError(" | ".join(dict.fromkeys(reasons)) or "nothing here makes what its forward takes")


def _built(cls: type[Any], settings: dict[str, Any], inputs: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    return made(cls, settings), inputs


def _filled(inputs: dict[str, Any], generator: torch.Generator) -> dict[str, Any]:
    """Random numbers where a shape stands."""
    shapes = {name: value for name, value in inputs.items() if isinstance(value, tuple)}
    return inputs | {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}


def made(cls: type[Any], settings: dict[str, Any]) -> nn.Module:
    """A model of ``cls``, none of whose parameters is zero: gates that begin so would hide what is behind them."""
    seed()
    model: nn.Module = cls(**settings)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and not parameter.any():
                parameter.normal_(std=0.05)
    return model


def small(cls: type[Any]) -> dict[str, Any]:
    """The settings of the constructor that change."""
    defaults = {name: value.default for name, value in inspect.signature(cls.__init__).parameters.items()}
    rules = {name: _RULES[name](value) for name, value in defaults.items() if name in _RULES and value is not None}
    return rules | {name: _TEXT for name in _TEXTS if isinstance(defaults.get(name), int)}


@contextmanager
def switch(model: Any, function: Callable[..., Any]) -> Iterator[None]:
    """The public switch, which takes the function: it is called with a module and the arguments of its forward."""
    model.enable_gradient_checkpointing(
        lambda module, *args, **named: function(module.__call__, *args, use_reentrant=False, **named)
    )
    yield
