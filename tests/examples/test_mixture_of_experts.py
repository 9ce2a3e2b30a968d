"""The mixture of experts of the examples fails where its router is asked again, and trains where that is kept."""
from __future__ import annotations

import re

import pytest

from tests.scripts import run_script


@pytest.fixture(scope="module")
def printed():
    done = run_script("examples/mixture_of_experts.py", "--steps", "3", "--rows", "64")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_its_losses_are_equal(printed):
    rows = [line.split()[-3:] for line in printed.splitlines()[:3]]
    assert rows[0] == rows[1] == rows[2]
    assert len(set(rows[0])) == 3
    assert "the losses of 3 steps are to the bit those without checkpointing" in printed


def test_without_keep_it_fails(printed):
    assert "CheckpointError: torch.utils.checkpoint: " in printed


def test_it_keeps_less(printed):
    kept, everything = map(float, re.search(r"keeps ([\d.]+) MB in place of ([\d.]+) MB", printed).groups())
    assert kept < everything / 3
