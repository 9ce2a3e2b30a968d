"""Primal: the function or module that is differentiated, its named inputs, and its parameters and buffers."""
from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn

from torchckpt.errors import Fault, brief, check
from torchckpt.graph.annotate.annotations import Tracing, mark_of, named_modules
from torchckpt.graph.trace.reason import check_bare
from torchckpt.graph.trace.side_effects import restoring_modules

__all__ = ["Marks", "Primal", "is_real"]


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
        self.found: dict[str, list[Tensor]] = {}
        self._made_by: list[tuple[str, Tensor, Any]] = []  # name, tensor, and its grad_fn when marked

    def mark(self, tensor: Tensor, name: str) -> Tensor:
        is_leaf = name in self.wanted and is_real(tensor) and not tensor.requires_grad
        is_outside = type(tensor) in (Tensor, nn.Parameter)  # a tensor that the function closes over is not changed
        if is_leaf and not is_outside:
            tensor.requires_grad_()
        alias = super().mark(tensor, name)
        noted = alias.requires_grad_() if is_leaf and is_outside else tensor
        self.found.setdefault(name, []).append(noted)
        self._made_by.append((name, noted, noted.grad_fn))
        return alias

    def changed(self) -> list[str]:
        """The wanted marks whose tensors were changed in place after the mark: their gradients would be wrong."""
        names = [name for name, noted, made_by in self._made_by if noted.grad_fn is not made_by]
        return [name for name in dict.fromkeys(names) if name in self.wanted]

    def forget(self) -> None:
        """Drop the tensors of the last trace."""
        self.found.clear()
        self._made_by.clear()
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
            wrong = "the first argument is neither a function nor a module"
            faults.append(Fault(wrong, brief(function), "graph.gradient(fn, x)"))
        for place, value in enumerate(example):
            if not isinstance(value, Tensor):
                works = "lambda x: fn(x, 3), which closes over the value that is not a tensor"
                if isinstance(value, (tuple, list, dict)):
                    works = "lambda a, b: fn((a, b)), with each tensor as an input of its own"
                faults.append(Fault("an input is not a tensor", f"input {place}: {brief(value)}", works))
        check(faults)
        if isinstance(function, nn.Module):
            check_bare(function)
        self._function = function
        self.inputs: dict[str, Tensor] = dict(zip(_names(function, len(example)), example))
        self.state: dict[str, Tensor] = {}
        if isinstance(function, nn.Module):
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
                return torch.func.functional_call(self._function, state, tuple(inputs))
            within = {f"module.{name}": tensor for name, tensor in state.items()}
            return torch.func.functional_call(_Interpreted(self._function, marks), within, tuple(inputs))


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
    names = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    rest = next((one.name for one in parameters if one.kind is one.VAR_POSITIONAL), "input")
    return [*names, *(f"{rest}_{place}" for place in range(count))][:count]
