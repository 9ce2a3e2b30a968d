"""Presets: public models by name, and models from a JSON file or a configuration of transformers."""
from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torchckpt.errors import Fault, brief, called, check, raise_fault
from torchckpt.jobs.model import Model

__all__ = ["MODELS", "model_named"]


def _data(name: str) -> Any:
    return json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


MODELS = {sizes["name"]: Model(**sizes) for sizes in _data("models.json")}
"""Public models, by name."""

_TRANSFORMERS = _data("transformers.json")
"""Configurations of transformers: the keys for fields of a Model; by type of model what its class has by itself, with
``ffn_ratio`` where its MLP is a multiple of ``hidden``, and fields that it does not read; what else may name a size,
and which of these change none."""
_WORKS = 'model="sizes.json" with {"layers": 32, "hidden": 4096, "heads": 32, "ffn": 14336, "vocab": 128256}'
_OF_EXPERTS = ("active", "shared", "shared_ffn", "expert_ffn", "dense_layers")


@called("model_named()")
def model_named(name: str) -> Model:
    """The model of ``MODELS`` with this name, or of a JSON file: with the fields of :class:`Model`, or a
    ``config.json`` of transformers.

    >>> model_named("llama3-70b").layers
    80

    Raises:
        ArgumentError: no model has this name, or the file lacks what is needed, has sizes that no model has, or, of
            transformers, a type or a key of sizes that is not known.
    """
    if name in MODELS:
        return MODELS[name]
    if not name.endswith(".json"):
        close = get_close_matches(name.lower(), MODELS, n=3, cutoff=0.3) or list(MODELS)[:3]
        rule = f"the model is none of {', '.join(MODELS)}, and no JSON file"
        raise_fault(Fault(rule, f"model={name!r}; the nearest are {', '.join(close)}", f'model="{close[0]}"'))
    return _read(Path(name))


def _read(path: Path) -> Model:
    works = 'model="config.json", a configuration of transformers'
    try:
        sizes = json.loads(path.read_text(encoding="utf-8-sig"))  # Windows may begin it with a mark
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or "it is not JSON"
        raise_fault(Fault(f"cannot read the model: {reason}", f"model={str(path)!r}", works))
    if not isinstance(sizes, dict):
        raise_fault(Fault("the file of the model is not an object of sizes", f"model={str(path)!r}", works))
    name = path.parent.name if path.name == "config.json" else path.stem
    chosen = {"name": name or "model", **(_of_transformers(sizes) if "model_type" in sizes else sizes)}
    unknown = sorted(set(chosen) - {field.name for field in fields(Model)})
    missing = [size for size in ("layers", "hidden", "heads", "ffn", "vocab") if size not in chosen]
    if missing or unknown:
        what = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(unknown)}, which no model has"
        raise_fault(Fault(f"the file of the model {what}", f"model={str(path)!r}: {brief(sorted(sizes))}", works))
    return Model(**chosen)


