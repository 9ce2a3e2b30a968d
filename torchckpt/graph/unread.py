"""Unread outputs: what a backward is told of the outputs that a loss reads, and of those that none does.

AOTAutograd fills in zeros for the gradients that do not arrive. In eager what they lead to is left out: a gradient that
depends on none that has arrived is None, and an optimizer does not decay weights that took no part.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, fx

from torchckpt.errors import CaptureError, Fault
from torchckpt.graph.joint import Joint, reached
from torchckpt.graph.private.trace import backward_node, retainable, tangent_places

__all__ = ["Unread"]


class Unread:
    """Of each gradient, which outputs it depends on, by their places among the forward's outputs."""

    def __init__(self, joint: Joint) -> None:
        self._places = tangent_places(joint.module.graph)
        gradients = joint.outputs[joint.forward_outputs :]
        self._reads: list[set[int]] = [set() for _ in gradients]
        for tangent, place in self._places.items():
            after = reached([tangent])
            for reads, gradient in zip(self._reads, gradients):
                if gradient in after:
                    reads.add(place)
        self._arrived: dict[int, set[int]] = {}  # by thread: the engine has one for each device

    def watch(self, outputs: Iterable[Tensor]) -> None:
        """Have the node that made ``outputs`` say which of their gradients arrive, and let its graph be retained."""
        nodes = {backward_node(output, len(self._reads)) for output in outputs}
        for node in nodes - {None}:
            retainable(node)
            node.register_prehook(self._arrive)

    def missing(self) -> frozenset[fx.Node]:
        """The gradients of outputs that have not arrived for the backward that this thread is in."""
        arrived = self._arrived.pop(get_ident(), None)
        if arrived is None:
            return frozenset()
        return frozenset(tangent for tangent, place in self._places.items() if place not in arrived)

    def _arrive(self, gradients: Sequence[Any]) -> None:
        # Not a hook after the node: the engine would keep all that arrived until then.
        if torch.is_grad_enabled():
            rule = "the backward of a traced call is not differentiated itself"
            works = "the model that was given to rematerialize(), where the backward is; torchckpt.checkpoint inside it"
            raise CaptureError(str(Fault(rule, "a backward with create_graph=True", works)))
        self._arrived[get_ident()] = {place for place, gradient in enumerate(gradients) if gradient is not None}
