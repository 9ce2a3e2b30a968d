"""Trace: a call and its derivatives as one graph, the joint graph.

AOTAutograd makes it, and asks a function to part it in a forward and a backward: that function is where this package
comes in. Dynamo's backends go the same way.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.graph import CodeGen

from torchckpt.errors import CaptureError, Fault

__all__ = [
    "Boxed",
    "Differentiable",
    "Partition",
    "backward_node",
    "compiling",
    "eager_kernels",
    "input_place",
    "is_data_dependent",
    "marked_boxed",
    "mutated_inputs",
    "require_supported_torch",
    "tangent_places",
    "uncompiled",
]

Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]
"""``partition(joint, inputs, *, num_fwd_outputs, ...)``: the forward and the backward of a joint graph."""

_OLDEST = (2, 11)


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


@contextmanager
def eager_kernels() -> Iterator[None]:
    """Trace the kernels that eager runs, where torch would take its own formulas in Python for them.

    Those are for compilers: dozens of operations for a bilinear upsampling, and other last bits.
    """
    keys = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)
    operators = [getattr(packet, name) for packet in _in_formulas() for name in packet.overloads()]
    before = [(operator, dict(operator.py_kernels)) for operator in operators]
    try:
        for operator in operators:
            for key in keys:
                operator.py_kernels.pop(key, None)
            operator._dispatch_cache.clear()
        yield
    finally:
        for operator, kernels in before:
            operator.py_kernels.update(kernels)
            operator._dispatch_cache.clear()


def _in_formulas() -> list[Any]:
    import torch._decomp  # registers them

    sizes = [f"{kind}{size}d" for size in (1, 2, 3) for kind in ("upsample_nearest", "_upsample_nearest_exact")]
    sizes += ["upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d"]
    sizes += ["_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa"]
    others = ["lstm", "gru", "rnn_tanh", "rnn_relu", "softshrink", "hardshrink"]
    others += ["multi_margin_loss", "multilabel_margin_loss_forward"]
    return [getattr(torch.ops.aten, name) for name in (*sizes, *others) if hasattr(torch.ops.aten, name)]


def uncompiled(root: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """A module of ``graph`` that is compiled when it is called."""
    from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

    with _use_lazy_graph_module(True):
        return _make_graph_module(root, graph)


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
        from torch.fx._lazy_graph_module import _use_lazy_graph_module

        self._tracing = True
        try:
            with compiling(), eager_kernels(), _use_lazy_graph_module(True):  # no code of what is not run
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
        return marked_boxed(run)

    def _backward(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        def run(arguments: list[Any]) -> Any:
            return self._gradients(backward(arguments))

        backward = module.forward
        return marked_boxed(run)


def marked_boxed(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Tell AOTAutograd that ``run`` takes a list, and empties it."""
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


class _Traced(Exception):
    """Ends a call when its graphs are made."""


def is_data_dependent(error: BaseException) -> bool:
    """Whether tracing failed because the program asks for the value of a tensor."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return isinstance(error, (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode))
