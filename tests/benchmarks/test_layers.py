"""The benchmark of budgets over layers, its short version: bytes, FLOPs and bits, no seconds."""
from __future__ import annotations

import json

import pytest

from benchmarks.layers import beside, large
from benchmarks.turns import Spread
from tests.scripts import ROOT, printed_by
from tests.slow import slow


@pytest.fixture(scope="module", params=slow(["gpt6", "resnet20", "unet"]))
def model(request):
    (model,) = printed_by("layers/short.py", request.param, timeout=900)
    return model


def test_gradients_are_eagers_to_the_bit(model):
    assert {key: row["gradients"] for key, row in model["rows"].items() if row["gradients"] != "equal"} == {}


def test_no_step_takes_more_than_its_budget_nor_recomputes_more_than_the_best_of_every_kth_that_fits(model):
    assert model["verdict"]["budgets"] >= 3
    assert model["verdict"]["over budget"] == model["verdict"]["more FLOPs"] == []


def test_where_everything_fits_nothing_is_recomputed(model):
    row = model["rows"]["budget=, everything fits"]
    assert row["flops"] == 0
    assert row["peak bytes"] == model["eager bytes"]


def test_each_way_has_a_row(model):
    starts = ("budget=, bytes of every=", "rematerialize, bytes of every=", "every=", "SAC, ")
    assert [start for start in starts if not any(key.startswith(start) for key in model["rows"])] == []


def test_the_picture_has_a_chart_of_each_model(model, tmp_path):
    for row in model["rows"].values():
        row["step"] = Spread(1.0, 1.0 + row["flops"], 1.5)
    beside.draw([model, model], tmp_path / "beside.svg")
    text = (tmp_path / "beside.svg").read_text()
    assert text.count("bytes and extra time, by layers and otherwise") >= 2
    assert [tool for tool in ("every=k", "rematerialize", "selective policies") if tool not in text] == []


def test_the_table_of_the_page_is_that_of_the_results_on_a_gpu(capsys, tmp_path):
    found = json.loads((ROOT / "benchmarks/results/nvidia-h100-80gb-hbm3.json").read_text())["layers"]["large"]
    large.show(found)
    page = (ROOT / "benchmarks/layers/README.md").read_text().partition("## On a GPU")[2]
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 12
    for _, budget, peak, planned, step, *_ in rows[1:]:
        assert f"| {budget} | {peak} | {planned} | {step} |" in page
    assert {row[-1] for row in rows} == {"equal |"}
    large.draw(found, tmp_path / "large.svg")
    assert (tmp_path / "large.svg").read_text() == (ROOT / "benchmarks/layers/large.svg").read_text()
