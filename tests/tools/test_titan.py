"""torchtitan's way: regions, then compile, then FSDP2, then a schedule, planned within a budget; two ranks."""
from __future__ import annotations

import re

import pytest

from tests.distributed.ranks import script_on_ranks
from tests.scripts import ROOT
from tests.settings import with_gloo

EXAMPLE = str(ROOT / "examples/titan_llama.py")

pytestmark = with_gloo


@pytest.fixture
def run(tmp_path_factory):
    """What the example prints."""
    return lambda *arguments, ranks=2: script_on_ranks(
        EXAMPLE, "--quick", *arguments, folder=tmp_path_factory.mktemp("ranks"), ranks=ranks, timeout=300
    )


def check(printed, ranks=(0, 1)):
    losses = re.findall(r"^step +\d+   loss (\d\.\d{8})   without regions (\d\.\d{8})$", printed, re.MULTILINE)
    assert len(losses) == 6
    assert [loss for loss, without in losses if loss != without] == []
    assert len({loss for loss, _ in losses}) == 6
    assert f"parameters equal, to the bit, on ranks: {list(ranks)}\n" in printed
    assert "checkpoint_layers: 2 modules\n  blocks.0  Block\n  blocks.1  Block\n" in printed
    assert re.search(r"^planned +\d", printed, re.MULTILINE)
    assert re.search(r"^0 +0 +2 +\d+ +\d", printed, re.MULTILINE)


@pytest.mark.slow
def test_compiled_blocks(run):
    check(run("--backend", "eager"))


@pytest.mark.slow
def test_real_compilers_and_more_processes(run):
    check(run())
    check(run("--backend", "aot_eager"))
    check(run("--no-compile", ranks=4), ranks=range(4))
