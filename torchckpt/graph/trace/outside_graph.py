"""Outside graph: runs a traced call outside of the graph, in code that ``torch.compile`` compiles."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["outside_graph"]


@torch.compiler.disable(  # type: ignore[untyped-decorator,no-untyped-call]  # untyped in torch
    reason="a rematerialized module has its own graphs, and runs outside compiled ones; torch.compile the model with "
    "backend=torchckpt.graph.backend(budget=...) instead, or rematerialize(engine=\"inductor\"), or drop fullgraph=True"
)
def outside_graph(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``run(*args, **kwargs)`` after a graph break. With ``fullgraph=True``, Dynamo raises an error instead."""
    return run(*args, **kwargs)
