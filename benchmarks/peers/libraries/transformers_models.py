"""transformers: one model of each family that has gradient checkpointing, small by its own configuration class."""
from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.peers.bits import loss_of, seed
from benchmarks.peers.case import Case
from benchmarks.peers.libraries import Library
from benchmarks.peers.tiny.inputs import inputs_for
from benchmarks.peers.tiny.settings import Scale, shrunk
from benchmarks.peers.tiny.special import SPECIAL

__all__ = ["library"]

_SCALES = (Scale(32, 8), Scale(16, 16), Scale(8, 32), Scale(32, 16), Scale(64, 8))
_MAPPINGS = ("MODEL", "MODEL_FOR_PRETRAINING", "MODEL_FOR_CAUSAL_LM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", "MODEL_FOR_IMAGE_TEXT_TO_TEXT", "MODEL_FOR_MULTIMODAL_LM", "MODEL_FOR_MASKED_LM", "MODEL_FOR_IMAGE_CLASSIFICATION", "MODEL_FOR_BACKBONE", "MODEL_FOR_DEPTH_ESTIMATION", "MODEL_FOR_OBJECT_DETECTION")


def library() -> Library:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    importlib.import_module("transformers.models.llama.modeling_llama")  # what most need is imported once
    importlib.import_module("transformers.models.auto.modeling_auto")
    return Library("transformers", transformers.__version__, families, case)


def families() -> list[str]:
    """The folders with a model that supports gradient checkpointing."""
    import transformers.models

    root = Path(transformers.models.__path__[0])
    return [folder.name for folder in sorted(root.iterdir()) if _supports(folder)]


def _supports(folder: Path) -> bool:
    texts = [file.read_text() for file in folder.glob("modeling_*.py")]
    return any("supports_gradient_checkpointing = True" in text for text in texts)


def case(family: str) -> Case:
    reasons: list[str] = []
    for cls in classes(family):
        for scale in _SCALES:
            try:
                model = made(cls, scale, family)
                inputs = fitting(model, reasons, family)
            except Exception as error:
                reasons.append(f"{cls.__name__}: {type(error).__name__}: {str(error).strip()[:300]}")
                continue
            if inputs is not None:
                return Case(cls.__name__, lambda: (made(cls, scale, family), inputs), switch)
    raise RuntimeError(" | ".join(dict.fromkeys(reasons)) or "no class of it can be made from a configuration")


def classes(family: str) -> list[type[Any]]:
    """The family's models that have gradient checkpointing: the plain one first."""
    found = []
    for name in _modules(family):
        module = importlib.import_module(f"transformers.models.{family}.{name}")
        found += [value for value in vars(module).values() if _is_model(value, module)]
    special = SPECIAL.get(family, {}).get("class")
    if special:
        return [cls for cls in found if cls.__name__ == special]
    order = {name: number for number, name in enumerate(_preferred())}
    known = [cls for cls in found if cls.__name__ in order]
    others = [cls for cls in found if cls.__name__ not in order and cls.__name__.endswith(("Model", "Backbone"))]
    return [*sorted(known, key=lambda cls: order[cls.__name__]), *others]


def _modules(family: str) -> list[str]:
    import transformers.models

    root = Path(transformers.models.__path__[0]) / family
    return [file.stem for file in sorted(root.glob("modeling_*.py"))]


def _is_model(value: Any, module: Any) -> bool:
    return (
        inspect.isclass(value)
        and value.__module__ == module.__name__
        and getattr(value, "supports_gradient_checkpointing", False)
        and getattr(value, "config_class", None) is not None
        and "PreTrainedModel" not in value.__name__
    )


@cache
def _preferred() -> tuple[str, ...]:
    from transformers.models.auto import modeling_auto

    names: dict[str, None] = {}
    for mapping in _MAPPINGS:
        for value in getattr(modeling_auto, f"{mapping}_MAPPING_NAMES").values():
            names |= dict.fromkeys([value] if isinstance(value, str) else value)
    return tuple(names)


def made(cls: type[Any], scale: Scale, family: str) -> nn.Module:
    seed()
    config = small(cls.config_class(), scale, family)
    return cls(config)


