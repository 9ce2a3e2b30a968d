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
    "testing",
]

_MODULES = ("costs", "distributed", "errors", "graph", "layers", "pipe", "planning", "regions", "testing", "typing")
_HOMES = {
    "ArgumentError": "errors",
    "BudgetInfeasible": "errors",
    "CaptureError": "errors",
    "CheckpointError": "errors",
    "Checkpointing": "regions",
    "Pipe": "pipe",
    "RecomputationError": "errors",
    "RegionError": "errors",
    "ScheduleError": "errors",
    "TransformError": "errors",
    "checkpoint": "regions",
    "checkpoint_layers": "layers",
    "checkpoint_module": "regions",
    "is_checkpointing": "regions",
    "is_recomputing": "regions",
    "keep": "regions",
}

_ELSEWHERE = {
    "NoChunk": "pipe",
    "backend": "graph",
    "balance_by_bytes": "pipe",
    "balance_by_time": "pipe",
    "count_recomputes": "testing",
    "frontier": "graph",
    "mark": "graph",
    "pipeline_costs": "costs",
    "plan_pipeline": "planning.plan",
    "recompute_ahead": "distributed",
    "region": "graph",
    "rematerialize": "graph",
    "rematerialize_": "graph",
    "saved_bytes": "testing",
}
"""Names of other modules that are looked for here. They stay there; the error says where."""

if not TYPE_CHECKING:

    def __getattr__(name):
        """Names are imported when they are first asked for, so that floors 1 and 2 and the command need no torch."""
        if name in _MODULES:
            return import_module(f"{__name__}.{name}")
        if name not in _HOMES:
            home = _ELSEWHERE.get(name)
            hint = f"; it is {__name__}.{home}.{name}" if home else ""
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        return value

    def __dir__():
        return sorted({*globals(), *__all__, *_MODULES})
