"""Profile: the seconds of each part of a stage, run on the device that is there.

A round is a forward, a backward for inputs and parameters, and one for inputs alone. The clock is read where a part
begins, forwards and backwards, and nowhere else.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from torchckpt.costs.count import Counted, Part
from torchckpt.costs.operation import AFTER, BEFORE, BOTH_GRADS, FORWARD, INPUT_GRAD
from torchckpt.costs.parts import Parts
from torchckpt.errors import Fault, raise_fault
from torchckpt.planning.work.block import Block
from torchckpt.regions.devices import Clock, Stamp
from torchckpt.tensors import nodes_behind, tensors_in

__all__ = ["Spent", "device_here", "profiled", "with_seconds"]

Spent = Mapping[tuple[str, int], float]
"""Seconds by phase and part."""

_ROUNDS = 5
"""The first is warm-up."""


def device_here() -> torch.device:
    """The accelerator of this machine; the CPU where there is none."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


class _Timed(Parts):
    """One round of a stage."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._turns: list[tuple[str, int, Stamp]] = []

    def turn(self, phase: str, part: int) -> None:
        """Note that a phase comes to a part; to none if it is empty."""
        self._turns.append((phase, part, self._clock.stamp()))

    def begins(self, part: int) -> None:
        super().begins(part)
        self.turn(FORWARD, part)

    def reaches(self, part: int, *_: object) -> None:
        phase, current, _ = self._turns[-1]
        if part != current:
            self.turn(phase, part)

    def seconds(self) -> Spent:
        read, spent = self._clock.reader(), defaultdict[tuple[str, int], float](float)
        for (phase, part, start), (_, _, end) in pairwise(self._turns):
            spent[phase, part] += read(end) - read(start)
        return spent


def profiled(
    stage: nn.Module, call: Callable[[], Any], inputs: Any, children: Sequence[nn.Module] | None, device: torch.device
) -> tuple[Spent, Any]:
    """Run ``call``, the forward of ``stage`` on ``inputs``, and its backwards. Returns what the parts took at
    least, as other rounds were disturbed, and the outputs."""
    parameters = [parameter for parameter in stage.parameters() if parameter.requires_grad]
    rounds = [_round(call, inputs, parameters, children, Clock(device)) for _ in range(_ROUNDS)]
    kept = [spent for spent, _ in rounds[1:]]
    return {key: min(spent[key] for spent in kept) for key in kept[0]}, rounds[-1][1]


def _round(
    call: Callable[[], Any], inputs: Any, parameters: Sequence[nn.Parameter], children: Sequence[nn.Module] | None,
    clock: Clock
) -> tuple[Spent, Any]:
    timed = _Timed(clock)
    leaves = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
    timed.turn(FORWARD, BEFORE)
    with timed.watched(children):
        outputs = call()
    graded = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
    gradients = [torch.ones_like(output) for output in graded]
    timed.follow(nodes_behind(graded))
    for phase, wanted in ((BOTH_GRADS, [*leaves, *timed.inputs, *parameters]), (INPUT_GRAD, [*leaves, *timed.inputs])):
        if graded and wanted:
            timed.turn(phase, AFTER)
            torch.autograd.grad(graded, wanted, gradients, retain_graph=phase == BOTH_GRADS, allow_unused=True)
    timed.turn("", AFTER)
    return timed.seconds(), outputs


def with_seconds(counted: Counted, spent: Spent, place: str) -> Counted:
    """``counted`` with the seconds that its parts took. A replay takes the share of the forward that was counted. An
    ArgumentError, if the stage has other blocks when it runs."""
    count = max((part for _, part in spent), default=BEFORE) + 1
    if count != len(counted.blocks):
        rule, works = "a stage has other blocks when it runs", "blocks that no value decides"
        raise_fault(Fault(rule, f"{place}: {count} in place of {len(counted.blocks)}", works))
    before, after = (_timed_part(part, spent, key) for part, key in ((counted.before, BEFORE), (counted.after, AFTER)))
    return replace(counted, before=before, after=after, blocks=tuple(
        _timed_part(part, spent, number) for number, part in enumerate(counted.blocks)
    ))  # fmt: skip


def _timed_part(part: Part, spent: Spent, number: int) -> Part:
    work: Block = part.work
    forward, both, inner = (spent.get((phase, number), 0.0) for phase in (FORWARD, BOTH_GRADS, INPUT_GRAD))
    again = work.recompute_seconds / work.forward_seconds if work.forward_seconds else 0.0
    inner = min(inner, both)
    return replace(part, work=replace(
        work, forward_seconds=forward, input_grad_seconds=inner, weight_grad_seconds=both - inner,
        recompute_seconds=again * forward,
    ))  # fmt: skip
