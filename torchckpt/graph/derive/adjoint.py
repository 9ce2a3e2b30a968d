"""Adjoint: a graph module that returns the outputs of a call, and gradients."""
from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, fx
from torch.fx.graph import CodeGen
from torch.utils import _pytree as pytree

from torchckpt.errors import ArgumentError, Fault, raise_fault
from torchckpt.graph.derive.derivative import Derivative
from torchckpt.graph.keep import Keep
from torchckpt.graph.planner import GraphPlanner
from torchckpt.graph.private.runtime import storage_number
from torchckpt.graph.private.surroundings import without_autocast
from torchckpt.graph.step.emit import emit_one
from torchckpt.graph.step.joint import Joint, joint_of
from torchckpt.regions.flags import local
from torchckpt.tensors import tensors_in

__all__ = ["FORWARD_OUTPUTS", "TAKES", "planned", "planner_of", "unrecorded"]

F = TypeVar("F", bound=Callable[..., Any])

FORWARD_OUTPUTS = "forward_outputs"
"""Key in a module's ``meta``: the number of returned tensors that are outputs of its forward."""

TAKES = "takes"
"""Key in a module's ``meta``: by name of an input, the shape and the dtype that the graph was traced with."""


def planner_of(checkpoints: Keep) -> GraphPlanner:
    """A :class:`GraphPlanner` that plans a joint graph by ``checkpoints``, which has the forms of ``keep``.

    Raises:
        ArgumentError: ``checkpoints`` has none of these forms.
    """
    with _errors_name_checkpoints():
        return GraphPlanner(checkpoints, None, "roofline", "keep", False, {})


def planned(derivative: Derivative, planner: GraphPlanner, outputs: bool = True) -> fx.GraphModule:
    """A module that takes the inputs as positional arguments, and returns outputs and gradients.

    New values of buffers are copied into them at the end. Without ``outputs``, the gradients are all that it returns.

    Raises:
        ArgumentError: ``checkpoints`` has an unknown name, or selects nothing.
    """
    joint = joint_of(derivative.module, derivative.forward_outputs, planner.cost)
    if not outputs:
        joint = _without_outputs(joint, derivative.outputs)
    with _errors_name_checkpoints():
        graph = emit_one(joint, planner(joint)).graph
    _write_buffers(graph, derivative)
    graph.set_codegen(_Code(_return(graph, derivative, outputs)))
    _renew(graph)
    module = fx.GraphModule(derivative.module, graph, "Adjoint")  # a buffer may be written, and not read
    module.meta[TAKES] = _kinds(graph)
    if outputs:
        module.meta[FORWARD_OUTPUTS] = derivative.outputs
    return module


def _without_outputs(joint: Joint, count: int) -> Joint:
    """Treat the outputs as intermediate values, which are freed after their last use, since they are not returned."""
    none = frozenset[int]()
    storages = [joint.storages.get(node, none) for node in joint.outputs]
    ending = none.union(*storages[:count]).difference(*storages[count:])
    return replace(joint, flow=replace(joint.flow, results=joint.flow.results - ending))


@contextmanager
def _errors_name_checkpoints() -> Iterator[None]:
    """Inside this context, errors about ``keep`` call it ``checkpoints``, the name of the argument here."""
    try:
        yield
    except ArgumentError as error:
        raise ArgumentError(re.sub(r"\bkeep\b", "checkpoints", str(error))) from None


def _write_buffers(graph: fx.Graph, derivative: Derivative) -> None:
    output = graph.output_node()
    values = cast(Sequence[Any], output.args[0])[derivative.outputs : derivative.forward_outputs]
    buffers = {str(node.target): node for node in graph.find_nodes(op="get_attr")}
    with graph.inserting_before(output):
        for name, value in zip(derivative.buffers, values):
            if name not in buffers:
                buffers[name] = graph.create_node("get_attr", name)
                buffers[name].meta["val"] = value.meta["val"]
            copy = graph.call_function(torch.ops.aten.copy_.default, (buffers[name], value))
            copy.meta["val"] = buffers[name].meta["val"]


def _return(graph: fx.Graph, derivative: Derivative, outputs: bool) -> pytree.TreeSpec | None:
    """Set the graph's return value. Return the structure of the outputs if a graph's own code cannot express it."""
    output = graph.output_node()
    returned = cast(Sequence[Any], output.args[0])
    tensors, gradients = returned[: derivative.outputs], tuple(returned[derivative.forward_outputs :])
    if not outputs:
        output.args = (gradients,)
        graph.eliminate_dead_code()
        return None
    if _is_plain(derivative.structure):
        output.args = ((pytree.tree_unflatten(derivative.filled(tensors), derivative.structure), gradients),)
        return None
    output.args = ((*derivative.filled(tensors), *gradients),)
    return derivative.structure


