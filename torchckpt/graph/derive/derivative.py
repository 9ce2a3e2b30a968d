"""Derivative: a call and its gradients, traced as one functional graph."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from torchckpt.errors import CaptureError, Fault
from torchckpt.features import GRAPH
from torchckpt.graph.derive.primal import Marks, Primal
from torchckpt.graph.private.functional import Functional, backward_of, functional
from torchckpt.graph.private.surroundings import without_autocast
from torchckpt.graph.private.trace import require
from torchckpt.graph.progress import Watch
from torchckpt.graph.trace.capture import explained

__all__ = ["Ask", "Derivative", "Traced", "derivative_of", "gradients_of"]


@dataclass(frozen=True)
class Traced:
    """A call that is being traced, after its forward and before its gradients.

    Args:
        leaves: leaves of the returned value; a leaf that is not a tensor is a constant.
        inputs, state, marked: tensors by name; several tensors may have the same mark.
        more: see :func:`derivative_of`.
    """

    leaves: Sequence[Any]
    inputs: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    marked: Mapping[str, Sequence[Tensor]]
    more: Sequence[Tensor]


Ask = Callable[[Traced], Sequence["Tensor | None"]]
"""Computes the gradients of a call that is being traced."""


@dataclass(frozen=True)
class Derivative:
    """A functional graph that takes the inputs and then ``more``; the primal's state becomes its attributes.

    It returns the tensors among the call's outputs, new values of ``buffers``, and the gradients.
    """

    module: fx.GraphModule
    buffers: tuple[str, ...]
    outputs: int
    leaves: list[Any] = field(repr=False)
    structure: pytree.TreeSpec = field(repr=False)

    @property
    def forward_outputs(self) -> int:
        return self.outputs + len(self.buffers)

    def structured(self, tensors: Sequence[Any]) -> Any:
        """``tensors`` in the structure of the call's return value."""
        return pytree.tree_unflatten(self.filled(tensors), self.structure)

    def filled(self, tensors: Sequence[Any]) -> list[Any]:
        """The leaves of the call's return value: ``tensors`` and constants, in order."""
        following = iter(tensors)
        return [next(following) if leaf is Tensor else leaf for leaf in self.leaves]


def derivative_of(
    primal: Primal, required: Set[str], marks: Marks, ask: Ask, more: Sequence[Tensor] = ()
) -> Derivative:
    """Trace a call of ``primal`` on its inputs, then ``ask`` for gradients.

    Args:
        required: names of inputs and state that require a gradient, beside tensors with ``requires_grad=True``.
        marks: the tracing context, which records marked tensors.
        more: tensors for ``ask``: inputs of the graph, but not arguments of the call.

    Raises:
        CaptureError: the call depends on the values of its tensors, changes its inputs, or has no derivative.
    """
    require(GRAPH)
    names = [*primal.state, *primal.inputs]
    returned: list[Any] = []

    def run(*tensors: Tensor) -> list[Tensor | None]:
        state = dict(zip(primal.state, tensors))
        inputs = dict(zip(primal.inputs, tensors[len(state) :]))
        marks.forget()
        with marks:
            leaves, structure = pytree.tree_flatten(primal(list(inputs.values()), state, marks))
            leaves = [marks.unmarked(leaf) for leaf in leaves]
        returned[:] = leaves, structure
        gradients = ask(Traced(leaves, inputs, state, marks.found, tensors[len(names) :]))
        return [*(leaf for leaf in leaves if isinstance(leaf, Tensor)), *gradients]

    known = {**primal.state, **primal.inputs}
    tensors = [*known.values(), *more]
    requires_grad = [tensor.requires_grad or name in required for name, tensor in known.items()]
    with explained(), primal.left_as_it_is(), Watch().tracing(primal.name) as tell:
        traced = functional(run, tensors, [*requires_grad, *(False for _ in more)], tell)
    constants, structure = [Tensor if isinstance(leaf, Tensor) else leaf for leaf in returned[0]], returned[1]
    returned.clear()
    marks.forget()
    traced.witness.refuse_left()
    _refuse_mutated(names, primal, traced)
    buffers = tuple(names[place] for place in traced.mutated)
    outputs = constants.count(Tensor)
    return Derivative(_lifted(traced.module, primal, outputs, len(buffers)), buffers, outputs, constants, structure)


def gradients_of(
    outputs: Sequence[Tensor], arriving: Sequence[Tensor], tensors: Sequence[Tensor]
) -> list[Tensor | None]:
    """Gradients of ``tensors``, given the gradients ``arriving`` of ``outputs``; None for a tensor without a path."""
    pairs = [(output, gradient) for output, gradient in zip(outputs, arriving) if output.requires_grad]
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    if not pairs or not wanted:
        return [None] * len(tensors)
    roots, starts = zip(*pairs)
    with backward_of(roots), without_autocast():  # as in a backward after the autocast context
        made = iter(torch.autograd.grad(roots, wanted, starts, allow_unused=True))
    return [next(made) if tensor.requires_grad else None for tensor in tensors]


def _refuse_mutated(names: Sequence[str], primal: Primal, traced: Functional) -> None:
    changed = [names[place] for place in traced.mutated if names[place] in primal.inputs]
    if changed:
        raise CaptureError(str(Fault(
            "the call changes an input in place, so it cannot be differentiated", f"{changed[0]} is changed in place",
            "x = x + 1 in place of x.add_(1); or x = x.clone() first",
        )))


def _lifted(module: fx.GraphModule, primal: Primal, outputs: int, buffers: int) -> fx.GraphModule:
    """``module`` with the state as attributes, named inputs, and new values of buffers right after the outputs."""
    graph, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
    attributes: dict[str, Any] = dict(primal.state)
    places = iter([*primal.state, *primal.inputs])
    for node in module.graph.nodes:
        if node.op == "placeholder":
            name = next(places, node.name)
            nodes[node] = graph.get_attr(name) if name in primal.state else graph.placeholder(name)
            nodes[node].meta = dict(node.meta)
        elif _is_save(node):
            nodes[node] = nodes[node.all_input_nodes[0]]
        elif node.op == "output":
            returned = fx.node.map_arg(node.args[0], nodes.__getitem__)
            last = len(returned) - buffers
            graph.output((*returned[:outputs], *returned[last:], *returned[outputs:last]))
        else:
            nodes[node] = graph.node_copy(node, nodes.__getitem__)
            if node.op == "get_attr":
                attributes[str(node.target)] = getattr(module, str(node.target))
    used = {str(node.target) for node in graph.find_nodes(op="get_attr")}
    return fx.GraphModule({name: value for name, value in attributes.items() if name in used}, graph)


def _is_save(node: fx.Node) -> bool:
    """Whether ``node`` is a ``detach`` with which autograd saves an output for the backward, or unpacks it there."""
    if node.target is not torch.ops.aten.detach.default:
        return False
    if not _is_backward(node):
        return all(map(_is_backward, node.users))
    return isinstance(node.args[0], fx.Node) and not _is_backward(node.args[0]) and _is_save(node.args[0])


def _is_backward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward"
