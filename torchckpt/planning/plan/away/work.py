"""Work: what a stage takes in a step with a host, piece by piece."""
from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torchckpt.planning.work.block import Stage
from torchckpt.planning.work.host import Host

__all__ = ["Work", "sums"]


class Work:
    """Lists over the pieces of a stage: its blocks, and what comes after them. What comes before belongs to the first.

    Of a visit the first ``away`` blocks go to the host, the next ``dropped`` are recomputed, and the rest is kept.
    """

    def __init__(self, stage: Stage, host: Host) -> None:
        pieces, before = (*stage.blocks, stage.after), stage.before
        self.blocks = len(stage.blocks)
        self.forward = [piece.forward_seconds for piece in pieces]
        self.inputs = [piece.input_grad_seconds for piece in pieces]
        self.whole = [piece.input_grad_seconds + piece.weight_grad_seconds for piece in pieces]
        self.saved = [piece.saved_bytes for piece in pieces]
        self.boundary = [piece.boundary_bytes for piece in pieces]
        self.freed = [piece.freed_bytes for piece in pieces]
        self.replay = [piece.recompute_seconds if piece.freed_bytes else 0.0 for piece in pieces]
        self.moved = [stage.moved_bytes(block) for block in range(self.blocks)]
        self.out = [moved / host.out_rate for moved in self.moved]
        self.back = [moved / host.back_rate for moved in self.moved]
        self.forward[0] += before.forward_seconds
        self.inputs[0] += before.input_grad_seconds
        self.whole[0] += before.input_grad_seconds + before.weight_grad_seconds
        self.saved[0] += before.saved_bytes
        self.boundary[0] += before.saved_bytes
        self.weight_seconds, self.full_bytes = stage.weight_grad_seconds, stage.saved_bytes
        self.forward_until, self.whole_until, self.moved_until = sums(self.forward), sums(self.whole), sums(self.moved)
        self.freed_until, self.replay_until, self.inputs_until = sums(self.freed), sums(self.replay), sums(self.inputs)
        self._peaks: dict[tuple[int, int], float] = {}
        self._needs: dict[tuple[int, int, bool], list[float]] = {}

    def held_bytes(self, away: int, dropped: int) -> float:
        """The bytes of a visit on the device when what goes has gone, and nothing is restored."""
        return self.full_bytes - self.moved_until[away] - self.freed_until[away + dropped] + self.freed_until[away]

    def need_bytes(self, block: int, away: int, dropped: int) -> float:
        """The bytes that the forward of a block takes."""
        return self.boundary[block] if away <= block < away + dropped else self.saved[block]

    def forward_bytes(self, away: int, dropped: int, leaving: float) -> float:
        """The most bytes that a forward adds, of which so many are on their way out when it ends."""
        if (away, dropped) not in self._peaks:
            level = peak = 0.0
            for block in range(self.blocks + 1):
                level += self.need_bytes(block, away, dropped)
                peak = max(peak, level)
                level -= self.moved[block] if block < away else 0.0
            self._peaks[away, dropped] = peak
        return max(self._peaks[away, dropped], self.held_bytes(away, dropped) + leaving)

    def late_bytes(self, away: int, late: int) -> float:
        """The bytes that a whole backward adds at least for its late blocks, which later ones have no room for."""
        return self.late_needs(away, late, False)[-1]

    def late_needs(self, away: int, late: int, split: bool) -> list[float]:
        """By piece, the bytes that a backward adds at least for its late blocks from this piece to the first one."""
        key = away, late, split
        if key not in self._needs:
            needs, need = [], 0.0
            for block in range(self.blocks + 1):
                need = max(0.0, need - (0.0 if split else self.saved[block]))
                need += self.freed[block] if away <= block < away + late else 0.0
                needs.append(need)
            self._needs[key] = needs
        return self._needs[key]


def sums(values: Sequence[float]) -> list[float]:
    """The sum of the values before each index, and of all."""
    return [0.0, *accumulate(values)]
