"""Trace: make one graph of a call: with its derivatives, the joint graph; or of a function, without operators in place.

AOTAutograd traces the joint graph, then calls a partition function, which splits it into a forward and a backward. This
package supplies that function. Dynamo's backends work the same way.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.graph import CodeGen
from torch.fx.traceback import preserve_node_meta

from torchckpt.errors import CaptureError, Fault
from torchckpt.features import TESTED, Feature, release_of
from torchckpt.graph.private.runtime import is_backward, operating
from torchckpt.graph.private.surroundings import as_in_eager, without_autocast
from torchckpt.graph.private.witness import Witness

__all__ = [
    "GRADIENTS_STAY", "Boxed", "Partition", "RunBackward", "backward_compiler", "backward_node", "backward_of", "boxed",
    "differentiable", "functional", "input_place", "is_data_dependent", "mutated_inputs", "output_places", "require",
    "retainable", "tangent_places", "uncompiled",
]

BoxedCall = Callable[[list[Any]], Any]
"""A function of one list, which it empties, so that each value is freed after its last use."""

RunBackward = Callable[[BoxedCall, list[Any]], Any]
"""``run(whole, arguments)`` runs the backward graph ``whole``, or another function in its place."""

Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]
"""``partition(joint, inputs, *, num_fwd_outputs, ...)`` returns the forward and the backward of a joint graph."""


def require(feature: Feature) -> None:
    """Raise a :class:`~torchckpt.errors.CaptureError` if this torch lacks a name that ``feature`` needs."""
    for need in _missing(feature):
        name = feature.name.replace("`", "")
        rule = f"this torch lacks what {name} needs and torch {feature.since} to {TESTED[-1]} have"
        received = f"torch {torch.__version__} without {need}"
        raise CaptureError(str(Fault(rule, received, f"pip install 'torch=={TESTED[-1]}.*'")))


_missing = functools.cache(Feature.missing)

GRADIENTS_STAY = release_of(torch.__version__) < (2, 13)
"""Whether AOTAutograd holds the gradients of outputs until its backward ends (pytorch/pytorch#177837). Only the release
of torch tells. Ends when torch 2.12 is no longer supported."""


def mutated_inputs(outputs: fx.Node) -> dict[int, int | None]:
    """The input whose new value an output of a joint graph is, by the place of that output.

    None stands for a parameter or a buffer, which Dynamo lifts by its name.
    """
    descriptions = outputs.meta.get("desc") or ()
    return {
        place: getattr(what.mutated_input, "idx", None)
        for place, what in enumerate(descriptions)
        if type(what).__name__ == "InputMutationAOTOutput"
    }


def input_place(node: fx.Node) -> int | None:
    """The place of a joint graph's input among the tensors that the function was traced with; None for a token."""
    what = node.meta.get("desc")
    return None if _is_token(what) else getattr(what, "idx", None)


def _is_token(what: object) -> bool:
    return "Token" in type(what).__name__


def tangent_places(joint: fx.Graph) -> dict[fx.Node, int]:
    """The place of an output among the forward's outputs, by the placeholder of its gradient.

    Tokens do not count: they only keep operations with side effects, such as checks, in order.
    """
    outputs = _outputs_of(joint)
    nodes = {node: getattr(node.meta.get("desc"), "output", None) for node in joint.find_nodes(op="placeholder")}
    return {node: outputs.index(output) for node, output in nodes.items() if output is not None and output in outputs}


def output_places(joint: fx.Graph) -> dict[int, int]:
    """The place in what the function returns, by the place among the forward's outputs that count above.

    Outputs that are not simply returned, such as new values of buffers, have none.
    """
    outputs = enumerate(_outputs_of(joint))
    return {place: what.idx for place, what in outputs if type(what).__name__ == "PlainAOTOutput"}


def _outputs_of(joint: fx.Graph) -> list[Any]:
    """AOTAutograd's descriptions of the outputs that are no tokens."""
    return [what for what in joint.output_node().meta.get("desc") or () if not _is_token(what)]


def backward_node(output: Tensor, inputs: int) -> Any:
    """AOTAutograd's autograd node that made ``output`` or its base, if the node has ``inputs`` gradients; else None."""
    node: Any = output.grad_fn
    while node is not None and node.name() != "CompiledFunctionBackward" and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    is_ours = node is not None and node.name() == "CompiledFunctionBackward" and len(node.next_functions) == inputs
    return node if is_ours else None


def retainable(node: Any) -> None:
    """Allow ``retain_graph=True`` for AOTAutograd's ``node``: our graphs do not write to saved tensors.

    AOTAutograd refuses it if it has told a compiler that saved tensors may be overwritten (pytorch/pytorch#139669).
    Ends when a compiler can tell that it overwrites none.
    """
    node._forward_cls.metadata.bw_donated_idxs = []


def uncompiled(root: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """A module of ``graph`` whose Python code is generated at the first call."""
    from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

    with _use_lazy_graph_module(True):
        return _make_graph_module(root, graph)


class Boxed(CodeGen):
    """Generates a graph's code as a function of one list, which it empties: each value is freed after its last use, and
    those that are ``unread``, by name, at once."""

    def __init__(self, unread: Collection[str] = ()) -> None:
        super().__init__()
        self._unread = unread

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, *, expanded_def: bool = False) -> str:
        names = [name.split(":")[0].split("=")[0].strip() for name in free_vars if name != "self"]
        unpack = f"\n    {', '.join(names)}, = arguments; arguments.clear()" if names else ""
        unpack += "".join(f"; del {name}" for name in names if name in self._unread)
        return f"def {self._func_name}(self, arguments){maybe_return_annotation}:{unpack}"


def differentiable(
    function: Callable[..., Any], partition: Partition, backward: RunBackward, tensors: Sequence[Tensor]
) -> Callable[..., Any]:
    """``function``, traced on ``tensors``. ``partition`` splits the joint graph into the two that run.

    Nothing runs while it is traced: no random number is drawn, and no buffer is written. ``backward`` runs the second
    graph. Both graphs must take one list and empty it.
    """
    from functorch.compile import aot_function  # type: ignore[import-untyped]
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    is_tracing = True

    def forward_compiler(module: fx.GraphModule, inputs: Sequence[Any]) -> BoxedCall:
        def run(arguments: list[Any]) -> Any:
            if is_tracing:
                raise _Traced
            return forward(arguments)

        forward = module.forward
        return boxed(run)

    def trace() -> None:
        with suppress(_Traced):
            called(*tensors)

    compilers = {"fw_compiler": forward_compiler, "bw_compiler": backward_compiler(backward)}
    called: Callable[..., Any] = aot_function(function, partition_fn=partition, **compilers)
    with _use_lazy_graph_module(True):  # generates no code for graphs that do not run
        as_in_eager(trace)
    is_tracing = False
    return called


def boxed(run: BoxedCall) -> BoxedCall:
    """``run`` as AOTAutograd takes it. Autocast is off in it: its casts are in the graph, and a backward may be run
    inside of autocast."""

    def call(arguments: list[Any]) -> Any:
        with without_autocast():
            return run(arguments)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def backward_compiler(run: RunBackward) -> Callable[[fx.GraphModule, Sequence[Any]], BoxedCall]:
    """A compiler for AOTAutograd whose result calls ``run`` with the backward graph and the arguments."""
    return lambda module, inputs: boxed(partial(run, module.forward))


class _Traced(Exception):
    """Raised to end a call once its graphs are made."""


def is_data_dependent(error: BaseException) -> bool:
    """Whether tracing failed because the program asks for the value of a tensor."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return isinstance(error, (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode))


# a function as one graph ----------------------------------------------------------------------------------------------


def functional(
    function: Callable[..., Sequence[Tensor | None]], tensors: Sequence[Tensor], requires_grad: Sequence[bool],
    tell: Callable[[object], None],
) -> tuple[fx.GraphModule, tuple[int, ...], Witness]:
    """Trace ``function`` on tensors like ``tensors``, with the building blocks of AOTAutograd; nothing is run.

    Unlike AOTAutograd, this adds no derivatives: the function itself may call autograd, for any of its values. Tensors
    that the function closes over become constants of the graph.

    Args:
        function: takes tensors; returns tensors and None. It is called once, and a second time if tracing fails.
        requires_grad: for each tensor, whether it requires a gradient inside the function.
        tell: called with each operator.

    Returns:
        The graph, which takes ``tensors``, and returns the results of ``function`` and then new values of tensors; the
        places of the tensors with new values; and a witness, which finds tensors that outlive the trace.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._functorch._aot_autograd.utils import copy_fwd_metadata_to_bw_nodes
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    def run(*fakes: Tensor) -> list[Tensor | None]:
        outputs, changed = _functionally(watched, fakes)
        mutated[:] = changed
        return [*outputs, *changed.values()]

    def watched(*tensors: Tensor) -> Sequence[Tensor | None]:
        with witness.watching(tensors):
            return function(*tensors)

    def trace() -> fx.GraphModule:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        fakes = [mode.from_tensor(tensor.detach()) for tensor in tensors]
        for fake, required in zip(fakes, requires_grad):
            fake.requires_grad_(required)
        with mode, enable_python_dispatcher(), preserve_node_meta(), torch.enable_grad():
            with torch.autograd.set_multithreading_enabled(False):
                return make_fx(run)(*fakes)

    mutated: list[int] = []
    witness = Witness(tensors, tell)
    try:
        module = as_in_eager(trace)
    finally:
        torch.clear_autocast_cache()  # cached casts of closed-over tensors have no data
    copy_fwd_metadata_to_bw_nodes(module)
    _pass_notes_on(module.graph)
    return module, tuple(mutated), witness


def _pass_notes_on(graph: fx.Graph) -> None:
    """Copy notes from forward nodes to their backward nodes, by autograd's sequence numbers.

    ``copy_fwd_metadata_to_bw_nodes`` of torch/_functorch/_aot_autograd/utils.py copies all other metadata in torch
    2.11. Ends when that release is no longer supported.
    """
    forward: list[fx.Node] = []
    backward: list[fx.Node] = []
    for node in graph.nodes:
        (backward if is_backward(node) else forward).append(node)
    notes = {node.meta.get("seq_nr"): node.meta["custom"] for node in reversed(forward) if "custom" in node.meta}
    for node in backward:
        if node.meta.get("seq_nr") in notes:
            node.meta.setdefault("custom", notes[node.meta["seq_nr"]])


@contextmanager
def backward_of(outputs: Iterable[Tensor]) -> Iterator[None]:
    """Inside this context, backward operations of ``outputs`` get the notes of their forward operations."""
    from torch._functorch._aot_autograd.graph_capture_wrappers import set_partitioner_tag_is_backward
    from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks

    setup_stacktrace_preservation_hooks([output.grad_fn for output in outputs if output.grad_fn is not None])
    with set_partitioner_tag_is_backward():
        yield


def _functionally(
    function: Callable[..., Sequence[Tensor | None]], fakes: Sequence[Tensor]
) -> tuple[list[Tensor | None], dict[int, Tensor]]:
    """The results of ``function``, and by place the new values of the tensors that it changed."""
    from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

    torch_: Any = torch

    def plain(value: Any) -> Any:
        if not isinstance(value, FunctionalTensor):
            return value
        torch_._sync(value)
        return torch_._from_functional_tensor(value.elem)

    excluded = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
    with torch._C._ExcludeDispatchKeyGuard(excluded), FunctionalTensorMode(), _refusing_to_write_outside():
        tensors = [FunctionalTensor.to_functional(fake) for fake in fakes]
        outputs = function(*tensors)
        changed = [place for place, t in enumerate(tensors) if torch_._functionalize_has_data_mutation(t.elem)]
        return list(map(plain, outputs)), {place: plain(tensors[place]) for place in changed}


def _refusing_to_write_outside() -> AbstractContextManager[Any]:
    """Raise on a write to a tensor that is not part of the trace: the write would change the real tensor."""
    from torch._subclasses.functional_tensor import FunctionalTensor

    def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(operator, OpOverload) and operator._schema.is_mutable:
            parameters = operator._schema.arguments
            values = {**dict(zip((parameter.name for parameter in parameters), args)), **kwargs}
            written = [values.get(parameter.name) for parameter in parameters if parameter.is_write]
            if any(isinstance(value, Tensor) and not isinstance(value, FunctionalTensor) for value in written):
                raise CaptureError(str(Fault(
                    "the function changes a tensor that it closes over; only a module may change its own buffers",
                    f"{operator} on a tensor that the function closes over",
                    "the module itself, in place of a function around it",
                )))
        return operator(*args, **kwargs)

    return operating(run)
