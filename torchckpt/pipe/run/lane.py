"""Lane: the regions of one stage, in order, and how far ahead of its backwards their replays may run."""
from __future__ import annotations

from itertools import chain, repeat, zip_longest
from typing import TypeAlias

from torch import Tensor

from torchckpt.pipe.run.visit import Replay
from torchckpt.regions.core.nodes import fork, join, recompute

__all__ = ["Edges", "Lane", "before"]

Edges: TypeAlias = list[list[Tensor]]
"""For each output of the stage, its phonies. Each output has its own ``Recompute`` nodes, of the same frame: with
common nodes, a backward would enter branches that its loss does not use."""


class Lane:
    """The lane of one stage in one forward: its regions in order. (On paper, a ``Lane`` is a rank.)

    With look-ahead k, the backward of a lane runs the replays R and the backwards B of its regions in a fixed order,
    no matter when the gradients arrive. For k = 2:

        R3 R2 B3 R1 B2 R0 B1 B0

    R(i) comes between B(i+k) and B(i+k-1), so at most k micro-batches hold recomputed activations. With k = 1, *one
    ahead*, R(i) runs as soon as B(i+1) is done, while the gradient of micro-batch i is still on its way. The edges:

        B(i+k)  before  R(i):     R(i)'s phony goes into the Checkpoint of micro-batch i+k, the last node of B(i+k).
                                  If that region has no Checkpoint, the phony goes into its output. R(i) was made
                                  before that region ran, in the same thread, so the engine runs the region first
        R(i)  before  B(i+k-1):   R(i) is made of phonies forked from the outputs of micro-batches i to i+k-1

    The last k regions have no B(i+k). Their replays are joined to the last micro-batch's output, so they run first.
    """

    def __init__(self, lookahead: int) -> None:
        self._lookahead = lookahead
        self._frames: list[Replay | None] = []  # by micro-batch; None: nothing is replayed early
        self._forked: list[Edges] = []  # by micro-batch

    def due(self) -> Edges:
        """The replay, if there is one, that runs after the backward of the next micro-batch.

        Call it before anything else is done for that micro-batch.
        """
        place = len(self._frames) - self._lookahead
        return self._replays(place, place + 1) if place >= 0 else []

    def passed(self, frame: Replay | None, outputs: tuple[Tensor, ...], due: Edges) -> tuple[Tensor, ...]:
        """Add the next micro-batch's region. Return ``outputs`` with the forks at which its backward waits for its
        replay, and with the replays of ``due`` joined.

        If the last micro-batches keep their activations, ``due`` is not joined: the backward that needs it starts the
        replay. On a last stage all gradients arrive at once, and without streams a replay overlaps nothing.
        """
        self._frames.append(frame)
        if not any(self._frames[-self._lookahead :]):  # no replay will depend on these outputs
            self._forked.append([])
            return outputs
        edges = chain(due, repeat([]))
        pairs = zip(outputs, edges)
        forked = [fork(output, *phonies) if output.requires_grad else (output, None) for output, phonies in pairs]
        self._forked.append([[] if edge is None else [edge] for _, edge in forked])
        return tuple(tensor for tensor, _ in forked)

    def rest(self) -> Edges:
        """The replays that run before the backward of the last micro-batch. Call it after the last ``passed``."""
        count = len(self._frames)
        return self._replays(max(0, count - self._lookahead), count)

    def _replays(self, first: int, end: int) -> Edges:
        return _together([self._replay(place) for place in range(first, end)])

    def _replay(self, place: int) -> Edges:
        frame = self._frames[place]
        forked = _together(self._forked[place : place + self._lookahead])
        return [] if frame is None else [[recompute(frame, *edges)] if edges else [] for edges in forked]


def before(outputs: tuple[Tensor, ...], replays: Edges) -> tuple[Tensor, ...]:
    """``outputs`` as new tensors. The backward of each runs before its ``replays``."""
    joined = list(outputs)
    for place, (tensor, edges) in enumerate(zip(outputs, replays)):
        if edges and tensor.requires_grad:
            joined[place] = join(tensor, *edges)
    return tuple(joined)


def _together(several: list[Edges]) -> Edges:
    return [list(chain.from_iterable(edges)) for edges in zip_longest(*several, fillvalue=[])]
