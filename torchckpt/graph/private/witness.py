"""Witness: it sees what a forward makes while it is traced, and knows afterwards what of it is still there."""
from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from torchckpt.errors import CaptureError, Fault
from torchckpt.graph.private.operating import operating

__all__ = ["Witness"]


_NO_HOLDERS = (types.FrameType, types.GeneratorType, Tensor)


class Witness:
    """Remembers each tensor that is made inside :meth:`watching`, and keeps none of them."""

    def __init__(self) -> None:
        self._seen: list[tuple[weakref.ref[Tensor], str]] = []

    def watching(self, given: Iterable[Tensor]) -> AbstractContextManager[Any]:
        """``given`` are the tensors that the forward gets."""
        def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            made = operator(*args, **kwargs)
            self._saw(made, f"a result of {operator}")
            return made

        self._saw(list(given), "an input, a parameter or a buffer")
        return operating(run)

    def refuse_left(self) -> None:
        """Raise a CaptureError where a tensor is still there: nobody may have it, for it has no data."""
        if any(True for _ in self._left()):
            gc.collect()  # a cycle may hold it
        for tensor, what in self._left():
            holders = [type(one).__name__ for one in _holders(tensor)]
            if holders:
                rule = "a call that is traced returns what it makes, and leaves no tensor anywhere else"
                received = f"{what}, of shape {tuple(tensor.shape)}, in a {holders[0]} that outlives the call"
                works = "return output, tensor; or copy_() it into a buffer of the module"
                raise CaptureError(str(Fault(rule, received, works)))
        self._seen.clear()

    def _saw(self, made: Any, what: str) -> None:
        self._seen.extend((weakref.ref(one), what) for one in pytree.tree_leaves(made) if isinstance(one, Tensor))

    def _left(self) -> Iterator[tuple[Tensor, str]]:
        for one, what in self._seen:
            tensor = one()
            if tensor is not None:
                yield tensor, what


def _holders(tensor: Tensor) -> list[Any]:
    """What holds it; not a tuple that no object holds: that is a call's of torch's own, which no code can reach."""
    found = [one for one in gc.get_referrers(tensor) if not isinstance(one, _NO_HOLDERS)]
    return [one for one in found if type(one) is not tuple or _is_held(one, found)]


def _is_held(holder: Any, beside: list[Any]) -> bool:
    return any(one is not beside and not isinstance(one, _NO_HOLDERS) for one in gc.get_referrers(holder))
