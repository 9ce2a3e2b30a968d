"""Adverse schedules: whatever is late, a pipeline leaves the same bits behind; and one that stands still says why.

``make slow`` has all programs, ``make test`` the first ones.
"""
from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from torch import nn

import torchckpt
from tests.device.programs import MODES, adversely, program
from tests.slow import few
from torchckpt.pipe.run.links import wait

FEW, ALL = 8, 350


def assert_same_whatever_is_late(sim, seed):
    one = program(seed)
    expected = one.run("never")
    assert not any(tensor.isnan().any() for tensor in expected)
    for place, mode in enumerate(MODES):
        with adversely(sim, 10 * seed + place):
            received = one.run(mode)
        differing = [at for at, pair in enumerate(zip(received, expected, strict=True)) if not torch.equal(*pair)]
        assert differing == [], f"program {seed}, {mode}"


@few(3)
@pytest.mark.parametrize("seed", range(FEW))
def test_a_program_leaves_the_same_bits_whatever_is_late(sim, seed):
    assert_same_whatever_is_late(sim, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FEW, ALL))
def test_every_program_leaves_the_same_bits_whatever_is_late(sim, seed):
    assert_same_whatever_is_late(sim, seed)


def kinds(one):
    names = {type(layer).__name__ for layer in one.module.modules()}
    yield from names & {"Keep", "Part", "Dropout", "BatchNorm1d"}
    yield from (f"inputs {len(one.inputs)}", f"look-ahead {one.lookahead}", f"devices {len(set(one.devices))}")
    yield "step" if one.steps else "backward"


def test_programs_are_of_all_kinds(sim):
    seen = Counter(kind for seed in range(ALL) for kind in kinds(program(seed)))
    assert len(seen) == 4 + 2 + 3 + 4 + 2
    assert min(seen.values()) >= 25


def test_a_missing_wait_would_show(sim, monkeypatch):
    """Without the waits of the links some programs differ, though the same ones are late."""

    def leaves_the_same(seed):
        expected = program(seed).run("never")
        with monkeypatch.context() as patch, adversely(sim, seed):
            for user in ("pipeline", "step"):
                name = f"torchckpt.pipe.run.{user}.wait"
                patch.setattr(name, lambda before, after, tensors: wait(None, None, tensors))
            return all(map(torch.equal, program(seed).run("always"), expected))

    assert not all(map(leaves_the_same, range(4)))


def test_a_pipeline_that_stands_still_says_which_stream_waits_for_which_event(sim):
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = torchckpt.Pipe(module, [1, 1], ["sim:0", "sim:1"], chunks=2, checkpoint="always")
    loss = pipe(torch.randn(4, 4)).sum()
    sim.synchronize()
    held = torch.accelerator.current_stream(1)
    with sim.held(held), sim.timeout(0.3):
        loss.backward()  # queued only: the last stage does not go on
        with pytest.raises(RuntimeError) as error:
            torch.accelerator.synchronize(0)
    said = re.sub(r"event \d+", "event #", re.sub(r"stream [1-9]\d*", "stream #", str(error.value)))
    said = re.sub(r"behind it: \d+", "behind it: #", said)
    assert "is not done after 0.3 s. What the streams do:" in said
    assert "sim:1 stream 0: waits for the host, which holds it, tasks behind it: #" in said  # who holds it up
    assert "sim:0 stream 0: waits for event #, recorded on stream # of sim:0, tasks behind it: #" in said
    assert re.search(r"sim:[01] stream #: waits for event #, recorded on stream 0 of sim:1", said)
