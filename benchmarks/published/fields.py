"""Fields: what a row may say, and in which kind of value."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["KEYS", "OF_EXPERTS", "wrong_fields"]

_KINDS = {
    "a text": (
        "id", "series", "model", "model_kind", "gpu", "schedule", "precision", "state_dtypes", "recompute",
        "recompute_detail", "attention", "optimizer_sharding", "overlap_notes", "framework", "peak_memory_kind",
        "outcome", "source", "quoted", "notes",
    ),
    "a whole number": (
        "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "seq_len", "micro_batch", "global_batch",
        "microbatches_per_step", "gpus", "gpus_per_node", "tp", "cp", "ep", "pp", "vpp", "dp", "fsdp", "zero_stage",
    ),
    "a number": (
        "inter_node_gbps_per_gpu", "step_seconds", "mfu_pct", "hfu_pct", "peak_memory_gib", "peak_active_gib",
    ),
    "true or false": ("gated_mlp", "tied_embeddings", "sp", "compile"),
    "an object of whole numbers": ("moe",),
}  # fmt: skip
KEYS = tuple(key for keys in _KINDS.values() for key in keys)
OF_EXPERTS = {
    "experts": "experts", "topk": "active", "shared": "shared", "moe_ffn": "expert_ffn", "dense_layers": "dense_layers",
}  # fmt: skip
"""The fields of ``moe``, and those of a Model."""
OF_LATENTS = {"q_lora": "query_rank", "kv_lora": "kv_rank", "qk_rope": "rotated", "v_head": "value_dim"}
"""Those of its ``mla``."""
_MOST = 2.0**24
_LEAST = 2.0**-24
"""Of a number, but 0: no step is shorter."""


def wrong_fields(row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The fields of a row that hold another kind of value, with the kind that they should hold. None is of each kind:
    the source does not print the value."""
    for kind, keys in _KINDS.items():
        yield from ((key, kind) for key in keys if row.get(key) is not None and not _is(kind, row[key]))


def _is(kind: str, value: Any) -> bool:
    if kind == "a text":
        return isinstance(value, str) and value.encode(errors="ignore").decode() == value
    if kind == "true or false":
        return isinstance(value, bool)
    if kind == "an object of whole numbers":
        latents = value.get("mla") or {} if isinstance(value, dict) else None
        if not isinstance(latents, dict):
            return False
        named = [*map(value.get, OF_EXPERTS), *map(latents.get, (*OF_LATENTS, "qk_nope"))]
        return all(_is("a whole number", each or 0) for each in named)
    if isinstance(value, bool) or not isinstance(value, int if kind == "a whole number" else int | float):
        return False
    return value == 0 or (_LEAST if kind == "a number" else 1) <= value <= _MOST
