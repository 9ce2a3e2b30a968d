"""Dynamo: graphs that ``torch.compile`` hands to a backend, run operator by operator, or compiled by Inductor."""
from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.graph import CodeGen

from torchckpt.graph.private.layouts import eager_layouts
from torchckpt.graph.private.surroundings import backward_without_autocast, cast_once_in, eager_kernels
from torchckpt.graph.private.trace import Boxed, Partition, RunBackward, backward_compiler, boxed
from torchckpt.tensors import tensors_in

__all__ = [
    "break_of", "by_inductor", "by_operator", "compile_lock", "compiling_whole", "outer_frame", "outside_graph",
    "recompile_limit_hit", "refreshed",
]


@torch.compiler.disable(  # type: ignore[untyped-decorator,no-untyped-call]  # untyped in torch
    reason="a rematerialized module has its own graphs, and runs outside compiled ones; torch.compile the model with "
    "backend=torchckpt.graph.backend(budget=...) instead, or rematerialize(engine=\"inductor\"), or drop fullgraph=True"
)
def outside_graph(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``run(*args, **kwargs)`` after a graph break. With ``fullgraph=True``, Dynamo raises an error instead."""
    return run(*args, **kwargs)


def compiling_whole() -> AbstractContextManager[Any]:
    """Inside this context, Dynamo compiles each call as one graph: it does not split that of a DistributedDataParallel
    module at gradient buckets, and does not count the calls, or other modules of the class, that were compiled before.
    """
    import torch._dynamo.config as config

    limits = dict.fromkeys(("recompile_limit", "accumulated_recompile_limit"), sys.maxsize)
    return config.patch({"optimize_ddp": False, **limits})  # type: ignore[no-any-return]


def recompile_limit_hit() -> type[Exception]:
    """What Dynamo raises where a call would be compiled once more than the limit allows."""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    return FailOnRecompileLimitHit


def compile_lock() -> Any:
    """The lock that Dynamo holds while it compiles, and while it calls a backend. A thread may take it again."""
    from torch._dynamo.convert_frame import compile_lock

    return compile_lock


def break_of(module: fx.GraphModule) -> tuple[str, str] | None:
    """Why and where Dynamo broke the graph after ``module``; None if it has the graph of the whole call."""
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    frames = list(reason.user_stack)
    return str(reason.reason), f'at {frames[-1].filename}:{frames[-1].lineno}: "{frames[-1].line}"' if frames else ""


def outer_frame() -> str | None:
    """The user code that called the function which Dynamo compiles now; None if ``torch.compile`` called it.

    No public form: a backend is not told of code that runs before its graph. The frames of Python have it.
    """
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
    with eager_kernels(), eager_layouts(), backward_without_autocast(), _random_operations_kept():
        compilers = {"fw_compiler": _forward_compiler, "bw_compiler": backward_compiler(backward)}
        compiled: Callable[..., Any] = aot_autograd(**compilers, partition_fn=partition)(module, inputs)
    return compiled


def _forward_compiler(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
    module.graph.set_codegen(Boxed())  # of a call that is not differentiated, too
    module.recompile()
    return boxed(module.forward)


def _random_operations_kept() -> AbstractContextManager[Any]:
    """Inside this context, AOTAutograd keeps random operations without readers: later ones draw the numbers of eager.

    It drops them (pytorch/pytorch#147171, ``eliminate_dead_code`` of torch/fx/graph.py) for compilers whose numbers
    differ from eager's anyway, which this setting of Inductor denies. Ends when a backend can deny it for itself.
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


def by_inductor(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    partition: Partition,
    before: Callable[[fx.Graph], None],
    watch: Callable[[bool, int], None],
    workspace_bytes: Callable[[fx.Node], int],
) -> Callable[..., Any]:
    """A callable for ``module`` whose forward and backward are compiled, after Inductor's joint-graph passes.

    Inductor's graph caches would skip ``partition`` and ``watch``, so they are off; its cache of compiled kernels is
    on. Reuse of buffers and changes of layout are off too, so that bytes are known before the graphs run.

    Args:
        before: called with the joint graph before Inductor's first pass.
        watch: called for each graph with ``is_backward`` and ``peak_bytes``.
        workspace_bytes: returns the workspace of an operator that is not fused.

    An error that one of these callables raises is raised unchanged.
    """
    from torch._functorch import config
    from torch._inductor import custom_graph_pass
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn

    # Releases without this class take any callable.
    scheduler_pass = getattr(custom_graph_pass, "CustomSchedulerPass", object)
    raised: list[Exception] = []

    def hook(kind: Any, function: Callable[..., Any]) -> Any:
        """A custom pass that calls ``function``. Its uuid is None, so that no cache can skip it."""

        def call(self: object, *arguments: Any, **named: Any) -> Any:
            try:
                return function(*arguments, **named)
            except Exception as error:
                raised.append(error)
                raise

        return type("Hook", (kind,), {"__call__": call, "uuid": lambda self: None})()

    def watched(nodes: list[Any]) -> list[Any]:
        watch(*_peak_bytes(nodes, workspace_bytes))
        return nodes

    options = {
        "custom_partitioner_fn": hook(CustomPartitionerFn, partition),
        "joint_custom_pre_pass": hook(CustomGraphPass, before),
        "_post_fusion_custom_pass": hook(scheduler_pass, watched),
        "fx_graph_cache": False,
        "allow_buffer_reuse": False,
        "layout_optimization": False,
        "reorder_for_peak_memory": False,
    }
    with backward_without_autocast(), config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True):
        try:
            return cast(Callable[..., Any], compile_fx(module, inputs, config_patches=options))
        except Exception as error:
            raise (raised or [error])[0] from None


def _peak_bytes(nodes: list[Any], workspace_bytes: Callable[[fx.Node], int]) -> tuple[bool, int]:
    """Whether the kernels in ``nodes`` are those of a backward, and the bytes that are alive at their peak."""
    from torch._inductor.memory import estimate_peak_memory_allocfree, prepare_planning_info
    from torch._inductor.virtualized import V
    from torch.utils._ordered_set import OrderedSet

    scheduler, graph = nodes[0].scheduler, V.graph
    inputs, outputs = OrderedSet(graph.graph_inputs), OrderedSet(graph.get_output_names())
    _, freeable = prepare_planning_info(nodes, scheduler.name_to_buf, scheduler.name_to_fused_node, inputs, outputs)
    _, alive, *_ = estimate_peak_memory_allocfree(nodes, freeable, outputs)
    peak_bytes = waiting_bytes = 0
    for node, (during, after) in zip(nodes, alive):
        local = _local_bytes(node)
        if node.is_extern():
            waiting_bytes = 0
        peak_bytes = max(peak_bytes, during + waiting_bytes + _beside_bytes(node, workspace_bytes) - local)
        if not node.is_extern() and str(node.get_device()) == "cpu":
            waiting_bytes += during - local - after  # one C++ function runs all loops up to an extern kernel, and frees
    return bool(graph.is_backward), peak_bytes


def _beside_bytes(node: Any, workspace_bytes: Callable[[fx.Node], int]) -> int:
    """Bytes that an operator that is not fused allocates beside the results that are read."""
    origins = node.node.get_origins() if node.is_extern() else ()
    operator = max(origins) if origins else None  # the operator's comes last
    if operator is None or not isinstance(operator.target, OpOverload):
        return 0
    results = operator.meta.get("val") if type(node.node.layout).__name__ == "MultiOutputLayout" else None
    made = sum(tensor.untyped_storage().nbytes() for tensor in tensors_in(results))
    read: int = sum(buffer.mpi_buffer.size_alloc for buffer in node.get_outputs())
    return workspace_bytes(operator) + max(0, made - read)


def _local_bytes(node: Any) -> int:
    """Bytes of values that one fused pointwise loop both makes and reads: they stay in registers."""
    if node.is_extern() or node.is_reduction():
        return 0
    names, scheduler = node.get_operation_names(), node.scheduler
    removed = scheduler.can_buffer_be_removed_through_fusion
    buffers = [buffer for buffer in node.get_outputs() if buffer.users and removed(buffer.get_name(), names)]
    return sum(buffer.mpi_buffer.size_alloc for buffer in buffers)
