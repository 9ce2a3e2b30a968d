"""Unused outputs: find out, for each backward, which outputs no loss has read.

AOTAutograd replaces missing gradients of outputs by zeros. Eager skips the operations that depend only on them: a
parameter that no loss depends on has the gradient None, and an optimizer applies no weight decay to it.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from torchckpt.errors import CaptureError, Fault
from torchckpt.graph.private.runtime import is_freed, lasting
from torchckpt.graph.private.trace import backward_node, output_places, retainable, tangent_places
from torchckpt.graph.step.joint import Joint, reached

__all__ = ["Unread", "UnusedOutputs"]

_Held: TypeAlias = Mapping[int, Any]
"""By place of an output of the forward: a weak reference to the storage that the caller got."""


@dataclass(frozen=True)
class Unread:
    """What a backward went without.

    Args:
        missing: the placeholders of the gradients of outputs that did not arrive.
        released: storages of outputs without a gradient that the caller held no more.
    """

    missing: frozenset[fx.Node] = frozenset()
    released: frozenset[int] = frozenset()


class UnusedOutputs:
    """Which gradients of outputs are missing in a backward, and which outputs each gradient depends on."""

    def __init__(self, joint: Joint) -> None:
        self._places = tangent_places(joint.module.graph)
        gradients = joint.outputs[joint.forward_outputs :]
        self._reads: list[set[int]] = [set() for _ in gradients]
        for tangent, place in self._places.items():
            after = reached([tangent])
            for reads, gradient in zip(self._reads, gradients):
                if gradient in after:
                    reads.add(place)
        outputs = joint.outputs[: joint.forward_outputs]
        self._outputs = output_places(joint.module.graph)
        self._storages = [joint.storages.get(output, frozenset[int]()) for output in outputs]
        self._arrived: dict[int, tuple[set[int], _Held]] = {}  # by thread: autograd has one for each device

    def watch(self, outputs: Sequence[Any]) -> None:
        """Record at each backward which gradients of ``outputs`` arrive. Also allow ``retain_graph=True``."""
        tensors = {number: output for number, output in enumerate(outputs) if isinstance(output, Tensor)}
        nodes = {backward_node(tensor, len(self._reads)) for tensor in tensors.values()} - {None}
        places = self._outputs.items() if nodes else ()
        held = {place: lasting(tensors[number]) for place, number in places if number in tensors}
        for node in nodes:
            retainable(node)
            node.register_prehook(partial(self._arrive, held))

    def missing(self) -> tuple[frozenset[fx.Node], _Held]:
        """The placeholders of output gradients that are missing in this thread's present backward; and its outputs."""
        if get_ident() not in self._arrived:
            return frozenset(), {}
        arrived, held = self._arrived.pop(get_ident())
        return frozenset(tangent for tangent, place in self._places.items() if place not in arrived), held

    def released(self, missing: Set[fx.Node], held: _Held) -> frozenset[int]:
        """The storages of outputs that have no gradient, and that nobody holds any more."""
        read = {place for tangent, place in self._places.items() if tangent not in missing}
        freed = [place for place, storage in held.items() if place not in read and is_freed(storage)]
        return self._roots_of(freed) - self._roots_of(read)

    def _roots_of(self, places: Iterable[int]) -> frozenset[int]:
        return frozenset[int]().union(*(self._storages[place] for place in places))

    def _arrive(self, held: _Held, gradients: Sequence[Any]) -> None:
        # Not a post-hook: autograd would keep all arrived gradients alive for it.
        if torch.is_grad_enabled():
            rule = "the backward of a traced call cannot be differentiated"
            works = "the original model for second derivatives, with torchckpt.checkpoint inside it to save memory"
            raise CaptureError(str(Fault(rule, "a backward with create_graph=True", works)))
        arrived = {place for place, gradient in enumerate(gradients) if gradient is not None}
        self._arrived[get_ident()] = arrived, held
