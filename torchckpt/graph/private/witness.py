"""Witness: records the tensors that a traced forward makes, and finds those that outlive the trace."""
from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torchckpt.errors import CaptureError, Fault
from torchckpt.graph.private.generators import Generators
from torchckpt.graph.private.operators import operating
from torchckpt.graph.private.surroundings import casting_once
from torchckpt.tensors import tensors_in

__all__ = ["Witness"]

_NO_HOLDERS = (types.FrameType, types.GeneratorType, Tensor)


class Witness:
    """Runs a forward as its trace needs it, and records, by weak reference, each tensor that it makes.

    Args:
        tensors: the tensors that the forward is traced for. Autocast casts each leaf among them once, as in eager.
        tell: called with each operator of the forward.
    """

    def __init__(self, tensors: Sequence[Tensor], tell: Callable[[Any], None] = lambda operator: None) -> None:
        self._are_leaves = [tensor.is_leaf for tensor in tensors]
        self._casts_are_kept = torch.is_autocast_cache_enabled()
        self._seen: list[tuple[weakref.ref[Tensor], str]] = []
        self._generators, self._tell = Generators(), tell

    @contextmanager
    def watching(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Run a forward on ``tensors``, those of its trace, inside this context. They are recorded, too.

        Raises:
            CaptureError: the forward drew random numbers that a trace would freeze.
        """
        def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self._tell(operator)
            self._generators.drawn(operator)
            results = operator(*args, **kwargs)
            self._saw(results, f"a result of {operator}")
            return results

        self._saw(list(tensors), "an input, a parameter or a buffer")
        casting = casting_once(tensors, self._are_leaves, self._casts_are_kept)
        with casting, self._generators.watching(), operating(run):
            yield

    def refuse_left(self) -> None:
        """Raise a CaptureError if an object still holds a recorded tensor. Such a tensor has no data to use."""
        if any(True for _ in self._left()):
            gc.collect()  # a reference cycle may hold it
        for tensor, what in self._left():
            holders = [type(one).__name__ for one in _holders(tensor)]
            if holders:
                rule = "the call leaves a tensor somewhere, and does not return it"
                received = f"{what}, of shape {tuple(tensor.shape)}, in a {holders[0]} that outlives the call"
                works = "return output, tensor; or copy_() it into a buffer of the module"
                raise CaptureError(str(Fault(rule, received, works)))
        self._seen.clear()

    def _saw(self, values: Any, what: str) -> None:
        self._seen.extend((weakref.ref(tensor), what) for tensor in tensors_in(values))

    def _left(self) -> Iterator[tuple[Tensor, str]]:
        for one, what in self._seen:
            tensor = one()
            if tensor is not None:
                yield tensor, what


def _holders(tensor: Tensor) -> list[Any]:
    """The objects that hold ``tensor``. A tuple that nothing holds is left out: it belongs to a call inside torch."""
    found = [one for one in gc.get_referrers(tensor) if not isinstance(one, _NO_HOLDERS)]
    return [one for one in found if type(one) is not tuple or _is_held(one, found)]


def _is_held(holder: Any, beside: list[Any]) -> bool:
    return any(one is not beside and not isinstance(one, _NO_HOLDERS) for one in gc.get_referrers(holder))
