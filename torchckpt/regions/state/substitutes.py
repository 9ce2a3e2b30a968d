"""Substitutes: while a replay runs, modules hold what its forward found on them; then again what is there now."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from torchckpt.errors import RecomputationError
from torchckpt.modules import name_of
from torchckpt.regions.flags import state_lock
from torchckpt.regions.state.layout import Layout
from torchckpt.tensors import graded_as
from torchckpt.typing import Function

__all__ = [
    "NOTHING", "Late", "Substitutes", "changed_in_place", "changed_late", "exclusive", "lock_state", "put",
    "substituted",
]

_LOCK_TIMEOUT_SECONDS = 300

NOTHING: Any = object()
"""In place of a value: there is none."""


class Substitutes(NamedTuple):
    """What a replay finds on modules in place of what is there now."""

    values: list[tuple[dict[str, Any], str, Any]]
    """Tuples (dictionary, name, value): the value that the replay finds there. ``NOTHING`` removes the name."""
    changed: dict[int, Tensor]
    """By ``id()``: the tensors that the replay must not read, because they were changed in place."""
    late: dict[int, Late]
    """By ``id()``: the substitutes for parameters that a forward has changed for the first time. Nobody has a copy."""
    graded: list[tuple[Tensor, bool]]
    """Parameters that required grad in the forward and do not now, or the other way, and whether they did."""
    layout: Layout
    """It finds the path of a tensor for an error, which takes long."""


class Late:
    """A parameter as the forward left it. A replay may use it if it first writes the values that it has now."""

    def __init__(self, parameter: Tensor, path: str) -> None:
        self.parameter, self.path, self.is_changed = parameter, path, False

    def allows(self, substitute: Tensor, version: int) -> bool:
        """Whether a replay may call what it called on ``substitute``, which was at ``version``."""
        if substitute._version == version:
            return self.is_changed
        self.is_changed = True
        return torch.equal(substitute, self.parameter)


def lock_state(function: Function, run: str) -> None:
    """Take ``state_lock`` for one ``run`` of ``function``, the forward or a replay."""
    if not state_lock.acquire(timeout=_LOCK_TIMEOUT_SECONDS):
        raise RecomputationError(
            f"the {run} of region {name_of(function)} needs buffers, a generator, or a default dtype or stance of "
            f"torch.compiler that another thread uses otherwise, and has not left for {_LOCK_TIMEOUT_SECONDS} seconds; "
            f"it may be waiting for this {'backward' if run == 'replay' else run}\n"
            "  works:    no backward, and no wait for a thread that runs regions, inside a region with spectral_norm"
        )


@contextmanager
def exclusive(function: Function) -> Iterator[None]:
    """Hold ``state_lock`` for the replay of ``function``."""
    lock_state(function, "replay")
    try:
        yield
    finally:
        state_lock.release()


@contextmanager
def substituted(substitutes: Substitutes, function: Function) -> Iterator[None]:
    """Inside the block, modules hold the substitutes, and reading a tensor that was changed in place raises."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    with exclusive(function), graded_as(substitutes.graded):
        try:
            before += [(dictionary, name, dictionary.get(name, NOTHING)) for dictionary, name, _ in substitutes.values]
            put(substitutes.values)
            with _ForbidReads(substitutes, function) if substitutes.changed or substitutes.late else nullcontext():
                yield
        finally:
            put(before)


def put(values: Sequence[tuple[dict[str, Any], str, Any]]) -> None:
    """Put values there; ``NOTHING`` removes the name."""
    for dictionary, name, value in values:
        if value is NOTHING:
            dictionary.pop(name, None)
        else:
            dictionary[name] = value


_GRADIENT: Any = getattr(Tensor, "grad").__get__  # noqa: B009  # a descriptor, unknown to torch's stubs


class _ForbidReads(TorchFunctionMode):
    """Raises when a function of torch gets a tensor that was changed in place since the forward."""

    def __init__(self, substitutes: Substitutes, function: Function) -> None:
        super().__init__()
        self._found, self._function = substitutes, function

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        changed = [leaf for leaf in leaves if id(leaf) in self._found.changed]
        late = [(leaf, leaf._version) for leaf in leaves if id(leaf) in self._found.late]
        is_look = bool(changed or late) and getattr(func, "__name__", "") == "__get__"
        result = func(*args, **(kwargs or {})) if is_look or not changed else None
        # Reading a shape or a gradient does not read the values; reading a view does.
        if is_look and (func == _GRADIENT or not isinstance(result, Tensor)):
            return result
        if changed:
            raise changed_in_place(self._function, changed[0], self._found.layout.path_of(changed[0]))
        for leaf, version in late:
            if not self._found.late[id(leaf)].allows(leaf, version):
                raise changed_late(self._function, self._found.late[id(leaf)])
        return result


def changed_in_place(function: Function, tensor: Tensor, path: str) -> RecomputationError:
    """The error for a replay that reads ``tensor``, which is no longer what it was in the forward."""
    return RecomputationError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: the replay of "
        f"region {name_of(function)} reads {path}, [{tensor.type()} {list(tensor.shape)}], which was changed in place "
        "after the forward\n"
        "  works:    optimizer.step(), or another change of weights and buffers, after the backward"
    )


def changed_late(function: Function, late: Late) -> RecomputationError:
    return RecomputationError(
        f"the forward of region {name_of(function)} changed {late.path} in place, for the first time, after it had "
        "read it, or so that it changes again in a replay, which cannot find its old values\n"
        "  works:    the change before the region; or the step once more, since later forwards keep the old values"
    )
