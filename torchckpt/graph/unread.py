"""Unread outputs: a gradient that depends on none of the outputs that a loss reads is None, as in eager.

AOTAutograd fills the gradients of unread outputs with zeros, and hands on zeros: an optimizer would decay weights that
took no part.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from threading import get_ident
from typing import Any

from torch import Tensor

from torchckpt.graph.joint import Joint, reached
from torchckpt.graph.private.trace import backward_node, tangent_places

__all__ = ["Unread"]


class Unread:
    """Of each gradient, which outputs it depends on, by their places among the forward's outputs."""

    def __init__(self, joint: Joint) -> None:
        places = tangent_places(joint.module.graph)
        gradients = joint.outputs[joint.forward_outputs :]
        self._reads: list[set[int]] = [set() for _ in gradients]
        for tangent, place in places.items():
            after = reached([tangent])
            for reads, gradient in zip(self._reads, gradients):
                if gradient in after:
                    reads.add(place)
        self._arrived: dict[int, set[int]] = {}  # by thread: the engine has one for each device
        self._is_needed = any(reads and reads != set(places.values()) for reads in self._reads)

    def watch(self, outputs: Iterable[Tensor]) -> None:
        """Have the node that made ``outputs`` say which of their gradients arrive."""
        if not self._is_needed:
            return
        nodes = {backward_node(output, len(self._reads)) for output in outputs}
        for node in nodes - {None}:
            node.register_prehook(self._arrive)

    def gradients(self, gradients: Sequence[Any]) -> Sequence[Any]:
        """Those that the backward made, None where none of what they depend on has arrived."""
        arrived = self._arrived.pop(get_ident(), None)
        if arrived is None:
            return gradients
        return [gradient if reads & arrived else None for gradient, reads in zip(gradients, self._reads)]

    def _arrive(self, gradients: Sequence[Any]) -> None:
        # Not a hook after the node: the engine would keep all that arrived until then.
        self._arrived[get_ident()] = {place for place, gradient in enumerate(gradients) if gradient is not None}
