"""Derivative: a function or module of tensors, and a call of it with its gradients, traced as one functional graph."""
from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from torchckpt.errors import CaptureError, Fault, brief, check
from torchckpt.features import GRAPH
from torchckpt.graph.annotations import Tracing, mark_of, named_modules
from torchckpt.graph.private.runtime import call_with, is_backward
from torchckpt.graph.private.surroundings import without_autocast
from torchckpt.graph.private.trace import backward_of, functional, require
from torchckpt.graph.progress import Watch
from torchckpt.graph.trace.capture import explained, restoring_modules
from torchckpt.graph.trace.reason import check_bare

__all__ = ["Ask", "Derivative", "Marks", "Primal", "derivative_of", "gradients_of", "is_real"]

Ask = Callable[[list[Any], dict[str, Tensor], Sequence[Tensor]], Sequence["Tensor | None"]]
"""``ask(leaves, tensors, more)`` computes the gradients of a call that is being traced, after its forward. It takes the
leaves of the return value, of which some may be constants; inputs and state by name; and further tensors."""


def is_real(value: object) -> bool:
    """Whether ``value`` is a tensor with a real floating dtype, which can have a real gradient."""
    return isinstance(value, Tensor) and value.dtype.is_floating_point


class Marks(Tracing):
    """Records, while a call is traced, which tensors each mark was put on.

    Args:
        wanted: names of marks whose gradients are asked for. A tensor with such a mark requires a gradient from there.
    """

    def __init__(self, wanted: Set[str] = frozenset()) -> None:
        super().__init__()
        self.wanted = wanted
        self.tensors: dict[str, list[Tensor]] = {}
        """By name of a mark, the tensors that it was put on."""
        self._makers: list[tuple[str, Tensor, Any]] = []  # name, tensor, and its grad_fn when marked

    def mark(self, tensor: Tensor, name: str) -> Tensor:
        is_leaf = name in self.wanted and is_real(tensor) and not tensor.requires_grad
        is_outside = type(tensor) in (Tensor, nn.Parameter)  # a tensor that the function closes over is not changed
        if is_leaf and not is_outside:
            tensor.requires_grad_()
        alias = super().mark(tensor, name)
        noted = alias.requires_grad_() if is_leaf and is_outside else tensor
        self.tensors.setdefault(name, []).append(noted)
        self._makers.append((name, noted, noted.grad_fn))
        return alias

    def changed(self) -> list[str]:
        """The wanted marks whose tensors were changed in place after the mark: their gradients would be wrong."""
        names = [name for name, noted, maker in self._makers if noted.grad_fn is not maker]
        return [name for name in dict.fromkeys(names) if name in self.wanted]

    def forget(self) -> None:
        """Drop the tensors of the last trace."""
        self.tensors.clear()
        self._makers.clear()
        super().forget()


class Primal:
    """A function or module of tensors, which can be called with other inputs and state in place of its own.

    Args:
        function: takes positional tensors. The parameters and buffers of a module, or of a
            :class:`torch.fx.GraphModule`, are ``state``.
        example: its inputs.

    Raises:
        ArgumentError: ``function`` is not callable, or an input is not a tensor.
    """

    def __init__(self, function: Callable[..., Any], example: Sequence[Any]) -> None:
        faults = []
        if not callable(function):
            rule = "the first argument is neither a function nor a module"
            faults.append(Fault(rule, brief(function), "graph.gradient(fn, x)"))
        for place, value in enumerate(example):
            if not isinstance(value, Tensor):
                works = "lambda x: fn(x, 3), which closes over the value that is not a tensor"
                if isinstance(value, (tuple, list, dict)):
                    works = "lambda a, b: fn((a, b)), with each tensor as an input of its own"
                faults.append(Fault("an input is not a tensor", f"input {place}: {brief(value)}", works))
        check(faults)
        self._function = function
        self.inputs: dict[str, Tensor] = dict(zip(_names(function, len(example)), example))
        self.state: dict[str, Tensor] = {}
        if isinstance(function, nn.Module):
            check_bare(function)
            self.state = {**dict(function.named_parameters()), **dict(function.named_buffers())}

    @property
    def name(self) -> str:
        return getattr(self._function, "__name__", type(self._function).__name__)

    def left_as_it_is(self) -> AbstractContextManager[None]:
        """Trace calls inside this context: at its end, a module's attributes are as they were before."""
        return restoring_modules(self._function) if isinstance(self._function, nn.Module) else nullcontext()

    def __call__(self, inputs: Sequence[Tensor], state: dict[str, Tensor], marks: Marks) -> Any:
        """Call the function on ``inputs``, with ``state`` in place of its parameters and buffers."""
        if not isinstance(self._function, nn.Module):
            return self._function(*inputs)
        with named_modules(self._function):
            if not isinstance(self._function, fx.GraphModule):
                return call_with(self._function, state, tuple(inputs))
            within = {f"module.{name}": tensor for name, tensor in state.items()}
            return call_with(_Interpreted(self._function, marks), within, tuple(inputs))


