"""Subject: what is differentiated: a function or a module, its inputs by their names, its state."""
from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn

from torchckpt.errors import Fault, raise_faults
from torchckpt.graph.left import leaving_no_tensors
from torchckpt.graph.names import named_modules
from torchckpt.graph.notes import Tracing, mark_of
from torchckpt.graph.wrapped import check_bare

__all__ = ["Marks", "Subject", "is_real"]


def is_real(value: object) -> bool:
    """Whether a value can have a gradient that is real."""
    return isinstance(value, Tensor) and value.dtype.is_floating_point


class Marks(Tracing):
    """Knows, of a call that is traced, what each mark was put on.

    Args:
        wanted: names of marks whose gradients are asked for; what they are put on requires one from there on.
    """

    def __init__(self, wanted: Set[str] = frozenset()) -> None:
        super().__init__()
        self.wanted = wanted
        self.found: dict[str, list[Tensor]] = {}
        self._made_by: list[tuple[str, Tensor, Any]] = []  # what autograd knew of each when it was marked

    def mark(self, tensor: Tensor, name: str) -> Tensor:
        is_leaf = name in self.wanted and is_real(tensor) and not tensor.requires_grad
        is_outside = type(tensor) in (Tensor, nn.Parameter)  # closed over: it stays as it is
        if is_leaf and not is_outside:
            tensor.requires_grad_()
        alias = super().mark(tensor, name)
        noted = alias.requires_grad_() if is_leaf and is_outside else tensor
        self.found.setdefault(name, []).append(noted)
        self._made_by.append((name, noted, noted.grad_fn))
        return alias

    def changed(self) -> list[str]:
        """Those among the wanted whose values were written to afterwards: their gradient would be another's."""
        names = [name for name, noted, made_by in self._made_by if noted.grad_fn is not made_by]
        return [name for name in dict.fromkeys(names) if name in self.wanted]

    def forget(self) -> None:
        """What a trace has left."""
        self.found.clear()
        self._made_by.clear()
        super().forget()


class Subject:
    """A function of tensors, ready to be called on others in their place.

    Args:
        caller: what a message starts with.
        function: of positional tensors. Of a module, and of a :class:`torch.fx.GraphModule`, parameters and buffers
            are ``state``.
        example: its inputs.

    Raises:
        ArgumentError: ``function`` is not callable, or an input is no tensor.
    """

    def __init__(self, caller: str, function: Callable[..., Any], example: Sequence[Any]) -> None:
        faults = []
        if not callable(function):
            works = f"graph.{caller[:-1]}fn, x)"
            faults.append(Fault("the first argument is a function or a module", repr(function), works))
        for place, value in enumerate(example):
            if not isinstance(value, Tensor):
                works = "lambda x: fn(x, 3), which closes over what is no tensor"
                if isinstance(value, (tuple, list, dict)):
                    works = "lambda a, b: fn((a, b)), of each tensor for itself"
                faults.append(Fault("inputs are tensors, one after the other", f"input {place}: {value!r}", works))
        raise_faults(caller, faults)
        if isinstance(function, nn.Module):
            check_bare(caller, function)
        self._function = function
        self.inputs: dict[str, Tensor] = dict(zip(_names(function, len(example)), example))
        self.state: dict[str, Tensor] = {}
        if isinstance(function, nn.Module):
            self.state = {**dict(function.named_parameters()), **dict(function.named_buffers())}

    def left_as_it_is(self) -> AbstractContextManager[None]:
        """Trace calls inside: a module holds afterwards what it held before."""
        return leaving_no_tensors(self._function) if isinstance(self._function, nn.Module) else nullcontext()

    def __call__(self, inputs: Sequence[Tensor], state: dict[str, Tensor], marks: Marks) -> Any:
        """Call it on ``inputs``, with ``state`` in place of its own."""
        if not isinstance(self._function, nn.Module):
            return self._function(*inputs)
        with named_modules(self._function):
            if not isinstance(self._function, fx.GraphModule):
                return torch.func.functional_call(self._function, state, tuple(inputs))
            within = {f"module.{name}": tensor for name, tensor in state.items()}
            return torch.func.functional_call(_Interpreted(self._function, marks), within, tuple(inputs))


class _Interpreted(nn.Module):
    """A graph module, run node by node: the notes on its nodes are those of what they run, and names are marks."""

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
    """Of each of ``count`` positional arguments, the name that the function gives it."""
    return [name for name, _ in zip(_argument_names(function), range(count))]


def _argument_names(function: Callable[..., Any]) -> Iterator[str]:
    parameters = _parameters(function.forward if isinstance(function, nn.Module) else function)
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            yield name
    rest = next((name for name, one in parameters.items() if one.kind is one.VAR_POSITIONAL), "input")
    yield from (f"{rest}_{place}" for place in range(10**9))


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a function of C
        return {}
