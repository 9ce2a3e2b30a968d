"""Lane: the regions of one stage, in order, and how far ahead of its backwards their replays may run."""
from __future__ import annotations

from itertools import chain, repeat, zip_longest
from typing import TypeAlias

from torch import Tensor

from torchckpt.kernel.dependency import fork, join
from torchckpt.kernel.frame import Frame
from torchckpt.kernel.recompute import recompute

__all__ = ["Edges", "Lane", "before"]


Edges: TypeAlias = list[list[Tensor]]
"""Per output of the stage the phonies that belong to it. Each output has replays of its own, of the same frame, so that
no edge makes a backward enter a branch that its loss does not use."""


class Lane:
    """One stage in one forward.

    With look-ahead k, the backward of a lane runs its regions' replays R and backwards B in one order, whatever the
    gradients do meanwhile; here for k = 2:

        R3 R2 B3 R1 B2 R0 B1 B0

    Between B(i+k) and B(i+k-1) stands R(i), so k micro-batches are recomputed and alive. The first of k is *one ahead*:
    R(i) runs as soon as B(i+1) is done, while the gradient of micro-batch i is still on its way. The edges:

        B(i+k)  before  R(i):     R(i)'s phony hangs on the Checkpoint of micro-batch i+k, the last node of B(i+k).
                                  Where that region has none, it hangs on the output; R(i) was made before that
                                  region was run, by the same thread, so the engine prefers the region's nodes to it
        R(i)  before  B(i+k-1):   R(i) is made of phonies forked from the outputs of micro-batches i to i+k-1

    The last k regions have no B(i+k): their replays are tied to the last micro-batch's output, first of all.
    """

    def __init__(self, lookahead: int) -> None:
        self._lookahead = lookahead
        self._frames: list[Frame | None] = []  # by micro-batch; None: its activations are kept
        self._forked: list[Edges] = []  # by micro-batch

    def due(self) -> Edges:
        """The replay, if there is one, that comes after the backward of the next micro-batch.

        To be called before anything else is done for that micro-batch.
        """
        place = len(self._frames) - self._lookahead
        return self._replays(place, place + 1) if place >= 0 else []

    def passed(self, frame: Frame | None, outputs: tuple[Tensor, ...], due: Edges) -> tuple[Tensor, ...]:
        """``outputs`` of the next micro-batch's region, at the place where its backward waits for its replay; and
        before that those of ``due``, where nothing stands between.

        Where the last ones are kept, ``due`` is left to the backward that needs it: all gradients of a last stage are
        there at once, and without streams a replay overlaps nothing.
        """
        self._frames.append(frame)
        if not any(self._frames[-self._lookahead :]):  # no replay will hang on them
            self._forked.append([])
            return outputs
        edges = chain(due, repeat([]))
        forked = [fork(one, *own) if one.requires_grad else (one, None) for one, own in zip(outputs, edges)]
        self._forked.append([[] if edge is None else [edge] for _, edge in forked])
        return tuple(tensor for tensor, _ in forked)

    def rest(self) -> Edges:
        """The replays that come before the backward of the last micro-batch, which has just passed."""
        count = len(self._frames)
        return self._replays(max(0, count - self._lookahead), count)

    def _replays(self, first: int, end: int) -> Edges:
        return _together([self._replay(place) for place in range(first, end)])

    def _replay(self, place: int) -> Edges:
        frame = self._frames[place]
        forked = _together(self._forked[place : place + self._lookahead])
        return [] if frame is None else [[recompute(frame, *edges)] if edges else [] for edges in forked]


def before(outputs: tuple[Tensor, ...], replays: Edges) -> tuple[Tensor, ...]:
    """``outputs`` again, the backward of each of which now comes before its ``replays``."""
    joined = list(outputs)
    for place, (tensor, edges) in enumerate(zip(outputs, replays)):
        if edges and tensor.requires_grad:
            joined[place] = join(tensor, *edges)
    return tuple(joined)


def _together(several: list[Edges]) -> Edges:
    return [list(chain.from_iterable(edges)) for edges in zip_longest(*several, fillvalue=[])]