class _Interpreted(nn.Module):
    """A graph module that runs node by node: the trace gets the notes of each node, and a node's name is a mark."""

    def __init__(self, module: fx.GraphModule, marks: Marks) -> None:
        super().__init__()
        self.module, self._marks = module, marks

    def forward(self, *inputs: Tensor) -> Any:
        return _Interpreter(self.module, self._marks).run(*inputs)


class _Interpreter(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, marks: Marks) -> None:
        super().__init__(module)
        self._marks = marks

    def run_node(self, node: fx.Node) -> Any:
        result = super().run_node(node)
        for name in {node.name, mark_of(node) or node.name}:
            if isinstance(result, Tensor) and node.op != "placeholder" and name in self._marks.wanted:
                result = self._marks.mark(result, name)
        return result


def _names(function: Callable[..., Any], count: int) -> list[str]:
    """The function's own names of its first ``count`` positional arguments."""
    try:
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):  # a function written in C
        signature = inspect.Signature()
    parameters = signature.parameters.values()
    names = [part.name for part in parameters if part.kind in (part.POSITIONAL_ONLY, part.POSITIONAL_OR_KEYWORD)]
    rest = next((part.name for part in parameters if part.kind is part.VAR_POSITIONAL), "input")
    return [*names, *(f"{rest}_{place}" for place in range(count))][:count]


# the graph ------------------------------------------------------------------------------------------------------------


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
        gradients = ask(leaves, {**state, **inputs}, tensors[len(names) :])
        return [*(leaf for leaf in leaves if isinstance(leaf, Tensor)), *gradients]

    known = {**primal.state, **primal.inputs}
    tensors = [*known.values(), *more]
    requires_grad = [tensor.requires_grad or name in required for name, tensor in known.items()]
    with explained(), primal.left_as_it_is(), Watch().tracing(primal.name) as tell:
        module, mutated, witness = functional(run, tensors, [*requires_grad, *(False for _ in more)], tell)
    constants, structure = [Tensor if isinstance(leaf, Tensor) else leaf for leaf in returned[0]], returned[1]
    returned.clear()
    marks.forget()
    witness.refuse_left()
    buffers = tuple(names[place] for place in mutated)
    changed = [name for name in buffers if name in primal.inputs]
    if changed:
        raise CaptureError(str(Fault(
            "the call changes an input in place, so it cannot be differentiated", f"{changed[0]} is changed in place",
            "x = x + 1 in place of x.add_(1); or x = x.clone() first",
        )))
    outputs = constants.count(Tensor)
    return Derivative(_lifted(module, primal, outputs, len(buffers)), buffers, outputs, constants, structure)


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
        gradients = iter(torch.autograd.grad(roots, wanted, starts, allow_unused=True))
    return [next(gradients) if tensor.requires_grad else None for tensor in tensors]


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
    if not is_backward(node):
        return all(map(is_backward, node.users))
    return isinstance(node.args[0], fx.Node) and not is_backward(node.args[0]) and _is_save(node.args[0])
