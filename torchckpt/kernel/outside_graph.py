"""Outside the graph: how a region runs where its caller is compiled. Imports Dynamo, so it is imported only then."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["outside_graph"]


# Disabled, not merely a graph break: were the function compiled in its forward, its replay would run another program.
@torch.compiler.disable(  # type: ignore[untyped-decorator,no-untyped-call]  # untyped in torch
    reason="a torchckpt region is run outside compiled graphs; compile the block inside it instead: "
    "torchckpt.checkpoint(torch.compile(block), x), or drop fullgraph=True"
)
def outside_graph(run: Callable[..., Any], *args: Any) -> Any:
    """``run(*args)``, by a graph break; with ``fullgraph=True`` Dynamo raises an error with the reason above."""
    return run(*args)
