"""Published runs: the figures of the accuracy page are those that the script prints, and rows say why they fail."""
from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest

from benchmarks.published import fields, fit, pairs, predict, runs
from tests.scripts import ROOT
from torchckpt.jobs import memory_of

HERE = ROOT / "benchmarks" / "published"
PAGE = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def rows():
    return runs.read_runs(HERE / "rows.json")


@pytest.fixture(scope="module")
def printed(rows):
    return "\n".join(predict.report(rows))


def shares(errors):
    return [abs(error.share) * 100 for error in errors]


@pytest.mark.slow
def test_step_times(rows):
    errors = predict.times(rows, predict.KINDS[0])
    assert len(errors) == 228
    assert predict.median(shares(errors)) < 6
    assert predict.quantile(shares(errors), 0.9) < 18
    sources = {error.run.source_name for error in errors}
    for source in sources:
        chosen = shares(error for error in errors if error.run.source_name == source)
        assert len(chosen) < 5 or predict.median(chosen) < 12, source


@pytest.mark.slow
def test_memory(rows):
    errors = predict.memories(rows)
    tight = shares(error for error in errors if error.run.source_name in ("zb", "vocabpp"))
    assert len(tight) == 68
    assert predict.median(tight) < 3
    assert predict.quantile(tight, 0.9) < 6
    assert re.search(r"within 0.95 to 1.35: 31 of 36", "\n".join(predict.report(rows)))


def test_pairs(rows):
    named = pairs.pairs_of(rows)
    for name, count, middle, most in (
        ("full against selective or none", 13, 4, 7), ("schedule against 1F1B", 50, 2, 5),
    ):  # fmt: skip
        points = [abs(pair.predicted - pair.measured) * 100 for pair in named[name]]
        assert len(points) == count
        assert predict.median(points) < middle
        assert predict.quantile(points, 0.9) < most
    alike = named["TP against PP, same DP and micro-batch"]
    assert sum(pair.sign_is_right for pair in alike) >= 9


def test_the_page_has_the_figures_that_are_printed(printed):
    """Each line of the page's block is one that the script prints."""
    block = re.search(r"```text\n(.*?)```", PAGE, re.DOTALL)[1]
    lines = [line for line in block.splitlines() if line.strip()]
    assert len(lines) > 40
    assert [line for line in lines if line not in printed.splitlines()] == []


def test_rows_that_cannot_be_predicted_say_why_and_count(printed, rows):
    assert "micro batch is not printed" in printed
    bare = runs.Run({**rows[0].row, "layers": None})
    assert bare.reason(timed=True) == "layers is not printed"
    odd = runs.Run({**rows[0].row, "pp": 4, "gpus": 32, "schedule": "interleaved_1f1b", "microbatches_per_step": 9})
    assert "do not divide into m // ranks rounds" in odd.reason(timed=True)
    no_layout = runs.Run({**rows[0].row, **dict.fromkeys(("tp", "cp", "pp", "dp", "fsdp")), "gpus": 8})
    assert no_layout.reason(timed=True) == no_layout.reason(timed=False) == "the layout is not printed"
    for card in ("TPU v5", "H100 PCIe", "A100-PCIE-40GB", "A100 40GB PCIe", "H100 NVL"):
        assert runs.Run({**rows[0].row, "gpu": card}).reason(timed=True) == f"no data sheet of {card}"
    assert runs.Run({**rows[0].row, "gpu": "A100 80GB (NVLink)"}).device_name == "A100"
    assert runs.Run({**rows[0].row, "precision": "fp32"}).reason(timed=True) == "no rate of products in fp32"
    assert runs.Run({**rows[0].row, "precision": "BF16"}).kind == rows[0].kind == predict.KINDS[0]


WRONG = {
    "a text": (5, [1], {"a": 1}, True, "\ud800"), "true or false": (1, "x", []),
    "an object of whole numbers": (1, [], {"topk": "2"}, {"mla": 1}, {"mla": {"q_lora": "1"}}),
    "a whole number": (-1, 1.5, "8", float("nan"), 10**400, True, [1]),
    "a number": (-1, "x", float("nan"), float("inf"), True, 1e-300),
}  # fmt: skip


def test_values_of_another_kind_cannot_be_predicted_and_count(tmp_path, rows, capsys):
    """For each field a file of the first row with odd values. The report has all of them, with the reason."""
    path, row = tmp_path / "rows.json", rows[0].row
    odd = [(key, kind, value) for kind, keys in fields._KINDS.items() for key in keys for value in WRONG[kind]]
    path.write_text(json.dumps([row, *({**row, key: value} for key, _, value in odd)]))
    predict.main(["--rows", str(path)])
    printed = capsys.readouterr().out
    assert printed.count(f"not predicted, time: {len(odd)} rows") == 1
    assert printed.count(f"not predicted, memory: {len(odd)} rows") == 1
    assert [key for key, kind, _ in odd if f"  {key} is not {kind}: " not in printed] == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dp": None, "fsdp": 8}, "more ranks share the state than dp x cp: fsdp=8, dp=1, cp=1"),
        ({"moe": {"experts": 8, "topk": None, "moe_ffn": 8}}, "a model with experts lacks active"),
        ({"heads": 7, "head_dim": None}, "hidden of the model does not divide by its heads"),
        ({"gpus": 100}, "the 100 GPUs are not tp x cp x pp x dp: tp=1, cp=1, pp=1, dp=8"),
        ({"dp": None, "fsdp": None}, "the 8 GPUs are not tp x cp x pp x dp: tp=1, cp=1, pp=1, dp=1"),
        ({"microbatches_per_step": 2**20}, "the step is too long to simulate: 1 stages x 1048576 micro-batches"),
    ],
)
def test_a_row_without_a_step_says_why(change, reason, rows):
    odd = runs.Run({**rows[0].row, **change})
    assert reason in odd.reason(timed=True)
    assert reason in odd.reason(timed=False)


