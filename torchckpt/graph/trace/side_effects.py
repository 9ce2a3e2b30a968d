"""Side effects: restore the attributes that a traced forward changed on its modules."""
from __future__ import annotations

import collections
import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from torchckpt.errors import CaptureError, Fault
from torchckpt.graph.trace.guard import CONSTANTS, is_container
from torchckpt.modules import OF_EVERY_MODULE
from torchckpt.tensors import tensors_in

__all__ = ["restoring_modules"]


@contextmanager
def restoring_modules(model: nn.Module) -> Iterator[None]:
    """Trace a forward of ``model`` inside this context; remove the tensors without data that it stores on modules.

    Two cases are no error. Recurrent layers have a list of their parameters, in which
    ``torch.func.functional_call`` leaves those of the trace. The old weight norm and spectral norm make the weight from
    parameters, again at each call.

    Raises:
        CaptureError: the forward stored any other tensor, or made a parameter, a buffer or a module.
    """
    tensors = _tensors_of(model)
    owned = [(module, {kind: dict(getattr(module, kind)) for kind in _OWN}) for module in model.modules()]
    try:
        yield
    except Exception as error:
        left = _put_back(model, tensors, owned)
        if left is None or isinstance(error, CaptureError):
            raise
        raise CaptureError(str(left)) from error
    left = _put_back(model, tensors, owned)
    if left is not None:
        raise CaptureError(str(left))


_OWN = ("_parameters", "_buffers", "_modules")
_Tensors = dict[tuple[str, str], tuple[Any, tuple[Tensor, ...]]]


def _put_back(model: nn.Module, tensors: _Tensors, owned: Sequence[tuple[nn.Module, dict[str, Any]]]) -> Fault | None:
    """Restore the modules. Return the fault of a forward that did what it must not do, or None."""
    left = None
    for module, kinds in owned:
        for kind, before in kinds.items():
            now = getattr(module, kind)
            new = [name for name, value in now.items() if before.get(name) is None and value is not None]
            if any(now.get(name) is not value for name, value in before.items()) or len(now) != len(before):
                now.clear()
                now.update(before)
            if new:
                rule = "the forward makes a parameter, buffer or module, which has to exist before the trace"
                works = "make it in __init__(); or model(*inputs), once, before rematerialize()"
                left = Fault(rule, f"the forward of {type(module).__name__} makes {new[0]}", works)
    return left or _taken_back(model, tensors)


def _taken_back(model: nn.Module, before: _Tensors) -> Fault | None:
    left = None
    for (place, name), (_, tensors) in _tensors_of(model).items():
        module, (value, known) = model.get_submodule(place), before.get((place, name), (None, ()))
        if {id(tensor) for tensor in tensors} <= {id(tensor) for tensor in known}:
            continue
        is_made_of_parameters = any(parameter.startswith(f"{name}_") for parameter in module._parameters)
        if not (is_made_of_parameters or (known and all(isinstance(tensor, nn.Parameter) for tensor in known))):
            rule = "the forward stores a tensor on a module, and does not return it"
            received = f"after the forward, {name} of {type(module).__name__} {place!r} holds one".replace(" ''", "")
            left = left or Fault(rule, received, f"return output, {name}")
        del module.__dict__[name]
        module.__dict__.update({name: value} if (place, name) in before else {})
    return left


def _tensors_of(model: nn.Module) -> _Tensors:
    """Each value, and the tensors in it, by module and attribute. Parameters and buffers are left out."""
    return {
        (place, name): (copy.copy(value) if _is_copied(value) else value, tuple(tensors_in(_parts(value))))
        for place, module in model.named_modules()
        for name, value in module.__dict__.items()
        if name not in OF_EVERY_MODULE and not isinstance(value, (*CONSTANTS, nn.Module))
    }


def _is_copied(value: Any) -> bool:
    return isinstance(value, collections.deque) or (isinstance(value, (list, dict, set)) and is_container(type(value)))


def _parts(value: Any) -> Any:
    """The part of ``value`` that is searched for tensors: a container itself, at any depth; of another object, its
    attributes."""
    if isinstance(value, (set, frozenset, collections.deque)):
        return list(value)
    return value if isinstance(value, (Tensor, list, tuple, dict)) else list(getattr(value, "__dict__", {}).values())
