"""Classic: torchgpipe's graph over several devices (Kim et al., 2020), to see when its recomputation runs.

As ``twin.py``, from the paper, with the streams: a copy stream for each device and micro-batch, on which copies wait
for the computation before them. What micro-batch i leaves in the graph between stage j and stage j + 1:

    Checkpoint ─► Wait ─► fork ────► join ─► Copy ─► Wait ─► Checkpoint of stage j + 1
                   [1]     └► Recompute ┘     [2]     [3]

In the backward, ``join`` passes the copied gradient on, and the engine prefers ``Recompute``, which was made later, to
the Wait [1] that makes the compute stream wait for that gradient: so the replay was meant to run during the copy.
"""
from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from benchmarks.pipe.twin import Region, Worker, fork, join
from torchckpt.pipe.run.links import Place, copy, on, wait
from torchckpt.pipe.run.pipeline import clock_cycles

__all__ = ["Classic"]


class Classic(nn.Module):
    """Called with a mini-batch, it returns what the Sequential would. Each layer is a stage, on the device given.

    Args:
        own_streams: make the nodes of copies, forks and joins on copy streams, as ``torchckpt.Pipe`` does and the paper
            does not: to see what that changes.
    """

    def __init__(
        self, module: nn.Sequential, devices: Sequence[str], chunks: int, own_streams: bool = False
    ) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stage.to(device) for stage, device in zip(module, devices))
        self._places = [Place.of(torch.device(device)) for device in devices]
        self._chunks, self._own_streams = chunks, own_streams
        self._workers = [Worker() for _ in devices]

    def forward(self, x: Tensor) -> Tensor:
        batches = list(x.chunk(self._chunks))
        sides = [[place.side_stream() for _ in batches] for place in self._places]
        for tick in clock_cycles(len(batches), len(self.stages)):
            for i, j in tick:
                self._bring(batches, sides, i, j)
            regions = {i: Region(self.stages[j], batches[i]) for i, j in tick}
            for i, j in tick:
                self._workers[j].start(regions[i].checkpoint)
            for i, j in tick:
                batches[i] = self._leave(regions[i], self._workers[j].result(), sides, i, j)
        return torch.cat(batches)

    def _bring(self, batches: list[Tensor], sides: list[list[torch.Stream | None]], i: int, j: int) -> None:
        if i > 0 and batches[i - 1].requires_grad:
            with self._on(sides[j - 1][i]):
                batches[i - 1], phony = fork(batches[i - 1])
                batches[i] = join(batches[i], phony)
        if j > 0:
            source, target = self._places[j - 1], self._places[j]
            with self._on(sides[j][i]):
                moved = copy(source, sides[j - 1][i], target, sides[j][i], (batches[i],))  # [2]
            (batches[i],) = wait(sides[j][i], target.compute, moved)  # [3]

    def _leave(
        self, region: Region, output: Tensor, sides: list[list[torch.Stream | None]], i: int, j: int
    ) -> Tensor:
        place, side = self._places[j], sides[j][i]
        if j + 1 == len(self.stages):
            return region.recompute(output)
        (output,) = wait(place.compute, side, (output,))  # [1]
        with self._on(side):
            return region.recompute(output, on(place.compute))

    def _on(self, stream: torch.Stream | None) -> AbstractContextManager[None]:
        return on(stream) if self._own_streams else nullcontext()

    def close(self) -> None:
        """End the threads."""
        for worker in self._workers:
            worker.close()
