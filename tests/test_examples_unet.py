"""The U-Net of the examples trains in a pipeline as it does without one, and keeps less."""
from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def printed():
    # Rows that 4 micro-batches do not share evenly.
    command = [sys.executable, str(ROOT / "examples/unet.py"), "--steps", "3", "--rows", "6", "--width", "4"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def cells(printed, row):
    line = next(line for line in printed.splitlines() if line.strip().startswith(row))
    return line.split()[-3:]


def test_it_names_the_three_models(printed):
    assert re.search(r"plain Sequential +2 stages \[4, 4\] +4 stages \[2, 2, 2, 2\]$", printed, re.MULTILINE)


def test_its_losses_are_equal(printed):
    losses = cells(printed, "3 steps")
    assert len(set(losses)) == 1
    assert re.fullmatch(r"\d\.\d{8}", losses[0])


def test_losses_parameters_and_running_statistics_are_equal_to_the_bit(printed):
    assert cells(printed, "all bit-equal") == ["yes"] * 3


def test_pipelines_keep_less(printed):
    plain, two, four = map(float, cells(printed, "kept, MiB"))
    assert max(two, four) < plain / 4


def test_pipelines_need_less_at_most(printed):
    plain, two, four = map(float, cells(printed, "at most, MiB"))
    assert max(two, four) < plain