def small(config: Any, scale: Scale, family: str) -> Any:
    """A configuration of the class of ``config`` with small numbers; those inside of it, too."""
    from transformers import PreTrainedConfig

    settings = _settings(config)
    parts = {name: value for name, value in settings.items() if isinstance(value, PreTrainedConfig)}
    plain = {name: value for name, value in settings.items() if name not in parts}
    new = {name: value for name, value in plain.items() if value is not None} | shrunk(plain, scale)
    new = {name: value for name, value in new.items() if name not in ("id2label", "label2id", "transformers_version")}
    more = SPECIAL.get(family, {}).get(config.model_type, {})
    new |= {name: value() if callable(value) else value for name, value in more.items()}
    rest = {name: _part(part, scale, family) for name, part in parts.items() if name not in more}
    if isinstance(new.get("rope_parameters"), dict):
        new["rope_parameters"] = _rope(new["rope_parameters"], new)
    if "head_dim" in plain and new.get("head_dim") is None and new.get("num_attention_heads") and new.get("hidden_size"):
        new["head_dim"] = new["hidden_size"] // new["num_attention_heads"]
    if "num_key_value_heads" in plain and new.get("num_key_value_heads") is None and new.get("num_attention_heads"):
        new["num_key_value_heads"] = new["num_attention_heads"]
    new.pop("use_cache", None)
    made = type(config)(**{name: value for name, value in new.items() if name not in rest}, **rest)
    if hasattr(made, "use_cache"):
        made.use_cache = False
    return made


def _part(config: Any, scale: Scale, family: str) -> Any:
    """A small configuration inside of another; the same one, where its class does not take its own numbers."""
    try:
        return small(config, scale, family)
    except Exception:
        return config


def _settings(config: Any) -> dict[str, Any]:
    """The fields, but for those that each layer has its own of."""
    found = {}
    for field in fields(config):
        with suppress(Exception):  # some have a value for each layer, and raise
            found[field.name] = getattr(config, field.name)
    return found


def _rope(rope: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    heads, width = settings.get("num_attention_heads"), settings.get("hidden_size")
    size = settings.get("head_dim") or (width // heads if heads and width else 0)
    if rope.get("rope_theta", 0) is None:
        rope = {**rope, "rope_theta": 10000.0}
    if "alpha" in rope and rope["alpha"] is None or rope.get("rope_type") == "dynamic":
        rope = {"rope_type": "default", "rope_theta": 10000.0}
    if "mrope_section" in rope and size:
        part = int(size * rope.get("partial_rotary_factor", 1.0)) // 2
        rest = (part - part // 2) // 2
        rope = {**rope, "mrope_section": [part - 2 * rest, rest, rest]}
    return rope


def fitting(model: nn.Module, reasons: list[str], family: str) -> dict[str, Any] | None:
    """The first input that the model takes."""
    special = SPECIAL.get(family, {}).get("inputs")
    generator = torch.Generator().manual_seed(1)
    candidates = [special(model.config, generator)] if special else inputs_for(model, generator)
    for inputs in candidates:
        if not inputs:
            continue
        for _ in range(3):
            try:
                loss_of(model.train()(**inputs)).backward()
            except Exception as error:
                more = _mended(model, inputs, str(error))
                reasons.append(f"{type(model).__name__}({', '.join(inputs)}): {type(error).__name__}: {str(error).strip()[:300]}")
                if more is None:
                    break
                inputs = more
                continue
            return inputs
    return None


def _mended(model: nn.Module, inputs: dict[str, Any], said: str) -> dict[str, Any] | None:
    """Tokens that stand for a picture or a sound, as many as the error says."""
    wanted = re.search(r"tokens:? (\d+),? (?:and )?(?:image |audio |video )?features:? (?:torch.Size\(\[)?(\d+)", said)
    if not wanted or "input_ids" not in inputs:
        return None
    kind = "audio" if any(name.startswith("input_f") for name in inputs) else "video" if "pixel_values_videos" in inputs else "image"
    config: Any = model.config
    names = (f"{kind}_token_id", f"{kind}_token_index")
    word = next((getattr(config, name) for name in names if getattr(config, name, None) is not None), None)
    if word is None:
        return None
    tokens, each = inputs["input_ids"], int(wanted[2]) // len(inputs["input_ids"])
    if each * len(tokens) != int(wanted[2]) or each > 4096:
        return None
    return {**inputs, "input_ids": torch.cat([torch.full((len(tokens), each), word), tokens[:, -6:]], dim=1)}


@contextmanager
def switch(model: Any, function: Callable[..., Any]) -> Iterator[None]:
    """The public switch, and then the same with ``function``, as ``Trainer`` would have it."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model._set_gradient_checkpointing(gradient_checkpointing_func=partial(function, use_reentrant=False))
    yield
