"""Functional: trace a function of tensors, on tensors without data, as one graph without in-place operators."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.traceback import preserve_node_meta

from torchckpt.errors import CaptureError, Fault
from torchckpt.graph.private.runtime import operating
from torchckpt.graph.private.surroundings import as_in_eager
from torchckpt.graph.private.witness import Witness

__all__ = ["Functional", "backward_of", "functional"]


class Functional(NamedTuple):
    """A functional graph. It takes the function's tensors, and returns its results and then new values of tensors.

    ``mutated`` has the places of the tensors with new values; ``witness`` finds tensors that outlive the trace.
    """

    module: fx.GraphModule
    mutated: tuple[int, ...]
    witness: Witness


def functional(
    function: Callable[..., Sequence[Tensor | None]], tensors: Sequence[Tensor], requires_grad: Sequence[bool],
    tell: Callable[[object], None],
) -> Functional:
    """Trace ``function`` on tensors like ``tensors``, with the building blocks of AOTAutograd; nothing is run.

    Unlike AOTAutograd, this adds no derivatives: the function itself may call autograd, for any of its values. Tensors
    that the function closes over become constants of the graph.

    Args:
        function: takes tensors; returns tensors and None. It is called once, and a second time if tracing fails.
        requires_grad: for each tensor, whether it requires a gradient inside the function.
        tell: called with each operator.
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
    return Functional(module, tuple(mutated), witness)


def _pass_notes_on(graph: fx.Graph) -> None:
    """Copy notes from forward nodes to their backward nodes, by autograd's sequence numbers.

    ``copy_fwd_metadata_to_bw_nodes`` of torch/_functorch/_aot_autograd/utils.py copies all other metadata in torch
    2.11. Ends when that release is no longer supported.
    """
    forward: list[fx.Node] = []
    backward: list[fx.Node] = []
    for node in graph.nodes:
        (backward if node.meta.get("partitioner_tag") == "is_backward" else forward).append(node)
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
