"""Saved: the bytes that one layer keeps for its backward, for one micro-batch on one rank."""
from __future__ import annotations

from typing import NamedTuple

from torchckpt.jobs.layout import Layout
from torchckpt.jobs.model import Model

__all__ = ["Saved", "saved_of"]


class Saved(NamedTuple):
    """Bytes of a layer and micro-batch."""

    whole: float
    """If nothing is recomputed."""
    kept: float
    """Under the recomputation of the layout, if that is none or selective."""
    boundary: float
    """The input of the layer."""


def saved_of(model: Model, layout: Layout, *, dense: bool = True) -> Saved:
    """What a layer saves, its input included (Korthikanti et al. 2022, arXiv:2205.05198, section 4.1)."""
    software, tp, hidden = layout.software, layout.tp, model.hidden
    eager, flash = software.kernels == "eager", software.attention != "unfused"
    split = 1 / tp if layout.sequence_parallel else 1.0
    gathered = 0.0 if software.regathers else 4 * (1 - split)  # what the products after both norms read
    query, keys, width = model.query_width, model.kv_width, model.width(dense)
    norms = (16 if eager else 8) + (0 if not software.dropout else 1 if flash else 2)
    first = (4 if model.gated else 2) * width
    second = (4 if model.gated and eager else 2) * width
    routed = 0 if dense else 2 * model.active * hidden
    scores = 4 * model.heads if flash else 5 * model.heads * layout.sequence
    inside = 2 * (query + 2 * keys) + 2 * query + first + second + routed + scores
    whole = layout.tokens * (hidden * (norms * split + gathered) + inside / tp)
    boundary = layout.tokens * 2 * hidden * split
    if layout.recompute != "selective":
        return Saved(whole, whole, boundary)
    modules = software.selective
    if "products" in modules:
        return Saved(whole, boundary + layout.tokens * (4 * query + 2 * keys + 2 * width + 2 * hidden) / tp, boundary)
    gone = 0 if flash or "core_attn" not in modules else scores
    gone += (first + second if "mlp" in modules and dense else 0) + (second if "moe_act" in modules else 0)
    norms_gone = layout.tokens * 4 * hidden * split if "layernorm" in modules else 0.0
    return Saved(whole, whole - layout.tokens * gone / tp - norms_gone, boundary)
