"""In place: handles layers that change the inputs of their stage in place.

A layer may do so, such as ``ReLU(inplace=True)`` as the first layer of a stage. But a replay must start from the same
input as the forward, and the input of the first stage belongs to the caller. So the stage works on a copy of that
input, made inside the region. The first run of a stage copies all its inputs, and notes which of them it changes.

If an input shares memory with another tensor that crosses a cut, a copy would give other results than the plain layers.
Changing such an input is an error in the forward.
"""
from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from torch import Tensor

from torchckpt.errors import Fault, called, raise_fault
from torchckpt.regions.private import storage_key
from torchckpt.tensors import tensors_of_pair

__all__ = ["ChangedInputs", "Memory", "StageInputs"]


@dataclass
class ChangedInputs:
    """The inputs that a stage changes in place, as indices into the tensors that it gets."""

    changed: frozenset[int] | None = None
    """None until the stage has run once."""
    now: set[int] = field(default_factory=set)
    """The changes seen so far in the first run."""


class StageInputs:
    """The tensors that a stage gets for one micro-batch, in its forward and in its replays.

    Args:
        stage: its name in errors.
        known: shared by all micro-batches, updated in the forward. None: the stage works on its inputs, without copies.
        shared: the indices of inputs that share memory with other tensors that cross a cut.
    """

    def __init__(self, stage: str, known: ChangedInputs | None, shared: Collection[int]) -> None:
        self._stage, self._known, self._shared = stage, known, shared
        self._copied = frozenset() if known is None else known.changed  # None: copy all
        self._watched: list[tuple[int, Tensor, int]] = []  # in the forward: inputs not changed yet
        self.tensors: Sequence[Tensor] = ()
        """While the layers run: the tensors that they get, each once."""

    def arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], is_forward: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments for the layers: ``args`` and ``kwargs``, with copies of the tensors that the stage changes."""
        tensors, put_back = tensors_of_pair((args, kwargs))
        places = range(len(tensors)) if self._copied is None else self._copied.intersection(range(len(tensors)))
        # A leaf that requires grad cannot be changed in place.
        copied = {place for place in places if not (tensors[place].requires_grad and tensors[place].is_leaf)}
        if copied:
            tensors = tuple(tensor.clone() if n in copied else tensor for n, tensor in enumerate(tensors))
            args, kwargs = put_back(tensors)
        self.tensors = tensors
        if is_forward:
            self._watched = [(n, x, x._version) for n, x in enumerate(tensors) if not x.is_inference()]
        return args, kwargs

    def after(self, layer: object) -> None:
        """Call it in the forward after each ``layer``: notes which inputs the layer changed, or raises."""
        for _, tensor, version in self._watched:
            if tensor._version != version:
                self._changed(layer)
                return

    def _changed(self, layer: object) -> None:
        for place, tensor, version in list(self._watched):
            if tensor._version == version:
                continue
            self._watched = [entry for entry in self._watched if entry[0] != place]
            if place in self._shared:
                self._refuse(place, layer, "it shares memory with another tensor or with a skip")
            if self._known is not None:
                self._known.now.add(place)
                if self._copied is not None and place not in self._copied:
                    self._known.changed = self._copied | {place}
                    self._refuse(place, layer, "the first run of the stage did not change it")

    def learn(self) -> None:
        """Call it after the last layer of the forward: the changes are now known."""
        if self._known is not None and self._copied is None:
            self._known.changed = frozenset(self._known.now)

    def end(self) -> None:
        """Call it after each run, even if the run raised."""
        self._watched, self.tensors = [], ()

    def _refuse(self, place: int, layer: object, why: str) -> NoReturn:
        rule = "a stage changes an input in place that something else may read"
        received = f"tensor {place} of {self._stage}, changed by {layer}: {why}"
        works = "the operation out of place, such as ReLU(inplace=False) or x = x + 1"
        with called("Pipe"):
            raise_fault(Fault(rule, received, works))


def shared_places(leaving: Sequence[Tensor], others: Iterable[Tensor] = ()) -> frozenset[int]:
    """The indices of the tensors in ``leaving`` that share memory with each other or with ``others``."""
    homes: dict[int | None, list[int]] = {}
    for place, tensor in [*enumerate(leaving), *((-1, other) for other in others)]:
        homes.setdefault(storage_key(tensor), []).append(place)
    homes.pop(None, None)
    return frozenset(place for places in homes.values() if len(places) > 1 for place in places if place >= 0)


_NONE: frozenset[int] = frozenset()


class Memory(NamedTuple):
    """What is known of the memory of the tensors that go from one stage to the next, as indices of these tensors."""

    shared: frozenset[int] = _NONE
    """Tensors that share memory with others that cross a cut, or with skips."""
    kept: frozenset[int] = _NONE
    """Tensors in the memory of the caller's tensors, or of inputs that an earlier region still needs for its replay."""

    @classmethod
    def of_caller(cls, tensors: Sequence[Tensor]) -> Memory:
        shared = shared_places(tensors) if len(tensors) > 1 else _NONE
        return cls(shared, frozenset(range(len(tensors))))

    def on_leaving(
        self, leaving: Sequence[Tensor], in_flight: Sequence[Tensor], arrived: Sequence[Tensor]
    ) -> Memory:
        """The memory of the tensors ``leaving`` a stage that got ``arrived``, while the skips ``in_flight`` exist."""
        is_alone = len(leaving) < 2 and not in_flight and not self.shared
        if is_alone and not self.kept:
            return self
        others = [*in_flight, *(arrived[place] for place in self.shared)]
        shared = _NONE if is_alone else shared_places(leaving, others)
        homes = [storage_key(arrived[place]) for place in self.kept]
        stays = [n for n, tensor in enumerate(leaving) if (key := storage_key(tensor)) is not None and key in homes]
        return Memory(shared, frozenset(stays))
