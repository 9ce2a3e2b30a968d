"""The U-Net of the examples trains in a pipeline as it does without one, and keeps less."""
from __future__ import annotations

import re

import pytest

from tests.scripts import run_script


@pytest.fixture(scope="module")
def printed():
    # Rows that 4 micro-batches do not share evenly.
    done = run_script("examples/unet.py", "--steps", "3", "--rows", "6", "--width", "4")
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
