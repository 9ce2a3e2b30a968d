"""Published: the cases, and the figures that a sketch of this planner reached on them."""
from __future__ import annotations

from dataclasses import replace

from torchckpt.planning import Block, Stage, fixed
from torchckpt.planning.order.schedules import named_schedule

BLOCK = Block(boundary_bytes=0.06)


def gpt(*counts: int) -> list[Stage]:
    """Equal blocks, an embedding, and a head of one block that is never recomputed."""
    stages = [Stage((BLOCK,) * count) for count in counts]
    stages[0] = replace(stages[0], before=fixed(0.1, 0.0, 0.1, 0.02))
    stages[-1] = replace(stages[-1], after=fixed(1.0, 1.0, 1.0, 2.0))
    return stages


CASES = {
    "A": (named_schedule("1f1b", 4, 8), gpt(8, 8, 8, 7), 0.0),
    "B": (named_schedule("1f1b", 8, 32), gpt(*[8] * 7, 7), 0.8),
    "C": (named_schedule("1f1b", 8, 32), gpt(*[8] * 7, 7), 0.0),
    "D": (named_schedule("interleaved_1f1b", 4, 16), gpt(*[4] * 7, 3), 0.0),
    "E": (named_schedule("zbv", 4, 12), gpt(*[4] * 7, 3), 0.0),
    "F": (named_schedule("zero_bubble", 4, 16), gpt(8, 8, 8, 7), 0.0),
}
"""Schedule, stages, seconds of a message."""

FIGURES = {
    "A": {30: (32.5, 24.9, 13.0, 9.2, 13.0), 50: (32.5, 20.8, 6.8, 6.8, 6.8), 70: (32.5, 12.5, 4.2, 4.2, 4.2)},
    "B": {30: (31.1, 23.6, 12.2, 11.7, 10.8), 50: (31.1, 19.7, 7.8, 7.8, 5.2), 70: (31.1, 11.8, 3.5, 3.5, 3.5)},
    "C": {30: (32.9, 24.9, 16.1, 15.3, 14.7), 50: (32.9, 20.7, 11.2, 11.2, 9.6), 70: (32.9, 12.4, 7.1, 6.7, 7.1)},
    "D": {30: (31.1, 25.0, 17.6, 16.8, 16.8), 50: (31.1, 25.0, 8.6, 7.6, 7.8), 70: (31.1, 16.6, 2.9, 2.9, 1.7)},
    "E": {30: (42.3, 42.3, 29.3, 29.3, 25.3), 50: (40.9, 32.6, 20.0, 20.0, 18.5), 70: (38.3, 20.6, 11.3, 11.3, 11.3)},
    "F": {30: (48.1, 39.4, 30.3, 28.4, 27.8), 50: (38.1, 30.1, 24.3, 22.6, 21.2), 70: (38.1, 20.9, 13.0, 13.0, 13.0)},
}
"""By percent of the peak, percent over keeping all: everything recomputed, the same blocks on all stages, planned, the
bound (of split backwards: with weight gradients delayed alike on all ranks), planned with blocks moved."""

ONE_F_ONE_B = {
    (2, 4, 8): {30: (10.0, 20.0), 50: (7.5, 8.3), 70: (5.0, 5.0)},
    (4, 8, 8): {30: (9.1, 13.3), 50: (6.8, 6.8), 70: (4.2, 4.2)},
    (4, 32, 8): {30: (20.0, 22.5), 50: (15.0, 16.4), 70: (9.2, 9.2)},
    (8, 16, 8): {30: (8.7, 12.1), 50: (6.3, 6.3), 70: (3.8, 3.8)},
    (8, 32, 8): {30: (15.4, 16.2), 50: (11.2, 11.4), 70: (6.7, 7.4)},
    (8, 64, 10): {30: (19.7, 20.1), 50: (14.1, 14.2), 70: (8.5, 10.0)},
}
"""By stages, micro-batches and blocks of a stage, all equal: the closed form, and planned."""
AWAY = {
    "A": {10: (0.0, 15.1, 25.1), 20: (0.0, 1.0, 8.7), 30: (0.0, 0.0, 3.1), 50: (0.0, 0.0, 0.0)},
    "B": {10: (0.0, 3.0, 14.8), 20: (0.0, 0.0, 2.0), 30: (0.0, 0.0, 1.1), 50: (0.0, 0.0, 0.3)},
    "C": {10: (0.0, 5.6, 18.6), 20: (0.0, 0.0, 5.1), 30: (0.0, 0.0, 2.4), 50: (0.0, 0.0, 1.2)},
    "D": {10: (0.0, 15.4, 25.8), 20: (0.0, 1.5, 10.2), 30: (0.0, 0.0, 4.9), 50: (0.0, 0.0, 0.0)},
    "E": {10: (20.0, 42.4, 70.3), 20: (4.0, 16.7, 27.3), 30: (2.7, 9.8, 21.9), 50: (0.1, 4.4, 9.2)},
    "F": {10: (11.6, 30.0, 39.5), 20: (11.6, 13.8, 23.8), 30: (5.2, 5.2, 16.6), 50: (3.7, 3.8, 8.7)},
}
"""By percent of the peak, percent over keeping all of plans that also send blocks to a host, if the copy of a block
takes as long as one, two and four of its forwards."""
SHARES = (30, 50, 70)


def closed_form_seconds(p: int, m: int, n: int, budget: float, block: Block = BLOCK) -> float:
    """1F1B of equal blocks and messages that take no time: what a budget adds to the step, at least.

    Stage j holds w = p - j micro-batches. After the first backward, one whole micro-batch must give way for each
    forward, but for what fits. The last w micro-batches are recomputed for nothing, in the bubbles at the end.
    """
    added = []
    for w in range(1, p + 1):
        kept = min(w * n, int((budget - w * n * block.boundary_bytes) / block.freed_bytes + 1e-9))
        before = m - w
        added.append(before // w * (w * n - kept) + max(0, before % w * n - kept))
    return block.recompute_seconds * max(added)
