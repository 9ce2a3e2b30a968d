"""Every name of torch's that the graph level uses and that is private, or new in some release, in one place.

AOTAutograd traces a call and its derivatives as one graph, the joint graph, and asks a function to part it in a forward
and a backward: that function is where this package comes in. Dynamo's backends go the same way.
"""
from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.graph import CodeGen
from torch.multiprocessing.reductions import StorageWeakRef

from torchckpt.errors import CaptureError, Fault

__all__ = [
    "BATCH_NORM",
    "BATCH_NORM_AGAIN",
    "BATCH_NORM_BACKWARD",
    "BATCH_NORM_BY_STATISTICS",
    "Boxed",
    "Differentiable",
    "Partition",
    "allocations",
    "argument_of",
    "backward_node",
    "break_of",
    "by_inductor",
    "by_operator",
    "compiling",
    "constant_under_dynamo",
    "input_place",
    "is_collective",
    "is_data_dependent",
    "is_mutable",
    "is_random",
    "mutated_inputs",
    "outer_frame",
    "refreshed",
    "require_supported_torch",
    "storage_of",
    "tangent_places",
    "without_modes",
]

Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]
"""``partition(joint, inputs, *, num_fwd_outputs, ...)``: the forward and the backward of a joint graph."""

Function = TypeVar("Function", bound=Callable[..., Any])

_OLDEST = (2, 11)

BATCH_NORM: Any = torch.ops.aten._native_batch_norm_legit_functional.default
BATCH_NORM_AGAIN: Any = torch.ops.aten._native_batch_norm_legit.no_stats
BATCH_NORM_BY_STATISTICS: Any = torch.ops.aten._native_batch_norm_legit_no_training.default
BATCH_NORM_BACKWARD: Any = torch.ops.aten.native_batch_norm_backward.default
_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "c10d")


def is_random(target: object) -> bool:
    """Whether an operator draws from a generator."""
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def argument_of(node: fx.Node, name: str) -> Any:
    """What the operator of ``node`` gets for its parameter ``name``, its default included; None if it has none."""
    parameters = node.target._schema.arguments if isinstance(node.target, OpOverload) else ()
    for place, parameter in enumerate(parameters):
        if parameter.name == name:
            given = node.args[place] if place < len(node.args) else parameter.default_value
            return node.kwargs.get(name, given)
    return None


def constant_under_dynamo(function: Function) -> Function:
    """``torch.compiler.assume_constant_result``, which would import Dynamo."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def is_collective(target: object) -> bool:
    return isinstance(target, OpOverload) and target.namespace in _COLLECTIVES


def is_mutable(target: object) -> bool:
    """Whether an operator writes to what it is given."""
    return isinstance(target, OpOverload) and target._schema.is_mutable


def storage_of(tensor: Tensor) -> int:
    """Views of one tensor have the same; a sparse tensor has one of its own."""
    if tensor.layout != torch.strided:
        return id(tensor)
    return int(StorageWeakRef(tensor.untyped_storage()).cdata)  # type: ignore[no-untyped-call]


def require_supported_torch() -> None:
    """Raise a :class:`~torchckpt.errors.CaptureError` where this torch cannot be captured."""
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if release < _OLDEST:
        fault = Fault("the graph level needs torch 2.11 or newer", f"torch {torch.__version__}",
                      "pip install 'torch>=2.11'")
        raise CaptureError(str(fault))


def mutated_inputs(outputs: fx.Node) -> dict[int, int | None]:
    """Of a joint graph's output node: the places of new values of inputs, and of which input each is.

    None stands for a parameter or a buffer, which Dynamo lifts by its name.
    """
    descriptions = outputs.meta.get("desc") or ()
    return {
        place: getattr(what.mutated_input, "idx", None)
        for place, what in enumerate(descriptions)
        if type(what).__name__ == "InputMutationAOTOutput"
    }


def input_place(node: fx.Node) -> int | None:
    """Of an input of a joint graph, its place among the tensors that the function was traced with."""
    return getattr(node.meta.get("desc"), "idx", None)


def tangent_places(joint: fx.Graph) -> dict[fx.Node, int]:
    """Of each gradient of an output that a joint graph takes, the output's place among what the forward returns."""
    outputs = list(joint.output_node().meta.get("desc") or ())
    found = {}
    for node in joint.find_nodes(op="placeholder"):
        output = getattr(node.meta.get("desc"), "output", None)
        if output is not None and output in outputs:
            found[node] = outputs.index(output)
    return found


def backward_node(output: Tensor, inputs: int) -> Any:
    """The node of AOTAutograd's that made ``output``, if it has a gradient for each of that many inputs."""
    node = output.grad_fn
    is_ours = node is not None and node.name() == "CompiledFunctionBackward" and len(node.next_functions) == inputs
    return node if is_ours else None


@contextmanager
def compiling() -> Iterator[None]:
    """Let ``torch.compiler.is_compiling()`` be true: code that looks at values in eager alone asks for it."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


class Boxed(CodeGen):
    """A graph's code as a function of one list, which it empties: what was in it dies after its last use."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, *, expanded_def: bool = False) -> str:
        names = [name.split(":")[0].split("=")[0].strip() for name in free_vars if name != "self"]
        unpack = f"\n    {', '.join(names)}, = arguments; arguments.clear()" if names else ""
        return f"def {self._func_name}(self, arguments){maybe_return_annotation}:{unpack}"


