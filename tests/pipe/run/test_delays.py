"""Delays on an accelerator, a real one too: whatever sleeps, a pipeline leaves the same bits behind.

Layers, their backwards and copies sleep at random on the streams that they run on. Where stages share a device nothing
is to be copied between them; here it is, so that one device has three streams that must wait for each other.
``tests/device/machine/test_adverse.py`` has more programs, for simulated devices, on which every operator may be late.
"""
from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import _pytree as pytree

from tests.accelerator import TYPE, module_of
from tests.device.programs import MODES, Program, program
from tests.slow import few, slow
from torchckpt.pipe.run import links
from torchckpt.pipe.run.links import wait

pytestmark = [pytest.mark.accelerator, pytest.mark.usefixtures("accelerator")]

PROGRAMS = 12
CYCLES = 2_000_000  # at most, about 1 ms


class Sleeper:
    """Makes a ``share`` of what runs late, as follows from ``seed``; counts how often."""

    def __init__(self, seed: int, share: float) -> None:
        self._draw, self._share = random.Random(seed), share
        self.count = 0

    def sleep(self, *ignored: object) -> None:
        """On the current stream."""
        if self._draw.random() < self._share:
            self.count += 1
            module_of(TYPE)._sleep(self._draw.randrange(CYCLES))

    def called(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        for output in pytree.tree_leaves(outputs):
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(self.sleep)  # the backward's stream is current then


@contextmanager
def asleep(monkeypatch: pytest.MonkeyPatch, seed: int = 0, share: float = 0.4) -> Iterator[Sleeper]:
    sleeper = Sleeper(seed, share)
    moved, transfer, usual = links._moved, links._transfer, sys.getswitchinterval()

    def slowly(tensor: Tensor, device: torch.device) -> Tensor:
        sleeper.sleep()
        return tensor.clone() if tensor.device == device else transfer(tensor, device)

    def in_turn(tensor: Tensor, source: Any, source_stream: Any, target: Any, target_stream: Any) -> Tensor:
        if source_stream is not None and target_stream is not None and source.device == target.device:
            # A copy between devices is on the one stream, and lets the other wait.
            target_stream.wait_stream(source_stream)
            tensor.record_stream(target_stream)
        return moved(tensor, source, source_stream, target, target_stream)

    hooks = [register_module_forward_pre_hook(sleeper.sleep), register_module_forward_hook(sleeper.called)]
    try:
        with monkeypatch.context() as patch:
            patch.setattr(links, "_transfer", slowly)
            patch.setattr(links, "_moved", in_turn)
            sys.setswitchinterval(random.Random(seed).choice([usual, 1e-5]))
            yield sleeper
            torch.accelerator.synchronize()
    finally:
        sys.setswitchinterval(usual)
        for hook in hooks:
            hook.remove()


def on_devices(seed: int, count: int) -> Program:
    return program(seed, [f"{TYPE}:{number}" for number in range(count)])


def awake(monkeypatch: pytest.MonkeyPatch, program: Program) -> list[Tensor]:
    """What it leaves behind where nothing sleeps; copies are made all the same, as kernels may round by strides."""
    with asleep(monkeypatch, share=0.0):
        return program.run("never")


@few(1)
@pytest.mark.parametrize("count", [1, 2], ids=["one device", "two devices"])
@pytest.mark.parametrize("seed", [*range(4), *slow(range(4, PROGRAMS))])
def test_a_program_leaves_the_same_bits_whatever_sleeps(monkeypatch, seed, count):
    if count > torch.accelerator.device_count():
        pytest.skip(f"needs two {TYPE} devices")
    program = on_devices(seed, count)
    expected = awake(monkeypatch, program)
    assert not any(tensor.isnan().any() for tensor in expected)
    for place, mode in enumerate(MODES):
        with asleep(monkeypatch, 10 * seed + place) as sleeper:
            received = program.run(mode)
        pairs = enumerate(zip(received, expected, strict=True))
        differing = [number for number, pair in pairs if not torch.equal(*pair)]
        assert differing == [], f"program {seed}, {mode}"
        assert sleeper.count


def test_a_missing_wait_would_show_on_one_device(monkeypatch):
    """Without the waits of the links some programs differ, though the same things sleep."""

    def leaves_the_same(seed: int) -> bool:
        program = on_devices(seed, 1)
        expected = awake(monkeypatch, program)
        with monkeypatch.context() as patch, asleep(monkeypatch, seed):
            for user in ("pipeline", "step"):
                name = f"torchckpt.pipe.run.{user}.wait"
                patch.setattr(name, lambda before, after, tensors: wait(None, None, tensors))
            return all(map(torch.equal, program.run("always"), expected))

    assert not all(map(leaves_the_same, range(6)))
