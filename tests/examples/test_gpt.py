"""The examples run from beginning to end, and say what they promise."""
from __future__ import annotations

import re

import pytest

from tests.scripts import run_script

ROWS = [
    "loss after 2 steps",
    "gradients bit-equal",
    "kept by stage 0, MiB",
    "kept by stage 1, MiB",
    "peak of a step, MiB",
    "recomputed a step, GFLOP",
    "seconds a step, median",
]


def example(*arguments):
    return run_script("examples/train_gpt.py", *arguments)


@pytest.fixture(scope="module")
def printed():
    done = example("--quick")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def cells(printed):
    """The table's cells by row: no checkpointing, torch.utils.checkpoint, torchckpt always, torchckpt except_last."""
    lines = {row: line for row in ROWS for line in printed.splitlines() if line.startswith(row)}
    return {row: line.removeprefix(row).split() for row, line in lines.items()}


def test_gpt_prints_a_table_of_four_variants(cells):
    assert list(cells) == ROWS
    assert {len(row) for row in cells.values()} == {4}


def test_gpt_has_the_same_loss_in_all_variants(cells):
    losses = cells["loss after 2 steps"]
    assert len(set(losses)) == 1
    assert re.fullmatch(r"\d\.\d{8}", losses[0])


def test_gpt_has_the_same_gradients_in_all_variants(cells):
    assert cells["gradients bit-equal"] == ["yes"] * 4


@pytest.mark.parametrize("row", ["recomputed a step, GFLOP", "kept by stage 0, MiB", "kept by stage 1, MiB"])
def test_gpt_costs_no_more_with_torchckpt_than_with_torch(cells, row):
    _, stock, always, _ = map(float, cells[row])
    assert always <= stock


def test_gpt_recomputes_all_but_the_last_micro_batch_by_default(cells):
    _, _, always, default = map(float, cells["recomputed a step, GFLOP"])
    assert default == pytest.approx(always * 3 / 4, abs=1e-3)


def test_gpt_needs_less_memory_with_torchckpt(cells):
    plain, _, always, default = map(float, cells["peak of a step, MiB"])
    assert max(always, default) < plain / 2


def test_gpt_goes_on_and_writes(printed):
    assert re.search(r"^step +6   loss \d\.\d{3}   [\d,]+ tokens/s$", printed, re.MULTILINE)
    assert "\ndef " in printed


def test_gpt_ends_with_what_was_shown(printed, cells):
    said = " ".join(printed.splitlines()[-2:])
    plain, _, ours, _ = (f"{float(cell):.0f}" for cell in cells["peak of a step, MiB"])
    assert said.startswith("Recomputation changed no bit of the loss and the gradients. ")
    assert f"{ours} MiB in place of {plain}, for " in said
    assert said.count(". ") == 1


def test_gpt_names_a_device_that_there_is():
    done = example("--quick", "--device", "abacus")
    assert done.returncode != 0
    assert "--device abacus: there is none here; --device " in done.stderr
