"""Settings: what a configuration says in numbers, made small by the names of its fields.

Widths are divided by one number everywhere, so that those which were equal, or multiples, stay so. There are two
layers, few heads and experts, 128 words, and pictures of a few patches.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

__all__ = ["DROPOUT", "WORDS", "Scale", "shrunk"]

WORDS, DROPOUT, LAYERS, EXPERTS, PATCHES = 128, 0.1, 2, 4, 4
_FIRST_SPECIAL = 96
"""Words from here on stand for themselves alone: padding, pictures, ends."""


class Scale(NamedTuple):
    """How small: widths are divided by ``divisor``, and are multiples of ``step``."""

    divisor: int = 32
    step: int = 8

    def width(self, value: int) -> int:
        return max(self.step, -(-value // self.divisor // self.step) * self.step)


_RULES: list[tuple[str, str]] = [
    (r"vocab_size|vocab_size_per_layer_input|n_vocab|num_embeddings_table", "words"),
    (r".*(token_id|token_index|token_ids)$", "token"),
    (r".*(max_position_embeddings|n_positions|max_seq_len|max_sequence_length)$", "kept"),
    (r".*(dropout|drop_path|layerdrop|drop_rate|_pdrop|attn_drop)(_p|_rate|_prob)?", "dropout"),
    (r".*layers?|n_layer|.*depth|num_blocks", "layers"),
    (r"layer_types|.*_layer_types|layers_block_type|mlp_layer_types|block_types|hybrid_layer_pattern", "kinds"),
    (r"depths|layers_per_stage|num_blocks_per_stage", "depths"),
    (r"topk_group|.*top_?k_groups?|n_groups?|num_expert_groups?|n_expert_groups?|.*group_topk", "one"),
    (r"num_experts_per_tok(en)?|.*top_?k(_experts)?|moe_k|num_selected_experts|.*active_experts|.*experts_per_tok.*"
     r"|moe_layer_topk|router_topk", "top"),
    (r"first_k_dense_replace|.*layer_freq|moe_layer_start_index|num_dense_layers|.*shared_experts?", "kept"),
    (r"(num|n)_.*experts|num_experts|n_routed_experts|moe_num_experts", "experts"),
    (r".*(image_size|img_size|input_size)$", "picture"),
]
_WIDTH = re.compile(
    r".*(hidden_size|_size|_dim|_dims|_width|_rank|channels|^d_.*|n_embd|n_inner|ffn.*|^dim|width|inner_dim|d_model"
    r"|hidden_sizes|embed_dims|block_out_channels|.*_inner|.*_features)$"
)
_NO_WIDTH = re.compile(
    r".*(patch|kernel|window|image|img|chunk|batch|vocab|stride|pool|grid|num_channels|in_channels|out_channels"
    r"|block_size|downsample|crop|in_chans|conv_size|memory_size|cache).*"
)
_HEADS = re.compile(r".*(num|n)_.*heads?$|n_heads?|num_heads|.*_heads$|.*attention_heads$|n_head")


def shrunk(settings: Mapping[str, Any], scale: Scale) -> dict[str, Any]:
    """Those of ``settings`` that change."""
    smaller: dict[str, Any] = {}
    for name, value in settings.items():
        new = _new(name, value, settings, scale)
        if new is not value and new != value:
            smaller[name] = new
    smaller.update(_heads({**settings, **smaller}, settings))
    smaller.update(_each_layer({**settings, **smaller}, settings))
    return smaller


def _each_layer(new: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """Lists with an item for each layer have as many as there are layers."""
    before, layers = old.get("num_hidden_layers"), new.get("num_hidden_layers")
    if not isinstance(before, int) or not isinstance(layers, int) or before == layers:
        return {}
    lists = [name for name, value in old.items() if _is_kinds(name, value, before) and new[name]]
    return {name: [new[name][place % len(new[name])] for place in range(layers)] for name in lists}


def _new(name: str, value: Any, settings: Mapping[str, Any], scale: Scale) -> Any:
    if isinstance(value, bool) or value is None or isinstance(value, (str, dict)):
        return value
    layers = settings.get("num_hidden_layers")
    if isinstance(layers, int) and layers > LAYERS and _is_kinds(name, value, layers):
        return [_new(name, item, {}, scale) for item in _kinds(name, list(value), settings)]
    for pattern, rule in _RULES:
        if re.fullmatch(pattern, name):
            return _BY_RULE[rule](name, value, settings)
    if _WIDTH.fullmatch(name) and not _NO_WIDTH.fullmatch(name):
        return _width(value, scale)
    return value


def _width(value: Any, scale: Scale) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_width(item, scale) for item in value)
    return scale.width(value) if isinstance(value, int) and value > scale.step else value


def _words(name: str, value: Any, _: Mapping[str, Any]) -> Any:
    return min(value, WORDS) if isinstance(value, int) else value


def token(value: int) -> int:
    """The same word for the same number, wherever it stands."""
    return value if value < _FIRST_SPECIAL else _FIRST_SPECIAL + value % (WORDS - _FIRST_SPECIAL)


def _token(name: str, value: Any, _: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [token(item) for item in value]
    return token(value) if isinstance(value, int) else value


def _dropout(name: str, value: Any, _: Mapping[str, Any]) -> Any:
    return DROPOUT if isinstance(value, float) and 0 <= value < 1 else value


def _layers(name: str, value: Any, settings: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [min(item, LAYERS - 1) for item in value] if value and all(type(i) is int for i in value) else value
    if not isinstance(value, int) or value <= 0:
        return value
    kinds = [min(3, len(set(map(str, other)))) for key, other in settings.items() if _is_kinds(key, other, value)]
    return min(value, max([LAYERS, *kinds]))


def _is_kinds(name: str, value: Any, layers: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == layers and layers > 4 and name != "depths"


def _kinds(name: str, value: Any, settings: Mapping[str, Any]) -> Any:
    if not isinstance(value, list):
        return value
    kinds = list({str(item): item for item in value}.values())[:3]
    return (kinds + [kinds[-1]] * LAYERS)[: max(LAYERS, len(kinds))]


def _depths(name: str, value: Any, _: Mapping[str, Any]) -> Any:
    return type(value)(min(item, LAYERS) for item in value) if isinstance(value, (list, tuple)) else value


def _top(name: str, value: Any, _: Mapping[str, Any]) -> Any:
    return min(value, 2) if isinstance(value, int) else value


def _one(name: str, value: Any, _: Mapping[str, Any]) -> Any:
    return min(value, 1) if type(value) is int else value


def _experts(name: str, value: Any, _: Mapping[str, Any]) -> Any:
    if not isinstance(value, int):
        return value
    return min(value, EXPERTS)


def _picture(name: str, value: Any, settings: Mapping[str, Any]) -> Any:
    patch = settings.get("patch_size", 16)
    patch = patch[-1] if isinstance(patch, (list, tuple)) else patch
    edge = PATCHES * patch if isinstance(patch, int) else 64
    if isinstance(value, (list, tuple)):
        return type(value)(edge for _ in value)
    return min(value, edge) if isinstance(value, int) and value > edge else value


_BY_RULE: dict[str, Callable[[str, Any, Mapping[str, Any]], Any]] = {
    "words": _words, "one": _one, "token": _token, "kept": lambda name, value, _: value, "dropout": _dropout,
    "layers": _layers, "kinds": _kinds, "depths": _depths, "top": _top, "experts": _experts, "picture": _picture,
}  # fmt: skip


def _heads(new: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """So many heads that each has 8 numbers, or 16; those of keys are fewer where they were fewer."""
    names = [name for name, value in old.items() if _HEADS.fullmatch(name) and type(value) is int and value > 0]
    queries = [name for name in names if not re.search("key|kv", name)]
    found = {}
    for name in queries:
        found[name] = _count(_width_for(name, new), old[name])
    most = max(found.values(), default=1)
    for name in set(names) - set(queries):
        is_fewer = any(old[name] < old[query] for query in queries)
        found[name] = (2 if most % 2 == 0 and most > 2 else 1) if is_fewer else most
    return found


_WIDTHS = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "hidden_dim", "encoder_hidden_size", "model_dim")


def _width_for(name: str, new: Mapping[str, Any]) -> int:
    prefix = re.sub(r"(num_|n_)?(attention_)?heads?$", "", name).strip("_")
    wanted = [f"{prefix}_{width}" for width in _WIDTHS] if prefix else []
    for width in [*wanted, *_WIDTHS]:
        if type(new.get(width)) is int:
            return int(new[width])
    return 32


def _count(width: int, old: int) -> int:
    for heads in (4, 2, 3, 5, 6, 7):
        if width % heads == 0 and width // heads % 8 == 0 and heads <= old:
            return heads
    return 1
