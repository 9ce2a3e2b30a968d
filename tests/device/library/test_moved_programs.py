"""Random programs with regions that move: whatever is late, the same bits, and the same bytes at every boundary.

A program follows from its seed: layers with dropout, norms and attention, micro-batches whose forwards and backwards
take turns, and for each call of a layer whether it is a plain one, recomputed, moved by the default order, or moved by
a schedule that lets go of it and fetches it at random boundaries. ``make slow`` has all programs, ``make test`` some.
"""
from __future__ import annotations

import gc
import random
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchckpt
from tests.device import Rates
from tests.slow import few
from torchckpt.regions.flags import local
from torchckpt.regions.moved.region import Moved

FEW, ALL = 10, 350
DEVICE, ROWS, WIDTH = "sim:0", 6, 8
KINDS = ("plain", "recomputed", "by default", "by default", "driven", "driven")


class Mixed(nn.Module):
    """A layer of several operators, some of whose results are views."""

    def __init__(self, heads):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(WIDTH)
        self.parts, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.parts(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(1, 2, 0, 3)
        mixed = ((q @ k.mT).softmax(-1) @ v).transpose(0, 1).flatten(1)
        return x + F.dropout(self.out(mixed), 0.2)


def layer(draw):
    return draw.choice([
        lambda: Mixed(draw.choice([1, 2])),
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.3)),
        lambda: nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False)),
        lambda: nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GLU(), nn.LayerNorm(WIDTH)),
    ])()


class Idle:
    """The order of regions that the program itself drives."""

    def begins(self, region):
        pass

    def returns(self, region):
        pass


class Program:
    def __init__(self, seed):
        draw = self.draw = random.Random(seed)
        torch.manual_seed(seed)
        self.seed = seed
        self.layers = nn.ModuleList(layer(draw) for _ in range(draw.randint(2, 6))).to(DEVICE)
        self.state = {name: value.clone() for name, value in self.layers.state_dict().items()}
        micro_batches = draw.randint(1, 4)
        self.inputs = [torch.randn(ROWS, WIDTH, device=DEVICE) for _ in range(micro_batches)]
        self.kinds = {(batch, place): draw.choice(KINDS) for batch in range(micro_batches) for place in range(6)}
        self.least_bytes, self.retains = draw.choice([1, 100, 200]), draw.random() < 0.2
        self.actions = list(_turns(draw, micro_batches))

    def run(self, moves=True):
        """Losses, gradients and buffers, on the CPU; and the bytes of the device at each boundary."""
        self.layers.load_state_dict(self.state)
        self._choose, self._regions, self._levels = random.Random(self.seed), [], []
        gc.collect()
        torch.accelerator.synchronize()
        before = torch.accelerator.memory_allocated(0)
        torch.manual_seed(self.seed)
        losses, found = {}, []
        for action, batch in self.actions:
            if action == "F":
                losses[batch] = self._forward(batch, moves)
            else:
                loss = losses.pop(batch)
                if self.retains:
                    loss.backward(retain_graph=True)
                loss.backward()
                found.append(loss.detach())
        found += [parameter.grad for parameter in self.layers.parameters()] + list(self.layers.buffers())
        results = [one.cpu() for one in found]
        self.layers.zero_grad(set_to_none=True)
        return results, [level - before for level in self._levels]

    def _forward(self, batch, moves):
        x = self.inputs[batch]
        for place, one in enumerate(self.layers):
            self._boundary()
            x = self._call(self.kinds[batch, place] if moves else "plain", one, x)
            x.register_hook(lambda grad: self._boundary())
        return x.square().mean()

    def _call(self, kind, layer, x):
        if kind == "recomputed":
            return torchckpt.checkpoint(layer, x)
        if kind == "by default":
            return torchckpt.offload(layer, x, min_bytes=self.least_bytes)
        if kind == "plain":
            return layer(x)
        before, local.thread.order = local.thread.order, Idle()
        try:
            region = Moved(self.least_bytes)
            self._regions.append(region)
            return region.forward(layer, (x,), {})
        finally:
            local.thread.order = before

    def _boundary(self):
        for region in self._regions:
            if self._choose.random() < 0.4:
                region.send()
            if self._choose.random() < 0.4:
                region.release()
            elif self._choose.random() < 0.2:
                region.issue()
        self._levels.append(torch.accelerator.memory_allocated(0))


def _turns(draw, micro_batches):
    """F and B of each micro-batch, each B behind its F."""
    waiting, alive = list(range(micro_batches)), []
    while waiting or alive:
        if waiting and (not alive or draw.random() < 0.5):
            alive.append(waiting.pop(0))
            yield "F", alive[-1]
        else:
            yield "B", alive.pop(draw.randrange(len(alive)))


def assert_same_whatever_is_late(sim, seed):
    program = Program(seed)
    local.thread.order = None
    expected, _ = program.run(moves=False)
    received, levels = program.run()
    assert not any(tensor.isnan().any() for tensor in expected)
    assert all(map(torch.equal, received, expected)), f"program {seed}"
    late = random.Random(seed)
    with sim.durations(Rates(seconds_per_copy=late.choice([0.0002, 0.0008]))):
        with sim.delays(seed, most_seconds=late.choice([0.0003, 0.001]), share=late.choice([0.1, 0.4])):
            received, levels_of_late = program.run()
    assert all(map(torch.equal, received, expected)), f"program {seed}, late"
    assert levels_of_late == levels, f"program {seed}, late"


@few(1)
@pytest.mark.parametrize("seed", range(FEW))
def test_a_program_leaves_the_same_bits_and_bytes_whatever_is_late(sim, seed):
    assert_same_whatever_is_late(sim, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FEW, ALL))
def test_every_program_leaves_the_same_bits_and_bytes_whatever_is_late(sim, seed):
    assert_same_whatever_is_late(sim, seed)


def test_programs_are_of_all_kinds(sim):
    seen = Counter()
    for seed in range(0, ALL, 10):
        program = Program(seed)
        seen.update({type(module).__name__ for module in program.layers})
        seen.update({f"{len(program.inputs)} micro-batches", f"retains: {program.retains}", *program.kinds.values()})
    assert len(seen) == 2 + 4 + 2 + 4
    assert min(seen.values()) >= 4


def test_a_missing_wait_would_show(sim, monkeypatch):
    """Without the wait of the backward some programs differ, though the same ones are late."""
    from torchckpt.regions.moved.copies import Bytes

    def leaves_the_same(seed):
        program = Program(seed)
        expected, _ = program.run(moves=False)
        with monkeypatch.context() as patch, sim.delays(seed, most_seconds=0.001, share=0.4):
            patch.setattr(Bytes, "wait", lambda self: None)
            received, _ = program.run()
        return all(map(torch.equal, received, expected))

    assert not all(map(leaves_the_same, range(6)))