def unrecorded(function: F) -> F:
    """Decorate ``function`` so that autograd records nothing in it, except while a call is traced.

    Autocast is off inside: the traced graph already has its casts. Its sizes are in it, too, so others are refused.
    """
    names = function.__code__.co_varnames[1 : function.__code__.co_argcount]

    @wraps(function)
    def run(*args: Any) -> Any:
        takes = args[0].meta.get(TAKES, {})
        for name, value in zip(names, args[1:]):
            if isinstance(value, Tensor) and name in takes and takes[name] != _kind(value, len(takes[name])):
                _refuse_input(name, value, takes[name])
        if torch.compiler.is_dynamo_compiling():
            with torch.no_grad():
                return function(*args)
        with nullcontext() if local.thread.tracing is not None else torch.no_grad(), without_autocast():
            return function(*args)

    return run  # type: ignore[return-value]


def _kind(tensor: Tensor, length: int) -> tuple[Any, ...]:
    """Shape and dtype; strides too, where ``length`` is 3."""
    return (tuple(tensor.shape), tensor.dtype, tuple(tensor.stride()))[:length]


def _kinds(graph: fx.Graph) -> dict[str, tuple[Any, ...]]:
    """By name of an input, what the graph takes. Strides count where an operation looks past the shape."""
    length = 3 if graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default) else 2
    inputs = {node.name: node.meta["val"] for node in graph.find_nodes(op="placeholder")}
    strided = {name: value for name, value in inputs.items() if value.layout == torch.strided}
    return {name: _kind(value, length) for name, value in strided.items()}


def _refuse_input(name: str, value: Tensor, takes: tuple[Any, ...]) -> None:
    traced, received = (", ".join(map(str, kind)) for kind in (takes, _kind(value, len(takes))))
    rule = f"{name} has another shape or dtype than in the trace: {traced}"
    raise_fault(Fault(rule, received, "graph.gradient(fn, *inputs), once for each kind of inputs"), "gradient()")


class _Code(CodeGen):
    """Generates a graph's code as a function that records nothing for autograd.

    Args:
        structure: the structure of the outputs, if it has more than tuples, lists and dicts; else None.
    """

    def __init__(self, structure: pytree.TreeSpec | None) -> None:
        super().__init__()
        self._structure = structure

    def gen_fn_def(self, *args: Any, **named: Any) -> str:
        return f"@unrecorded\n{super().gen_fn_def(*args, **named)}"

    def generate_output(self, output_args: Any, **named: Any) -> str:
        if self._structure is None:
            return super().generate_output(output_args, **named)
        count = self._structure.num_leaves
        leaves, gradients = list(output_args[:count]), tuple(output_args[count:])
        return f"return structured({leaves!r}), {gradients!r}"

    def additional_globals(self) -> list[tuple[str, Any]]:
        if self._structure is None:
            return [("unrecorded", unrecorded)]
        return [("unrecorded", unrecorded), ("structured", partial(pytree.tree_unflatten, treespec=self._structure))]


def _is_plain(structure: pytree.TreeSpec) -> bool:
    """Whether ``structure`` has only tuples, lists and dicts, which a graph's output may have."""
    if structure.is_leaf():
        return True
    return structure.type in (tuple, list, dict) and all(map(_is_plain, structure.children()))


def _renew(graph: fx.Graph) -> None:
    """Give repeated operations new storages in ``meta["val"]``: a recomputed value is not the same storage."""
    known: set[int] = set()
    copies: dict[fx.Node, dict[int, Tensor]] = {}  # by node: from the original storage to the new one
    for node in graph.nodes:
        value = node.meta.get("val")
        read: dict[int, Tensor] = {}
        originals: set[int] = set()
        for source in node.all_input_nodes:
            read.update(copies.get(source, {}))
            originals.update(map(storage_number, _strided(source.meta.get("val"))))
        parts = {storage_number(part): part for part in _strided(value)}
        repeated = known - originals if node.op == "call_function" else set()
        moved = {key: part for key, part in parts.items() if key in read or key in repeated}
        storages = {key: read[key] if key in read else _fresh(part) for key, part in moved.items()}
        known.update(parts)
        if storages:
            copies[node] = storages
            node.meta["val"] = pytree.tree_map_only(Tensor, partial(_moved, storages), value)


def _strided(value: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in(value) if tensor.layout == torch.strided]


def _fresh(like: Any) -> Tensor:
    """A new fake tensor with as many bytes as the storage of ``like``."""
    with like.fake_mode:
        return torch.empty(like.untyped_storage().nbytes(), dtype=torch.uint8, device=like.device)


def _moved(storages: dict[int, Tensor], value: Any) -> Any:
    """``value`` as a view of the storage that replaces its own, if there is one."""
    storage = storages.get(storage_number(value))
    if storage is None:
        return value
    with value.fake_mode:
        return storage.view(value.dtype).as_strided(value.shape, value.stride(), value.storage_offset())
