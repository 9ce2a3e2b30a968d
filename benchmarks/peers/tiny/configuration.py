"""Configuration: one of transformers with small numbers, by its own class."""
from __future__ import annotations

from contextlib import suppress
from dataclasses import fields
from typing import Any

from benchmarks.peers.tiny.settings import Scale, shrunk

__all__ = ["small"]

_NOT_GIVEN = ("id2label", "label2id", "transformers_version", "use_cache")


def small(config: Any, scale: Scale, special: dict[str, Any]) -> Any:
    """A configuration of the class of ``config`` with small numbers; those inside of it, too.

    ``special`` has what else to set, by the type of the configuration.
    """
    from transformers import PreTrainedConfig

    settings, more = _settings(config), special.get(config.model_type, {})
    parts = {name: value for name, value in settings.items() if isinstance(value, PreTrainedConfig)}
    plain = {name: value for name, value in settings.items() if name not in parts and name not in _NOT_GIVEN}
    new = {name: value for name, value in plain.items() if value is not None} | shrunk(plain, scale)
    new |= {name: value() if callable(value) else value for name, value in more.items()}
    new |= _heads(plain, new)
    if isinstance(new.get("rope_parameters"), dict):
        new["rope_parameters"] = _rope(new["rope_parameters"], new)
    new |= {name: _part(part, scale, special) for name, part in parts.items() if name not in more}
    made = type(config)(**new)
    if hasattr(made, "use_cache"):
        made.use_cache = False
    return made


def _settings(config: Any) -> dict[str, Any]:
    """The fields, but for those that each layer has its own of."""
    found = {}
    for field in fields(config):
        with suppress(Exception):  # some have a value for each layer, and raise
            found[field.name] = getattr(config, field.name)
    return found


def _part(config: Any, scale: Scale, special: dict[str, Any]) -> Any:
    """A small configuration inside of another; the same one, where its class does not take its own numbers."""
    try:
        return small(config, scale, special)
    except Exception:
        return config


def _heads(plain: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """What some models want to be told, though there is only one sensible value."""
    heads, width = new.get("num_attention_heads"), new.get("hidden_size")
    if not heads or not width:
        return {}
    told = {"head_dim": width // heads, "num_key_value_heads": heads}
    return {name: value for name, value in told.items() if name in plain and new.get(name) is None}


def _rope(rope: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    heads, width = settings.get("num_attention_heads"), settings.get("hidden_size")
    size = settings.get("head_dim") or (width // heads if heads and width else 0)
    if rope.get("rope_theta", 0) is None:
        rope = {**rope, "rope_theta": 10000.0}
    if rope.get("rope_type") == "dynamic":
        rope = {"rope_type": "default", "rope_theta": 10000.0}
    if "mrope_section" in rope and size:
        part = int(size * rope.get("partial_rotary_factor", 1.0)) // 2
        rest = (part - part // 2) // 2
        rope = {**rope, "mrope_section": [part - 2 * rest, rest, rest]}
    return rope
