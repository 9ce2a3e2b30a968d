"""Dynamo: graphs that ``torch.compile`` hands to a backend."""
from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from torch.fx.graph import CodeGen

from torchckpt.graph.private.surroundings import backward_without_autocast, cast_once_in, eager_kernels
from torchckpt.graph.private.trace import Boxed, Partition, RunBackward, backward_compiler, boxed

__all__ = [
    "break_of",
    "by_operator",
    "constant_under_dynamo",
    "in_one_graph",
    "outer_frame",
    "refreshed",
]

Function = TypeVar("Function", bound=Callable[..., Any])


def constant_under_dynamo(function: Function) -> Function:
    """Decorator like ``torch.compiler.assume_constant_result``, but without an import of Dynamo."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def in_one_graph() -> AbstractContextManager[Any]:
    """Inside this context, Dynamo does not split the graph of a DistributedDataParallel module at gradient buckets."""
    import torch._dynamo.config as config

    return config.patch(optimize_ddp=False)  # type: ignore[no-any-return]


def break_of(module: fx.GraphModule) -> tuple[str, str] | None:
    """Why and where Dynamo broke the graph after ``module``; None if it has the graph of the whole call."""
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    frames = list(reason.user_stack)
    return str(reason.reason), f'at {frames[-1].filename}:{frames[-1].lineno}: "{frames[-1].line}"' if frames else ""


def outer_frame() -> str | None:
    """The user code that called the function which Dynamo compiles now; None if ``torch.compile`` called it."""
    here, frame = os.path.dirname(os.path.dirname(__file__)), sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith((os.path.dirname(torch.__file__), here)):
        if os.path.basename(frame.f_code.co_filename) == "eval_frame.py":
            return None
        frame = frame.f_back
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return f'{frame.f_code.co_filename}:{frame.f_lineno}: "{line}"'


def by_operator(
    module: fx.GraphModule, inputs: Sequence[Any], partition: Partition, backward: RunBackward
) -> Callable[..., Any]:
    """A callable that runs a Dynamo graph operator by operator, as the two graphs that ``partition`` makes of it.

    ``backward`` runs the second one.
    """
    from torch._dynamo.backends.common import aot_autograd

    cast_once_in(module, inputs)
    with eager_kernels(), backward_without_autocast(), _random_operations_kept():
        compilers = {"fw_compiler": _forward_compiler, "bw_compiler": backward_compiler(backward)}
        compiled: Callable[..., Any] = aot_autograd(**compilers, partition_fn=partition)(module, inputs)
    return compiled


def _forward_compiler(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
    module.graph.set_codegen(Boxed())  # of a call that is not differentiated, too
    module.recompile()
    return boxed(module.forward)


def _random_operations_kept() -> AbstractContextManager[Any]:
    """Inside this context, AOTAutograd keeps random operations without readers: later ones draw the numbers of eager.

    It drops them for compilers whose numbers differ from eager's anyway, which this setting of Inductor denies.
    """
    import torch._inductor.config as config

    return config.patch(fallback_random=True)  # type: ignore[no-any-return]


def refreshed(module: fx.GraphModule) -> fx.GraphModule:
    """``module`` with new fake tensors on its nodes: passes that remove views and copies leave outdated ones."""
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    values = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    module.graph.set_codegen(CodeGen())
    mode = next(value.fake_mode for value in values if isinstance(value, Tensor))  # type: ignore[attr-defined]
    FakeTensorProp(module, mode).propagate_dont_convert_inputs(*values)
    return module
