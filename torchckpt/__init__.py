"""Activation recomputation for PyTorch that starts before the gradient arrives."""
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from torchckpt.version import __version__

if TYPE_CHECKING:
    from torchckpt import errors, graph, testing
    from torchckpt.errors import (
        ArgumentError,
        BudgetInfeasible,
        CaptureError,
        CheckpointError,
        RecomputationError,
        RegionError,
        ScheduleError,
        TransformError,
    )
    from torchckpt.layers import checkpoint_layers
    from torchckpt.pipe import Pipe
    from torchckpt.regions import (
        Checkpointing,
        checkpoint,
        checkpoint_module,
        is_checkpointing,
        is_recomputing,
        keep,
        offload,
        offload_layers,
        offload_module,
    )

__all__ = [
    "ArgumentError",
    "BudgetInfeasible",
    "CaptureError",
    "CheckpointError",
    "Checkpointing",
    "Pipe",
    "RecomputationError",
    "RegionError",
    "ScheduleError",
    "TransformError",
    "__version__",
    "checkpoint",
    "checkpoint_layers",
    "checkpoint_module",
    "errors",
    "graph",
    "is_checkpointing",
    "is_recomputing",
    "keep",
    "offload",
    "offload_layers",
    "offload_module",
    "testing",
]

_MODULES = (
    "costs", "distributed", "errors", "graph", "jobs", "layers", "pipe", "planning", "regions", "testing", "typing",
)
_ELSEWHERE = {
    "costs": ("pipeline_costs",),
    "distributed": ("recompute_ahead",),
    "graph": ("backend", "frontier", "mark", "region", "rematerialize", "rematerialize_"),
    "pipe": ("NoChunk", "balance_by_bytes", "balance_by_time"),
    "jobs": ("plan_job", "search_layouts"),
    "planning.plan": ("plan_pipeline",),
    "testing": ("count_recomputes", "saved_bytes"),
}
"""Names of other modules that are looked for here. They stay there; the error says where."""

if not TYPE_CHECKING:

    def __getattr__(name):
        """Names are imported when they are first asked for, so that errors, planning and the command need no torch."""
        if name in _MODULES:
            return import_module(f"{__name__}.{name}")
        if name not in __all__:
            home = next((home for home, names in _ELSEWHERE.items() if name in names), None)
            hint = f"; it is {__name__}.{home}.{name}" if home else ""
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
        modules = (import_module(f"{__name__}.{home}") for home in ("errors", "regions", "layers", "pipe"))
        value = globals()[name] = next(getattr(module, name) for module in modules if name in module.__all__)
        return value

    def __dir__():
        return sorted({*globals(), *__all__, *_MODULES})
