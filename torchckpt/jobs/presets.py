"""Presets: public models by name, and models from a JSON file or a configuration of transformers."""
from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torchckpt.errors import Fault, brief, called, raise_fault
from torchckpt.jobs.model import Model

__all__ = ["MODELS", "model_named"]


def _data(name: str) -> Any:
    return json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


MODELS = {sizes["name"]: Model(**sizes) for sizes in _data("models.json")}
"""Public models, by name."""

_TRANSFORMERS = _data("transformers.json")
"""The keys of transformers for fields of a Model, and the types of models whose MLP multiplies nothing."""


@called("model_named()")
def model_named(name: str) -> Model:
    """The model of ``MODELS`` with this name, or of a JSON file: with the fields of :class:`Model`, or a
    ``config.json`` of transformers.

    >>> model_named("llama3-70b").layers
    80

    Raises:
        ArgumentError: no model has this name, or the file lacks what is needed.
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
        sizes = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not JSON"
        raise_fault(Fault(f"cannot read the model: {reason}", f"model={str(path)!r}", works))
    if not isinstance(sizes, dict):
        raise_fault(Fault("the file of the model is not an object of sizes", f"model={str(path)!r}", works))
    name = path.parent.name if path.name == "config.json" else path.stem
    chosen = _of_transformers(sizes) if "model_type" in sizes else dict(sizes)
    chosen = {"name": name or "model", **chosen}
    unknown = sorted(set(chosen) - {field.name for field in fields(Model)})
    missing = [size for size in ("layers", "hidden", "heads", "ffn", "vocab") if not isinstance(chosen.get(size), int)]
    if "kv_lora_rank" in sizes:
        raise_fault(Fault("latent attention is not known", f"kv_lora_rank={brief(sizes['kv_lora_rank'])}", works))
    if missing or unknown:
        what = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(unknown)}, which no model has"
        raise_fault(Fault(f"the file of the model {what}", f"model={str(path)!r}: {brief(sorted(sizes))}", works))
    return Model(**chosen)


def _of_transformers(sizes: Mapping[str, Any]) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    for name, keys in _TRANSFORMERS["keys"].items():
        values = [sizes[key] for key in keys if sizes.get(key) is not None]
        if values:
            chosen[name] = values[0]
    if isinstance(chosen.get("hidden"), int):
        chosen.setdefault("ffn", 4 * chosen["hidden"])
    if chosen.get("experts"):
        chosen.setdefault("expert_ffn", chosen["ffn"])
    chosen["gated"] = sizes["model_type"] not in _TRANSFORMERS["ungated"]
    if sizes["model_type"] == "gpt2":
        chosen |= {"positions": sizes.get("n_positions", 1024), "tied": sizes.get("tie_word_embeddings", True)}
    return chosen