class Differentiable:
    """A function of tensors, traced at its first call; ``partition`` makes of its joint graph the two that are run.

    What the backward returns goes through ``gradients``. The two graphs must take a list and empty it: what the list
    holds then dies after its last use.
    """

    def __init__(
        self, function: Callable[..., Any], partition: Partition, gradients: Callable[[Sequence[Any]], Sequence[Any]]
    ) -> None:
        from functorch.compile import aot_function  # type: ignore[import-untyped]

        self._tracing = False
        self._gradients = gradients
        forward, backward = self._forward, self._backward
        self._run = aot_function(function, fw_compiler=forward, bw_compiler=backward, partition_fn=partition)

    def trace(self, *tensors: Tensor) -> None:
        """Trace, and run nothing: no random number is drawn, no buffer written."""
        self._tracing = True
        try:
            with compiling():
                self._run(*tensors)
        except _Traced:
            return
        finally:
            self._tracing = False

    def __call__(self, *tensors: Tensor) -> Any:
        return self._run(*tensors)

    def _forward(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        def run(arguments: list[Any]) -> Any:
            if self._tracing:
                raise _Traced
            return forward(arguments)

        forward = module.forward
        return _marked_boxed(run)

    def _backward(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        def run(arguments: list[Any]) -> Any:
            return self._gradients(backward(arguments))

        backward = module.forward
        return _marked_boxed(run)


def _marked_boxed(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


class _Traced(Exception):
    """Ends a call when its graphs are made."""


def is_data_dependent(error: BaseException) -> bool:
    """Whether tracing failed because the program asks for the value of a tensor."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return isinstance(error, (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode))


def without_modes() -> AbstractContextManager[Any]:
    """Operations run for real inside, in the midst of a trace too."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def allocations(run: Callable[[], Any], device: str = "cpu") -> list[int]:
    """The bytes that ``run()`` takes from the allocator of ``device`` and, negative, gives back, in the order of time.

    The events are those of the profiler for memory, in the form that needs no tracing library to start.
    """
    from torch._C._profiler import _ExperimentalConfig

    autograd: Any = torch.autograd

    autograd._enable_profiler_legacy(
        autograd.ProfilerConfig(autograd.ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    )
    try:
        run()
    finally:
        threads = autograd._disable_profiler_legacy()
    events = (event for thread in threads for event in thread if event.kind() == "memory_alloc")
    return [_event_bytes(event, device) for event in events]


def _event_bytes(event: Any, device: str) -> int:
    if device == "cpu":
        return int(event.cpu_memory_usage())
    return int(event.device_memory_usage() if hasattr(event, "device_memory_usage") else event.cuda_memory_usage())


# under torch.compile --------------------------------------------------------------------------------------------------


def break_of(module: fx.GraphModule) -> tuple[str, str] | None:
    """Why and where Dynamo broke the graph after ``module``; None where the graph is that of the whole call."""
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    frames = list(reason.user_stack)
    return str(reason.reason), f'at {frames[-1].filename}:{frames[-1].lineno}: "{frames[-1].line}"' if frames else ""


def outer_frame() -> str | None:
    """Of a graph that Dynamo compiles now: the code that has called its function; None where ``torch.compile`` has."""
    ours, frame = os.path.dirname(torch.__file__), sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith((ours, os.path.dirname(__file__))):
        if os.path.basename(frame.f_code.co_filename) == "eval_frame.py":
            return None
        frame = frame.f_back
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return f'{frame.f_code.co_filename}:{frame.f_lineno}: "{line}"'


def by_operator(module: fx.GraphModule, inputs: Sequence[Any], partition: Partition) -> Callable[..., Any]:
    """What runs a graph of Dynamo's by the two that ``partition`` makes of its joint graph, as they are."""
    from torch._dynamo.backends.common import aot_autograd

    compiled: Callable[..., Any] = aot_autograd(fw_compiler=_boxed, partition_fn=partition)(module, inputs)
    return compiled


def _boxed(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
    module.graph.set_codegen(Boxed())
    module.recompile()
    forward = module.forward
    return _marked_boxed(lambda arguments: forward(arguments))


def refreshed(module: fx.GraphModule) -> fx.GraphModule:
    """With the fake tensors that its nodes make now: passes that take views and copies out leave those of before."""
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
    """The same, with both compiled, after all that Inductor does to a joint graph.

    Its caches of graphs would skip ``partition`` and ``watch``; that of compiled kernels is used. So that bytes can be
    told beforehand no buffer waits for another of its size to reuse it, and none is copied to another layout.

    Args:
        before: called with the joint graph before anything is done to it.
        watch: called with whether a graph is the backward, and the bytes at its peak.
        workspace_bytes: of an operator that is not fused.

    What these raise comes out as it is.
    """
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn, CustomSchedulerPass

    raised: list[Exception] = []

    def hook(kind: Any, function: Callable[..., Any]) -> Any:
        """A pass that does what ``function`` does; it has no name by which a cache could know it."""

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
        "_post_fusion_custom_pass": hook(CustomSchedulerPass, watched),
        "fx_graph_cache": False,
        "allow_buffer_reuse": False,
        "layout_optimization": False,
        "reorder_for_peak_memory": False,
    }
    with config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True):
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
    """Of what one loop of pointwise operations makes and reads: it stays in registers."""
    if node.is_extern() or node.is_reduction():
        return 0
    names, scheduler = node.get_operation_names(), node.scheduler
    removed = scheduler.can_buffer_be_removed_through_fusion
    made = [buffer for buffer in node.get_outputs() if buffer.users and removed(buffer.get_name(), names)]
    return sum(buffer.mpi_buffer.size_alloc for buffer in made)
