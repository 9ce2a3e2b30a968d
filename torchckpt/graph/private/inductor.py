"""Inductor: compile a joint graph, forward and backward at once, and read Inductor's estimate of their peaks."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import fx
from torch._ops import OpOverload

from torchckpt.graph.private.surroundings import backward_without_autocast
from torchckpt.graph.private.trace import Partition

__all__ = ["by_inductor"]


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
    origins = [node.node.get_origins() if node.is_extern() else () for node in nodes]  # the operator's comes last
    operators = [max(those) if those else None for those in origins]
    beside = [workspace_bytes(node) if node and isinstance(node.target, OpOverload) else 0 for node in operators]
    local = [_local_bytes(node) for node in nodes]
    return bool(graph.is_backward), max(d + more - less for (d, _), more, less in zip(alive, beside, local))


def _local_bytes(node: Any) -> int:
    """Bytes of values that one fused pointwise loop both makes and reads: they stay in registers."""
    if node.is_extern() or node.is_reduction():
        return 0
    names, scheduler = node.get_operation_names(), node.scheduler
    removed = scheduler.can_buffer_be_removed_through_fusion
    buffers = [buffer for buffer in node.get_outputs() if buffer.users and removed(buffer.get_name(), names)]
    return sum(buffer.mpi_buffer.size_alloc for buffer in buffers)
