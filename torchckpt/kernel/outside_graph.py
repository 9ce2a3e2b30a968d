"""Outside the graph: how a region runs that Dynamo cannot trace. Imports Dynamo, so it is imported only then."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["keep_outside_graph", "outside_graph"]


# Disabled, not merely a graph break: were the function compiled in its forward, its replay would run another program.
@torch.compiler.disable(  # type: ignore[untyped-decorator,no-untyped-call]  # untyped in torch
    reason="a region by hand is run outside compiled graphs, and so are a region with generators= and a Pipe; compile "
    "the block inside it instead: Checkpointing(torch.compile(block), x), or drop fullgraph=True. checkpoint(block, x) "
    "and checkpoint_module(block) work inside of graphs"
)
def outside_graph(run: Callable[..., Any], *args: Any) -> Any:
    """``run(*args)``, by a graph break; with ``fullgraph=True`` Dynamo raises an error with the reason above."""
    return run(*args)


@torch.compiler.disable(  # type: ignore[untyped-decorator,no-untyped-call]  # untyped in torch
    reason="what torchckpt.keep keeps is outside of compiled graphs: drop fullgraph=True, and the graph ends before it "
    "and begins again after it; or compile what is kept, keep(torch.compile(router), x)"
)
def keep_outside_graph(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """As ``outside_graph``, for ``keep``."""
    return run(*args, **kwargs)
