"""torchtitan's way: regions, then compile, then FSDP2, then a schedule, planned within a budget; two ranks."""
from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
EXAMPLE = str(ROOT / "examples/titan_llama.py")

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="no gloo")


def run(*arguments, processes=2):
    """What the example prints under torchrun. Past the time, torchrun is asked to end, and ends its processes."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*torchrun, EXAMPLE, *arguments], env=environment, **pipes) as started:
        try:
            printed, errors = started.communicate(timeout=300)
        except BaseException:
            started.terminate()
            raise
    assert started.returncode == 0, errors
    return printed


def check(printed, ranks=(0, 1)):
    losses = re.findall(r"^step +\d+   loss (\d\.\d{8})   without regions (\d\.\d{8})$", printed, re.MULTILINE)
    assert len(losses) == 6
    assert [loss for loss, without in losses if loss != without] == []
    assert len({loss for loss, _ in losses}) == 6
    assert f"parameters equal, to the bit, on ranks: {list(ranks)}\n" in printed
    assert "checkpoint_layers: 2 modules\n  blocks.0  Block\n  blocks.1  Block\n" in printed
    assert re.search(r"^planned +\d", printed, re.MULTILINE)
    assert re.search(r"^0 +0 +2 +\d+ +\d", printed, re.MULTILINE)


def test_compiled_blocks():
    check(run("--quick", "--backend", "eager"))


@pytest.mark.slow
def test_real_compilers_and_more_processes():
    check(run("--quick"))
    check(run("--quick", "--backend", "aot_eager"))
    check(run("--quick", "--no-compile", processes=4), ranks=range(4))
