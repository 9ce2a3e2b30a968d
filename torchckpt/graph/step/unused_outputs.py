"""Unused outputs: find out, for each backward, which outputs no loss has read.

AOTAutograd replaces missing gradients of outputs by zeros. Eager skips the operations that depend only on them: a
parameter that no loss depends on has the gradient None, and an optimizer applies no weight decay to it.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, fx

from torchckpt.errors import CaptureError, Fault
from torchckpt.graph.private.trace import backward_node, retainable, tangent_places
from torchckpt.graph.step.joint import Joint, reached

__all__ = ["UnusedOutputs"]


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
        self._arrived: dict[int, set[int]] = {}  # by thread: autograd has one for each device

    def watch(self, outputs: Iterable[Tensor]) -> None:
        """Record at each backward which gradients of ``outputs`` arrive. Also allow ``retain_graph=True``."""
        nodes = {backward_node(output, len(self._reads)) for output in outputs}
        for node in nodes - {None}:
            retainable(node)
            node.register_prehook(self._arrive)

    def missing(self) -> frozenset[fx.Node]:
        """The placeholders of output gradients that are missing in this thread's present backward."""
        arrived = self._arrived.pop(get_ident(), None)
        if arrived is None:
            return frozenset()
        return frozenset(tangent for tangent, place in self._places.items() if place not in arrived)

    def _arrive(self, gradients: Sequence[Any]) -> None:
        # Not a post-hook: autograd would keep all arrived gradients alive for it.
        if torch.is_grad_enabled():
            rule = "the backward of a traced call cannot be differentiated"
            works = "the original model for second derivatives, with torchckpt.checkpoint inside it to save memory"
            raise CaptureError(str(Fault(rule, "a backward with create_graph=True", works)))
        self._arrived[get_ident()] = {place for place, gradient in enumerate(gradients) if gradient is not None}
