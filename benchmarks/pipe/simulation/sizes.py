"""Sizes: the bytes that a stage needs by itself, and the peak of each pipeline device, derived from these alone.

    one backward (GPipe)   peak of three micro-batches by themselves, and what is kept of each further one
    1F1B                   peak of one by itself, what is kept of one more for each stage behind, an input on its way
    look-ahead k           k - 1 times what a replay makes
    always                 parameters, their gradients, and the caller's data
"""
from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, accelerator

from benchmarks.pipe.simulation.staged import Variant, called
from benchmarks.pipe.variants import Job

__all__ = ["Sizes"]

_STEADY = 3  # micro-batches: from here on each adds what is kept of it
_HERE, _THERE = "sim:0", "sim:1"


class Alone(NamedTuple):
    """Bytes of a stage, without parameters and their gradients."""

    kept_bytes: int  # kept for each micro-batch after its forward
    peak_bytes: int  # peak of a few forwards and then one backward of all


class Sizes:
    """Sizes of a model with one layer per stage, and a mini-batch of ``m`` micro-batches."""

    def __init__(self, job: Job, m: int) -> None:
        self._job, self._m = job, m
        self._inputs = _inputs(job, m)
        self._known: dict[tuple[int, str, int], Alone] = {}

    def predicted_bytes(self, variant: Variant) -> list[int]:
        """The peak bytes of each device."""
        stages = range(len(self._job.model))
        work = self._bytes_1f1b if variant.base == "1F1B" else self._bytes_gpipe
        return [self._static_bytes(j) + work(j, variant) for j in stages]

    def _static_bytes(self, j: int) -> int:
        data = self._job.x.nbytes if j == 0 else self._job.target.nbytes if self._is_last(j) else 0
        return 2 * sum(parameter.nbytes for parameter in self._job.model[j].parameters()) + data

    def _bytes_gpipe(self, j: int, variant: Variant) -> int:
        kept = self.alone(j, variant.region, 1).kept_bytes
        replay = self.alone(j, "", 1).kept_bytes - kept
        peak = self.alone(j, variant.region, _STEADY).peak_bytes
        return peak + (self._m - _STEADY) * kept + (variant.lookahead - 1) * replay

    def _bytes_1f1b(self, j: int, variant: Variant) -> int:
        is_kept = self._is_last(j) and not variant.regions
        kept, peak = self.alone(j, "" if is_kept else variant.region, 1)
        return peak + (len(self._job.model) - 1 - j) * kept + (self._inputs[j].nbytes if j else 0)

    def alone(self, j: int, region: str, m: int) -> Alone:
        """Stage ``j`` on a device, and another one that sends its inputs and gradients."""
        if (j, region, m) not in self._known:
            self._known[j, region, m] = self._measured(j, region, m)
        return self._known[j, region, m]

    def _measured(self, j: int, region: str, m: int) -> Alone:
        stage = copy.deepcopy(self._job.model[j]).to(_HERE)
        for parameter in stage.parameters():
            parameter.grad = torch.zeros_like(parameter)
        x = self._inputs[j].to(_THERE if j else _HERE)
        target = self._job.target[:m].to(_HERE)
        accelerator.synchronize(_HERE)
        before = accelerator.memory_allocated(_HERE)
        accelerator.reset_peak_memory_stats(_HERE)
        outputs = []
        with torch.autograd.set_multithreading_enabled(False):
            for _ in range(m):
                output = called(stage, region, x.detach().requires_grad_(j > 0).to(_HERE, non_blocking=True))
                outputs.append(output if self._is_last(j) else output.to(_THERE, non_blocking=True))
                del output
            kept = (accelerator.memory_allocated(_HERE) - before) // m
            end = torch.cat(outputs) if m > 1 else outputs[0]
            del outputs
            if self._is_last(j):
                end = self._job.loss(end, target)
            end.backward(torch.ones_like(end))
        del end
        return Alone(kept, accelerator.max_memory_allocated(_HERE) - before)

    def _is_last(self, j: int) -> bool:
        return j + 1 == len(self._job.model)


def _inputs(job: Job, m: int) -> Sequence[Tensor]:
    """The input of each stage for one micro-batch."""
    found = [job.x[: len(job.x) // m]]
    with torch.no_grad():
        for stage in job.model:
            found.append(stage(found[-1]))
    return found
