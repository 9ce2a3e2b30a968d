"""The GPT that trains three ways: equal losses and weights; what moves is off the device."""
from __future__ import annotations

import re

import pytest

from tests.device import why_not
from tests.scripts import ROOT, run, run_script

NAMES = ["plain", "checkpoint_layers", "offload_layers"]


def rows(printed):
    """By way: the last loss, whether it is equal, and the peak."""
    found = {}
    for line in printed.splitlines():
        if line.split()[:1] and line.split()[0] in NAMES:
            name, loss, equal, peak, _ = line.split()
            found[name] = loss, equal, peak
    return found


def assert_equal_losses(found):
    assert list(found) == NAMES
    assert len({loss for loss, _, _ in found.values()}) == 1
    assert [equal for _, equal, _ in found.values()] == ["yes"] * 3


def test_on_the_cpu_it_says_that_there_is_nothing_to_move():
    done = run_script("examples/offload_gpt.py", "--quick", "--steps", "3", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert "torchckpt.offload: there is nothing to move" in done.stderr
    found = rows(done.stdout)
    assert_equal_losses(found)
    assert {peak for _, _, peak in found.values()} == {"-"}


ON_THE_SIMULATED_DEVICE = """
import runpy, sys
from tests.device import load
load(1)
sys.path.insert(0, "examples")
sys.argv = ["offload_gpt.py", "--quick", "--steps", "3", "--device", "sim:0", *{options}]
runpy.run_path("examples/offload_gpt.py", run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.accelerator
@pytest.mark.skipif(why_not() is not None, reason="no simulated device")
def test_on_a_device_offloading_takes_less_memory():
    def peaks(*options):
        done = run("-c", f"import os; os.chdir({str(ROOT)!r})" + ON_THE_SIMULATED_DEVICE.format(options=list(options)))
        assert done.returncode == 0, done.stderr
        assert done.stderr == "" or "nothing to move" not in done.stderr
        found = rows(done.stdout)
        assert_equal_losses(found)
        assert all(re.fullmatch(r"\d+\.\d\d", peak) for _, _, peak in found.values())
        return {name: float(peak) for name, (_, _, peak) in found.items()}

    every, second = peaks(), peaks("--every", "2")
    assert every["offload_layers"] < 0.6 * every["plain"]
    assert every["offload_layers"] < second["offload_layers"] < second["plain"]
