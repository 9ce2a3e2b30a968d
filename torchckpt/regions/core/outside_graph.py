"""Outside the graph: runs a region that Dynamo cannot trace, outside its graph. Importing this file imports Dynamo."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["keep_outside_graph", "outside_graph"]


# disable(), not only a graph break: otherwise the forward would run compiled code, and the replay eager code.
@torch.compiler.disable(  # type: ignore[untyped-decorator,no-untyped-call]  # untyped in torch
    reason="a region by hand is run outside compiled graphs, and so are offload, a region with generators= and a Pipe; "
    "compile the block inside it instead: Checkpointing(torch.compile(block), x), or drop fullgraph=True. "
    "checkpoint(block, x) and checkpoint_module(block) work inside of graphs"
)
def outside_graph(run: Callable[..., Any], *args: Any) -> Any:
    """Run ``run(*args)`` after a graph break. With ``fullgraph=True`` Dynamo raises an error with the reason above."""
    return run(*args)


@torch.compiler.disable(  # type: ignore[untyped-decorator,no-untyped-call]  # untyped in torch
    reason="what torchckpt.keep keeps is outside of compiled graphs: drop fullgraph=True, and the graph ends before it "
    "and begins again after it; or compile what is kept, keep(torch.compile(router), x)"
)
def keep_outside_graph(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a call of ``keep`` after a graph break, as :func:`outside_graph` does."""
    return run(*args, **kwargs)
