"""The ResNet of the examples trains within its budget as it does without one."""
from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.scripts import HOME, ROOT, run, run_script

EXAMPLE = "examples/fit_resnet.py"
SMALL = ("--depth", "8", "--batch", "4")


@pytest.fixture(scope="module")
def printed():
    # A fork has tensors from before, and torch's profiler writes to stderr where one of them is freed.
    command = [sys.executable, str(ROOT / EXAMPLE), *SMALL, "--steps", "3", "--budget", "2MB"]
    done = subprocess.run(command, env=HOME, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def cells(printed, row):
    line = next(line for line in printed.splitlines() if line.startswith(row))
    return line.removeprefix(row).split()


@pytest.mark.slow
def test_its_losses_are_equal(printed):
    eager, fitted = cells(printed, "loss, step 3")
    assert eager == fitted
    assert re.fullmatch(r"\d\.\d{8}", eager)


def test_losses_parameters_and_running_statistics_are_equal_to_the_bit(printed):
    told = " ".join(cells(printed, "all bit-equal"))
    assert told == "yes 3 losses, 23 parameters, 21 running statistics"


def test_it_needs_what_the_plan_says_and_that_is_within_the_budget(printed):
    measured, planned = (
        [int(cell.replace(",", "")) for cell in cells(printed, row)[:2]] for row in ("peak, bytes", "as planned")
    )
    assert measured == pytest.approx(planned, rel=1e-4)
    eager, fitted = measured
    assert fitted <= 2_000_000 < eager


def test_it_tells_how_long_a_step_takes(printed):
    assert re.fullmatch(r"[\d.]+ [\d.]+ x [\d.]+ \([\d.]+ to [\d.]+\)", " ".join(cells(printed, "step, s")))


@pytest.mark.slow  # as of any model: tests/graph/whole/test_models.py
def test_a_budget_that_is_too_small_is_answered_by_one_that_is_not():
    done = run_script(EXAMPLE, *SMALL, "--budget", "1MB")
    assert done.returncode == 1
    assert re.search(r'works: +budget="1\.\d+MB" or more', done.stderr)


def test_a_depth_that_no_such_network_has():
    done = run_script(EXAMPLE, *SMALL, "--depth", "21")
    assert done.returncode == 2
    assert "--depth is 6n + 2, such as 20, 56 or 110; received: 21" in done.stderr


@pytest.mark.slow
def test_the_command_finds_its_model_and_an_example():
    code = "from examples.fit_resnet import model; network, images = model(8, 2); print(network(images).shape)"
    done = run("-c", code)
    assert (done.stdout, done.stderr) == ("torch.Size([2, 4])\n", "")
