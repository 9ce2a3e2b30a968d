"""Blocks: the layers of a stage that are kept or recomputed together."""
from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from torch import nn

from torchckpt.pipe.partition import ChangedInputs, Stage

__all__ = ["Blocks", "Piece", "blocks_of"]


class Piece(NamedTuple):
    """A part of a stage: one block that is recomputed, or consecutive ones that are kept."""

    stage: Stage
    block: int | None
    """None: it is kept."""


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


class Blocks:
    """The blocks of a stage, and the parts of its visits."""

    def __init__(self, stage: Stage, in_place: dict[tuple[int, int], ChangedInputs]) -> None:
        self._stage, self._in_place = stage, in_place
        counts = blocks_of([layer.module for layer in stage.layers])
        self._ends = [sum(counts[: block + 1]) for block in range(len(counts))]
        self._stages: dict[tuple[int, int], Stage] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def pieces(self, recomputed: Collection[int]) -> Iterator[Piece]:
        """The parts of a visit of which these blocks are recomputed."""
        begin = 0
        for block, end in enumerate(self._ends):
            is_kept = block not in recomputed
            if is_kept and block + 1 < len(self) and block + 1 not in recomputed:
                continue  # one part with the next
            yield Piece(self._part(begin, end), None if is_kept else block)
            begin = end

    def _part(self, begin: int, end: int) -> Stage:
        stage, place = self._stage, (self._stage.first + begin, self._stage.first + end)
        if end - begin == len(stage.layers):
            return stage
        if place not in self._stages:
            changed = self._in_place.setdefault(place, ChangedInputs())
            self._stages[place] = Stage(stage.number, place[0], stage.layers[begin:end], stage.device, changed)
        return self._stages[place]
