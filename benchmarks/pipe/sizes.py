"""Sizes: what a stage needs by itself, in bytes, and what each device of a pipeline needs at most, from these alone."""
from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from staged import Variant, called
from torch import Tensor, accelerator, nn
from variants import Job

__all__ = ["predicted_bytes"]

_STEADY = 3  # micro-batches: from here on each adds what is kept of it
_HERE, _THERE = "sim:0", "sim:1"


class Alone(NamedTuple):
    """A stage on its own device, with gradients that are there, and another device that sends and receives."""

    kept_bytes: int  # after one forward
    peak_bytes: int  # of forwards and one backward of all; both beside parameters and their gradients


def predicted_bytes(job: Job, variant: Variant, m: int) -> list[int]:
    """The peak of each device: parameters, gradients and the caller's data included."""
    stages = list(job.model)
    inputs = _inputs(job, m)
    found = []
    for j, stage in enumerate(stages):
        loss = (job.loss, job.target[: len(job.target) // m]) if j + 1 == len(stages) else None
        static = 2 * sum(parameter.nbytes for parameter in stage.parameters())
        static += job.x.nbytes if j == 0 else job.target.nbytes if loss else 0
        found.append(static + _work_bytes(stage, inputs[j], loss, variant, m, behind=len(stages) - 1 - j))
    return found


def _work_bytes(
    stage: nn.Module,
    x: Tensor,
    loss: tuple[Callable[[Tensor, Tensor], Tensor], Tensor] | None,
    variant: Variant,
    m: int,
    behind: int,
) -> int:
    """All but what is always there.

    Args:
        behind: how many stages come after this one.
    """
    plain = alone(stage, x, loss, "", 1).kept_bytes
    if variant.base == "1F1B":  # one micro-batch at work, one more for each stage behind, and an input on its way
        region = "" if loss and not variant.regions else variant.region
        kept, peak = alone(stage, x, loss, region, 1)
        return peak + behind * kept + (x.nbytes if x.is_floating_point() else 0)
    kept = alone(stage, x, loss, variant.region, 1).kept_bytes
    peak = alone(stage, x, loss, variant.region, _STEADY).peak_bytes
    return peak + (m - _STEADY) * kept + (variant.lookahead - 1) * (plain - kept)


def alone(
    stage: nn.Module,
    x: Tensor,
    loss: tuple[Callable[[Tensor, Tensor], Tensor], Tensor] | None,
    region: str,
    m: int,
) -> Alone:
    stage = copy.deepcopy(stage).to(_HERE)
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter)
    comes_from = _THERE if x.is_floating_point() else _HERE
    x = x.to(comes_from)
    target = torch.cat([loss[1]] * m).to(_HERE) if loss else None
    accelerator.synchronize(_HERE)
    before = accelerator.memory_allocated(_HERE)
    accelerator.reset_peak_memory_stats(_HERE)
    with torch.autograd.set_multithreading_enabled(False):
        outputs = []
        for _ in range(m):
            own = x.detach().requires_grad_(x.is_floating_point())
            output = called(stage, region, own.to(_HERE, non_blocking=True))
            outputs.append(output if loss else output.to(_THERE, non_blocking=True))
            del output
        kept = (accelerator.memory_allocated(_HERE) - before) // m
        end = torch.cat(outputs) if m > 1 else outputs[0]
        del outputs
        if loss:
            end = loss[0](end, target)  # type: ignore[arg-type]  # there is one
        end.backward(torch.ones_like(end))
        del end
    return Alone(kept, accelerator.max_memory_allocated(_HERE) - before)


def _inputs(job: Job, m: int) -> Sequence[Tensor]:
    """What each stage gets of one micro-batch."""
    found = [job.x[: len(job.x) // m]]
    with torch.no_grad():
        for stage in job.model:
            found.append(stage(found[-1]))
    return found