def _of_transformers(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a Model, from what the configuration says, and what the class of its type has by itself."""
    model_type, types = str(sizes["model_type"]), _TRANSFORMERS["types"]
    if model_type not in types:
        close = ", ".join(get_close_matches(model_type, types, n=3, cutoff=0.3) or list(types)[:3])
        rule = "the type of the model is none whose sizes are known"
        raise_fault(Fault(rule, f"model_type={brief(model_type)}; the nearest are {close}", _WORKS))
    chosen = dict(types[model_type])
    keys_of = {
        name: keys
        for name, keys in (_TRANSFORMERS["keys"] | _TRANSFORMERS["keys_of_types"]).items()
        if (name in chosen or name in _TRANSFORMERS["keys"]) and model_type not in _TRANSFORMERS["unread"].get(name, ())
    }
    for name, keys in keys_of.items():
        values = [sizes[key] for key in keys if key in sizes]
        if values:
            chosen[name] = next((value for value in values if value is not None), None)
        if values and chosen[name] is None and name in _TRANSFORMERS["nullable"]:
            del chosen[name]
    read = {key for keys in keys_of.values() for key in keys}
    check([*_twice(sizes, keys_of.values()), *_not_read(sizes, chosen, read)])
    return _with_experts(_with_latents(_with_heads(chosen)))


def _twice(sizes: Mapping[str, Any], keys_of: Iterable[Sequence[str]]) -> Iterator[Fault]:
    """Sizes that two keys name, and not alike."""
    for keys in keys_of:
        values = {key: sizes[key] for key in keys if sizes.get(key) is not None}
        first = next(iter(values), "")
        if any(value != values[first] for value in values.values()):
            yield Fault(f"{' and '.join(values)} of the model differ", brief(values), f"{first} alone")


def _not_read(sizes: Mapping[str, Any], chosen: Mapping[str, Any], read: Container[str]) -> Iterator[Fault]:
    """Keys that may change a size in a way that no Model has."""
    for key, value in sizes.items():
        names_size = re.search(_TRANSFORMERS["sizes"], key) and key not in _TRANSFORMERS["harmless"]
        if names_size and key not in read and not _changes_nothing(key, value, chosen):
            rule = "a key of the model is not understood, and may change its sizes"
            yield Fault(rule, f"{key}={brief(value)}", _WORKS)


def _changes_nothing(key: str, value: Any, chosen: Mapping[str, Any]) -> bool:
    if key in _TRANSFORMERS["accepted"]:
        return all(part in _TRANSFORMERS["accepted"][key] for part in (value if isinstance(value, list) else [value]))
    if key == "moe_layers" and isinstance(value, list):
        return value == [*range(len(value))] and len(value) == chosen.get("layers")
    if key == "word_embed_proj_dim":
        return value in (None, chosen.get("hidden"))
    return not value or isinstance(value, str | float)


def _with_heads(chosen: dict[str, Any]) -> dict[str, Any]:
    """With the width of the MLP and the heads of keys and values of types that do not name them."""
    ratio, inner = chosen.pop("ffn_ratio", None), chosen.pop("inner", None)
    if inner is not None:
        chosen["ffn"] = inner
    elif ratio is not None and isinstance(chosen.get("hidden"), int):
        chosen.setdefault("ffn", ratio * chosen["hidden"])
    shares = {name: chosen.pop(name) for name in ("multi_query", "grouped") if name in chosen}
    for name, value in shares.items():
        if not isinstance(value, bool):
            raise_fault(Fault(f"{name} of the model is not true or false", f"{name}={brief(value)}", f"{name}=True"))
    if shares and not shares.get("grouped"):
        chosen["kv_heads"] = int(shares["multi_query"])
    return chosen


def _with_latents(chosen: dict[str, Any]) -> dict[str, Any]:
    """With the width of a key of latent attention, all of whose heads have keys and values."""
    if "kv_rank" in chosen:
        chosen.pop("kv_heads", None)
        parts = {name: chosen[name] for name in ("whole", "rotated")}
        if not all(isinstance(part, int) for part in parts.values()):
            raise_fault(Fault("the key of the model is not of whole numbers", brief(parts), "whole=128, rotated=64"))
        chosen["head_dim"] = chosen.pop("whole") + chosen["rotated"]
    return chosen


def _with_experts(chosen: dict[str, Any]) -> dict[str, Any]:
    """With experts as wide as an MLP where no width is named, and a wide shared expert as several."""
    if not chosen.get("experts"):
        return {name: value for name, value in chosen.items() if name not in _OF_EXPERTS}
    width = chosen.setdefault("expert_ffn", chosen.get("ffn"))
    if "shared_ffn" in chosen:
        shared = chosen.pop("shared_ffn")
        if not (isinstance(shared, int) and isinstance(width, int) and width > 0 and shared % width == 0):
            rule = "the shared expert of the model is not as wide as several of its experts"
            raise_fault(Fault(rule, f"width {brief(shared)}, of an expert {brief(width)}", _WORKS))
        chosen["shared"] = shared // width
    return chosen
