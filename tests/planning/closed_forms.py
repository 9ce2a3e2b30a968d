"""What is known without a simulator: p stages, m micro-batches; seconds tf, tb, tr and tc per forward, backward,
recompute and message; A, everything that one micro-batch saves on one stage, and c, its boundary, a part of A."""
from __future__ import annotations

from itertools import product
from typing import NamedTuple

from tests.planning.policies import placed
from torchckpt.planning import Block, Link

BOUNDARY = 1 / 16


class Cell(NamedTuple):
    """tf = tr = 1, tb = 2, A = 1, c = 1/16: exact in binary, so that equal means equal."""

    p: int
    m: int
    tc: float
    tf: float = 1.0
    tb: float = 2.0
    tr: float = 1.0

    @property
    def costs(self):
        return Block(self.tf, self.tb / 2, self.tb / 2, self.tr, saved_bytes=1.0, boundary_bytes=BOUNDARY)

    @property
    def link(self):
        return Link(latency_seconds=self.tc)

    @property
    def gpipe(self):
        return (self.m + self.p - 1) * (self.tf + self.tb) + 2 * (self.p - 1) * self.tc

    @property
    def one_f_one_b(self):
        p, m = self.p, self.m
        return (m + p - 1) * (self.tf + self.tb) + 2 * self.tc * ((p - 1) * m / p + p - 2)

    @property
    def one_f_one_b_ahead(self):
        """The bound of one ahead, last stage exempt."""
        busy = self.m * (self.tf + self.tb + self.tr)
        return max(self.one_f_one_b, (self.p - 2) * (self.tf + self.tb + 2 * self.tc) + busy)


CELLS = [Cell(p, p * times, tc) for p, times, tc in product([2, 4, 8, 16], [1, 2, 4, 8], [0.0, 0.25, 1.0])]


def greedy(schedule, cell, *kept, k=1):
    return placed(schedule, cell.costs, cell.link, *kept, k=k)
