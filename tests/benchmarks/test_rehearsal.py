"""What ``make gpu-bench`` runs, small: on the accelerator, which is the simulated device where there is no GPU."""
from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from benchmarks import run
from tests.accelerator import TYPE
from tests.scripts import ROOT

pytestmark = pytest.mark.accelerator
RUN = [sys.executable, str(ROOT / "benchmarks/run.py"), "--rehearse"]
FOUND = {  # a part of what each writes
    "layers": {"large"},
    "graph": {"frontier", "policies", "ResNet-200", "exactness"},
    "overhead": {"overhead", "bytes kept"},
    "pipe": {"one device", "all devices"},
    "pipeline": {"stages that pause", "GPT-2 small"},
}


def rehearse(folder, *arguments):
    command = [*RUN, "--out", str(folder), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pipeline", "graph", "layers", "overhead", "pipe"])
def test_a_benchmark_runs_to_its_end(tmp_path, name):
    done = rehearse(tmp_path, "--only", name)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.iterdir()
    found = json.loads(file.read_text())
    assert list(found) == [name]
    assert FOUND[name] <= set(found[name])


@pytest.mark.slow
def test_a_benchmark_that_fails_is_named_and_what_others_measured_stays(tmp_path):
    file = tmp_path / f"{run.slug(TYPE)}.json"
    file.write_text(json.dumps({"overhead": {"rounds": 20}}))
    done = rehearse(tmp_path, "--only", "pipeline", "--no-such-option")
    assert done.returncode == 1
    assert "failed: pipeline (exit status 2)" in done.stderr
    assert json.loads(file.read_text()) == {"overhead": {"rounds": 20}}