@pytest.mark.parametrize(
    ("sharding", "stage", "dtypes", "parts"),
    [
        ("distributed optimizer", 1, "", (2.0, 4.0, 12 / 4)),
        ("ZeRO stage 1", None, "", (2.0, 2.0, 12 / 4)),
        ("ZeRO", 1, "", (2.0, 2.0, 12 / 4)),
        ("ZeRO-2", None, "", (2.0, 2 / 4, 12 / 4)),
        ("DeepSpeed ZeRO 3", 3, "", (2 / 4, 2 / 4, 12 / 4)),
        ("sharding stage 3, degree 4", None, "", (2 / 4, 2 / 4, 12 / 4)),
        ("FSDP2", 3, "", (4 / 4, 4 / 4, 8 / 4)),
        ("FSDP2", 3, "all bf16", (2 / 4, 2 / 4, 4 / 4)),
    ],
)
def test_the_state_is_shared_as_the_row_says_by_context_parallel_ranks_too(sharding, stage, dtypes, parts, rows):
    states = {"state_dtypes": dtypes} if dtypes else {}
    changes = {"optimizer_sharding": sharding, "zero_stage": stage, "fsdp": None, "dp": 2, "cp": 2, "gpus": 4, **states}
    dense = {"recompute": "full", "micro_batch": 1, "framework": "DeepSpeed", "microbatches_per_step": 2}
    run = runs.Run({**rows[0].row, **changes, **dense})
    (memory,) = memory_of(run.job)
    each = [size / run.sizes.parameters for size in (memory.weights, memory.gradients, memory.optimizer)]
    assert each == pytest.approx(parts)


def test_learned_positions_and_biases_count_where_the_row_has_them(rows):
    words = {}, {"model_kind": "dense gpt (learned positions)"}, {"notes": "learned positions, linear biases"}
    plain, positions, biases = (runs.Run({**rows[0].row, **each}).sizes for each in words)
    assert positions.parameters - plain.parameters == plain.hidden * rows[0].seq_len
    assert biases.positions == rows[0].seq_len
    assert (plain.has_biases, biases.has_biases) == (False, True)


def test_latent_attention_is_read(rows):
    (run,) = (run for run in rows if run.moe and run.moe.get("mla"))
    assert run.sizes.parameters == 671_026_404_352
    no_query = {**run.moe, "mla": {**run.moe["mla"], "q_lora": None}}
    assert runs.Run({**run.row, "moe": no_query}).sizes.query_rank == 0


@pytest.mark.parametrize(
    ("framework", "compiled", "sharding", "size"),
    [
        ("torchtitan 820504e (2025-06)", True, "FSDP2", 4), ("torchtitan 9dec370 (2024-12)", True, "FSDP2", 14),
        ("torchtune (2024-11)", True, "none", 14), ("torchtune", True, "none", 14), ("torchtune", False, "none", 14),
        ("Megatron-Core", False, "none", 10),
    ],
)  # fmt: skip
def test_bytes_of_a_logit_are_those_of_the_framework(framework, compiled, sharding, size, rows):
    row = {**rows[0].row, "framework": framework, "compile": compiled, "optimizer_sharding": sharding}
    assert runs.Run(row).software.loss_bytes == size
    assert runs.Run(row, levers=frozenset(["chunk"])).software.loss_bytes == 4 + size / 8


def test_recomputed_layers_are_as_many_as_the_row_says(rows):
    row = {**rows[0].row, "recompute": "selective", "framework": "torchtitan"}
    shares = {f"every {every} layer": 1 / int(every[0]) for every in ("2nd", "3rd", "4th")}
    for detail, share in shares.items():
        assert runs.Run({**row, "recompute_detail": detail}).layout.recomputed_share == share
    unknown = {"recompute_detail": "a share of the layers", "hfu_pct": 50, "mfu_pct": None}
    assert runs.Run({**row, "recompute": "full", **unknown}).layout.recomputed_share == 1


def test_a_file_of_the_same_form(tmp_path, rows, capsys):
    few = tmp_path / "rows.json"
    few.write_text("\n".join(json.dumps(run.row) for run in rows[:6]))
    picture, numbers = tmp_path / "a.svg", tmp_path / "a.json"
    predict.main(["--rows", str(few), "--svg", str(picture), "--json", str(numbers)])
    assert capsys.readouterr().out.startswith("6 rows of rows.json")
    assert ElementTree.fromstring(picture.read_text()).tag.endswith("svg")
    assert json.loads(numbers.read_text())


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("[{", "cannot read the rows: "),
        ("[" * 100_000, "cannot read the rows: "),
        ('{"id": "a"}', "a row has no series; received: row 0"),
    ],
)
def test_a_file_that_has_no_rows(text, wrong, tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(SystemExit, match=re.escape(wrong) + ".*works: --rows "):
        predict.main(["--rows", str(path)])


@pytest.mark.slow
def test_the_fit_moves_all_rates(rows):
    chosen = [error.run for error in predict.times(rows, predict.KINDS[0]) if error.run.source_name == "korth"]
    priors = fit.np.log(list(fit.PRIORS.values()))
    values = fit.fitted(chosen, priors, 1)
    assert abs(fit.errors_of(chosen, values)).mean() < abs(fit.errors_of(chosen, priors)).mean()
