"""Blocks: the layers of a stage that are kept or recomputed together."""
from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import nn

from torchckpt.pipe.partition import ChangedInputs, Stage

__all__ = ["blocks_of", "parts_of"]


def blocks_of(layers: Sequence[nn.Module]) -> list[int]:
    """The number of layers of each block.

    A layer that has layers inside, or a class of one's own, is a block, together with the layers without parameters
    behind it. Layers of torch without layers inside are small, and to keep the input of each would save little. So they
    are one block up to the next layer that is none of these.

    >>> blocks_of([nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2)), nn.ReLU(), nn.Linear(2, 2), nn.ReLU()])
    [2, 2, 2]
    """
    counts: list[int] = []
    is_after_large = False
    for layer in layers:
        is_large = not type(layer).__module__.startswith("torch.nn.") or next(layer.children(), None) is not None
        has_parameters = next(layer.parameters(), None) is not None
        if is_large or not counts or (is_after_large and has_parameters):
            counts.append(0)
            is_after_large = is_large
        counts[-1] += 1
    return counts


def parts_of(stage: Stage, in_place: dict[tuple[int, int], ChangedInputs]) -> list[Stage]:
    """The blocks of ``stage``, each as a stage of its own. ``in_place`` is as in ``partition``: what a block changes is
    found when it runs for the first time, which is in a step that recomputes everything."""
    counts = blocks_of([layer.module for layer in stage.layers])
    parts = []
    for end, count in zip(accumulate(counts), counts):
        first = stage.first + end - count
        changed = in_place.setdefault((first, first + count), {})
        parts.append(Stage(stage.number, first, stage.layers[end - count : end], stage.device, changed))
    return parts
