"""Every name of torch's that the graph level uses and that is private, or new in some release, in one place.

AOTAutograd traces a call and its derivatives as one graph, the joint graph, and asks a function to part it in a forward
and a backward: that function is where this package comes in. Dynamo's backends go the same way.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

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
    "COMPILERS",
    "Boxed",
    "Differentiable",
    "Partition",
    "allocations",
    "backward_node",
    "break_of",
    "compiling",
    "is_collective",
    "is_data_dependent",
    "is_mutable",
    "is_random",
    "mutated_inputs",
    "require_supported_torch",
    "storage_of",
    "tangent_places",
    "without_modes",
]

Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]
"""``partition(joint, inputs, *, num_fwd_outputs, ...)``: the forward and the backward of a joint graph."""

_OLDEST = (2, 11)

BATCH_NORM: Any = torch.ops.aten._native_batch_norm_legit_functional.default
BATCH_NORM_AGAIN: Any = torch.ops.aten._native_batch_norm_legit.no_stats
BATCH_NORM_BACKWARD: Any = torch.ops.aten.native_batch_norm_backward.default
_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "c10d")


def is_random(target: object) -> bool:
    """Whether an operator draws from a generator."""
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


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


def _by_operator(module: fx.GraphModule, inputs: Sequence[Any], partition: Partition) -> Callable[..., Any]:
    """What runs a graph of Dynamo's by the two that ``partition`` makes of its joint graph, as they are."""
    from torch._dynamo.backends.common import aot_autograd

    compiled: Callable[..., Any] = aot_autograd(fw_compiler=_boxed, partition_fn=partition)(module, inputs)
    return compiled


def _boxed(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
    module.graph.set_codegen(Boxed())
    module.recompile()
    forward = module.forward
    return _marked_boxed(lambda arguments: forward(arguments))


def _by_inductor(module: fx.GraphModule, inputs: Sequence[Any], partition: Partition) -> Callable[..., Any]:
    """The same, with both compiled, after all that Inductor does to a joint graph.

    Its cache of whole calls would skip ``partition``; that of single graphs is used.
    """
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partitioner(CustomPartitionerFn):
        def __call__(self, *arguments: Any, **named: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
            return partition(*arguments, **named)

        def uuid(self) -> str:
            return "torchckpt"

        def __reduce__(self) -> tuple[Any, ...]:  # the cache asks for it too; a graph's code does not hang on it
            return str, ("torchckpt",)

    with config.patch(enable_autograd_cache=False):
        return compile_fx(module, inputs, config_patches={"custom_partitioner_fn": Partitioner(), "layout_optimization": False})


COMPILERS: dict[str, Callable[..., Callable[..., Any]]] = {"inductor": _by_inductor, "eager": _by_operator}
