"""The benchmark of the pipeline, its short version: counts and orders of events on real processes, no seconds."""
from __future__ import annotations

import pytest

from tests.distributed.stages import not_on_old_stages
from tests.scripts import ROOT, printed_by, run_script


@pytest.fixture(scope="module")
def cells():
    return printed_by("pipeline/short.py", timeout=900)


@pytest.fixture(scope="module")
def forwards():
    return printed_by("pipeline/short.py", "forwards", timeout=900)


ORDERS = {
    "gpipe-2-4-10": [
        #  forwards           kept      recomputed before their backwards
        "0F0 0F1 0F2 0F3      0B0       0R1 0B1   0R2 0B2   0R3 0B3",
        "1F0 1F1 1F2 1F3      1B0       1R1 1B1   1R2 1B2   1R3 1B3",
    ],
    "1f1b-2-4-10": [
        #  ahead     kept   in turn
        "0F0 0F1     0B0    0F2 0R1 0B1   0F3 0R2 0B2   0R3 0B3",
        "1F0 1B0            1F1 1B1       1F2 1B2       1F3 1B3",  # holds one micro-batch, and keeps it
    ],
}


@pytest.mark.parametrize("cell", ORDERS)
def test_each_rank_recomputes_one_micro_batch_ahead(cells, cell):
    assert cells[cell]["order"] == [" ".join(order.split()) for order in ORDERS[cell]]


@pytest.mark.parametrize(("cell", "replays"), [("gpipe-2-4-10", [3, 3]), ("1f1b-2-4-10", [3, 0])])
def test_blocks_are_replayed_once_for_each_recompute(cells, cell, replays):
    assert cells[cell]["replays"] == replays


@pytest.mark.parametrize(("cell", "early"), [("gpipe-2-4-10", 1), ("1f1b-2-4-10", 3)])
def test_recomputes_begin_before_their_gradients_arrive(cells, cell, early):
    assert cells[cell]["began before the gradient arrived"][0] >= early


@pytest.mark.parametrize("cell", ORDERS)
def test_gradients_are_equal_to_the_bit_without_checkpointing_with_torchs_and_with_ours(cells, cell):
    assert cells[cell]["gradients bit-equal"]


@not_on_old_stages("two stages on one rank fail with gloo, which cannot send to itself")
@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["interleaved zero bubble", "ZB-V", "DualPipeV"])
def test_a_split_backward_recomputes_each_block_once(forwards, schedule):
    assert forwards[schedule]["none"] == [8, 8]
    assert forwards[schedule]["ours"] == [16, 16]


def test_the_first_picture_is_that_of_the_stored_results(tmp_path):
    done = run_script("benchmarks/pipeline/cost.py", "--out", str(tmp_path / "cost.svg"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "cost.svg").read_text() == (ROOT / "docs/cost.svg").read_text()
    assert len(done.stdout.splitlines()) == 1 + 5
