"""The command that plans: what it prints and writes, and its one line on bad input."""
from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.command.lines import printed, refused
from tests.planning.plan.published import CASES
from tests.slow import few
from torchckpt.__main__ import main
from torchckpt.planning import Block, Stage, fixed, named_schedule, one_f_one_b, to_csv
from torchckpt.planning.plan import PipelinePlan, plan_pipeline
from torchckpt.planning.plan.every import plan_every
from torchckpt.planning.plan.pipeline import plan_of
from torchckpt.planning.plan.search.candidates import Search

SMALL = ("plan", "--schedule", "1f1b", "--stages", "4", "--microbatches", "8", "--blocks", "8,8,8,7")
COSTS = ("--forward", "1", "--backward", "2", "--weight-grad", "1", "--recompute", "1", "--saved", "1")
A = (*SMALL, *COSTS, "--boundary", "0.06", "--first", "0.1,0.1,0.02", "--last", "1,2,2")
TWO = Stage((Block(boundary_bytes=0.06),) * 2)
UNEVEN = [Stage((Block(boundary_bytes=0.06),) * count) for count in (8, 8, 8, 4)]


def test_the_line_that_people_quote(capsys):
    assert printed(capsys, *A, "--budget", "50%").split("\n")[-2] == (
        "step 283.0, +6.8 % over keeping all (bound +6.8 %); recomputing all +32.5 %, "
        "the same 5 blocks on every stage +20.8 %"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        (*A, "--budget", "30%"), (*A, "--budget", "30%", "--balance"),
        (*A, "--budget", "30%", "--host", "4", "--host-link", "0.5"),
        ("plan", "--schedule", "all", *A[3:], "--budget", "40%"),
        ("plan", "--model", "llama3-8b", "--gpus", "8", "--device", "h100", "--pp", "4", "--global-batch", "32",
         "--device-memory", "42GB"),
    ],
    ids=["one", "balance", "host", "all", "job"],
)  # fmt: skip
def test_an_interrupt_leaves_the_best_plan_so_far(monkeypatch, capsys, arguments):
    simulated, times = Search._simulated, iter(range(10**6))

    def second(*rest):
        if next(times) == 1:
            raise KeyboardInterrupt
        return simulated(*rest)

    monkeypatch.setattr(Search, "_simulated", second)
    assert main([*arguments, "--json"]) == 130
    printed, told = capsys.readouterr()
    assert next(times) == 2
    assert told == "python -m torchckpt plan: interrupted; this is the best plan so far\n"
    plan = PipelinePlan.from_json(json.dumps(json.loads(printed)["plan"]))
    assert max(plan.peak_bytes) <= max(plan.problem.budget_bytes)
    assert plan.recomputed_share > 0


def test_an_interrupt_before_a_plan_is_one_line(monkeypatch, capsys):
    def first(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Search, "_simulated", first)
    assert main([*A, "--budget", "30%"]) == 130
    assert capsys.readouterr() == ("", "python -m torchckpt plan: interrupted\n")


@pytest.mark.parametrize(
    "planning",
    [
        lambda: plan_pipeline(one_f_one_b(4, 8), UNEVEN, 2.0),
        lambda: plan_every([TWO, replace(TWO, before=fixed(saved_bytes=1)), *[TWO] * 6], 4, "80%", ranks=4),
    ],
    ids=["least", "reference"],
)
def test_an_interrupt_leaves_no_plan_for_more_than_was_asked(monkeypatch, planning):
    """The error of a budget that is too small has a plan for the least, and a comparison has one for all bytes."""

    def stop(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Search, "run", stop)
    with pytest.raises(KeyboardInterrupt) as caught:
        planning()
    assert plan_of(caught.value) is None


def test_an_interrupt_stays_one_with_its_plan(monkeypatch):
    """Python ends a script by the signal where a KeyboardInterrupt ends it, and by 1 where a subclass of it does."""

    def stop(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Search, "run", stop)
    schedule, stages, link = CASES["A"]
    with pytest.raises(KeyboardInterrupt) as caught:
        plan_pipeline(schedule, stages, "30%", link)
    assert type(caught.value) is KeyboardInterrupt
    assert isinstance(plan_of(caught.value), PipelinePlan)


def test_an_interrupt_leaves_a_plan_that_says_which_blocks_moved(monkeypatch):
    running, times = Search.run, iter(range(10**6))

    def second(search):
        if next(times) == 1:
            raise KeyboardInterrupt
        return running(search)

    monkeypatch.setattr(Search, "run", second)
    with pytest.raises(KeyboardInterrupt) as caught:
        plan_pipeline(one_f_one_b(4, 8), UNEVEN, "30%", balance=True)
    plan = plan_of(caught.value)
    assert plan.problem.stages != tuple(UNEVEN)
    assert plan.asked.stages == tuple(UNEVEN)


def test_an_interrupt_of_the_imports_is_no_traceback():
    code = (
        "import sys\nclass Finder:\n  def find_spec(self, name, *_):\n"
        "    if name == 'torchckpt.command.fit': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Finder())\nfrom torchckpt.__main__ import main"
    )
    ended = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_json_says_what_the_plan_says(capsys):
    answer = json.loads(printed(capsys, *A, "--budget", "50%", "--json"))
    schedule, stages, link = CASES["A"]
    plan = plan_pipeline(schedule, stages, "50%", link)
    assert answer["step"] == pytest.approx(plan.step_seconds)
    assert answer["bound"] == pytest.approx(plan.bound_seconds)
    assert answer["keep_all"] == pytest.approx(265.0)
    assert answer["budget_bytes"] == pytest.approx([16.04] * 4)
    assert answer["peak_bytes"] == pytest.approx(plan.peak_bytes)
    assert answer["recomputed_share"] == pytest.approx(plan.recomputed_share)
    assert answer["balance"] == [8, 8, 8, 7]
    for rule, blocks, step, share in (("recompute_all", 8, 351.0, 1.0), ("same_blocks", 5, 320.0, 20 / 31)):
        assert answer[rule]["blocks"] == blocks
        assert answer[rule]["step"] == pytest.approx(step)
        assert answer[rule]["recomputed_share"] == pytest.approx(share)
        assert max(answer[rule]["peak_bytes"]) <= 16.04 + 1e-9
        assert {"bound", "keep_all", "budget_bytes", "balance"} <= set(answer[rule])
    assert PipelinePlan.from_json(json.dumps(answer["plan"])).step_seconds == pytest.approx(plan.step_seconds)


def test_a_rule_that_does_not_fit_has_no_step(capsys):
    every = ("plan", "--schedule", "zero_bubble", "--stages", "4", "--microbatches", "8", "--blocks", "4")
    answer = json.loads(printed(capsys, *every, "--budget", "4,3,2,1.5", "--json"))
    assert answer["step"] >= answer["bound"]
    assert all(answer[rule]["step"] is None or answer[rule]["step"] >= answer["bound"] for rule in ("same_blocks",))


def test_picture_and_moves(capsys, tmp_path):
    picture = tmp_path / "plan.svg"
    chunks = ("plan", "--schedule", "interleaved_1f1b", "--stages", "8", "--microbatches", "16", "--blocks")
    options = ("4,4,4,4,4,4,4,3", "--boundary", "0.06", "--last", "1,2,2", "--budget", "70%", "--balance", "--json")
    answer = json.loads(printed(capsys, *chunks, *options, "--svg", str(picture)))
    assert sum(answer["balance"]) == 31
    assert answer["balance"] != [4] * 7 + [3]
    assert answer["recompute_all"]["balance"] == [4] * 7 + [3]
    assert ElementTree.fromstring(picture.read_text(encoding="utf-8")).tag.endswith("svg")


def test_every_schedule(capsys):
    every = ("plan", "--schedule", "all", "--stages", "2", "--microbatches", "4", "--blocks", "4", "--budget", "60%")
    lines = printed(capsys, *every).split("\n")
    assert lines[0].split() == ["schedule", "stages", "step", "over", "bound", "recomputed", "peak"]
    assert lines[-2].startswith("step ")
    answer = json.loads(printed(capsys, *every, "--json"))
    steps = [row["step"] for row in answer["schedules"]]
    assert steps == sorted(steps)
    assert answer["step"] == steps[0]
    for row in answer["schedules"]:
        assert all(0 < peak <= budget for peak, budget in zip(row["peak_bytes"], row["budget_bytes"]))
    assert {"1f1b", "zbv"} <= {row["schedule"] for row in answer["schedules"]}


def test_csv(capsys, tmp_path):
    file = tmp_path / "order.csv"
    file.write_text(to_csv(named_schedule("zbv", 2, 4)), encoding="utf-8")
    text = printed(capsys, "plan", "--csv", str(file), "--blocks", "2", "--budget", "60%")
    assert text.startswith("order: 4 stages on 2 ranks, 4 micro-batches")


@pytest.mark.parametrize(
    ("name", "stages", "ranks", "counted"),
    [
        ("1f1b", 4, None, 4),
        ("zbv", 8, None, 4),
        ("zbv", 8, 4, 4),
        ("dualpipe_v", 4, None, 2),
        ("interleaved_1f1b", 8, None, 4),
        ("interleaved_1f1b", 12, 4, 4),
        ("zero_bubble", 4, None, 4),
        ("zero_bubble", 8, 4, 4),
    ],
)  # fmt: skip
def test_stages_are_dealt_to_ranks(capsys, name, stages, ranks, counted):
    dealt = ("plan", "--schedule", name, "--stages", str(stages), "--microbatches", "8", "--blocks", "2")
    more = () if ranks is None else ("--ranks", str(ranks))
    assert f"{stages} stages on {counted} ranks" in printed(capsys, *dealt, *more, "--budget", "70%").split("\n")[0]


BAD = [
    (("--budget", "5 apples"), "the budget is not bytes above 0, a size with a unit"),
    (("--budget", "nan"), "received: --budget nan"),
    (("--budget", "-1"), "received: --budget -1.0"),
    (("--budget", "0%"), "works: --budget "),
    (("--budget", "9,9"), "the budget is neither one for every rank nor a list of 4; received: 2 budgets"),
    (("--budget", "0.1"), "received: --budget 0.1 (less than a byte; a share is text); works: --budget 10%"),
    (("--budget", "1", "--saved", "8", "--boundary", "1"), "rank 0 needs 39"),
    (("--budget", "60GB"), "received: --budget 60GB and --saved 1; works: --budget 50%, or --saved 34e6 --boundary"),
    (("--budget", "9,60GB,9,9", "--saved", "900"), "received: --budget 60GB and --saved 900; works: --budget 50%"),
    (("--budget", "9", "--blocks", "8,8"), "--blocks has 2 numbers for 4 stages; works: --blocks 8,8,8,8"),
    (("--budget", "9", "--blocks", "0"), "blocks of each stage, such as 8 or 8,8,8,7; received: 0"),
    (("--budget", "9", "--blocks", "8,8,8," + "9" * 20), "more than 1000 blocks of a stage; received: 8,8,8,9999"),
    (("--budget", "9", "--blocks", "8,0,8,8"), "stage 1 has no blocks, no --first and no --last; received: --blocks "
     "with 0 for it; works: --blocks 8,1,8,8"),
    (("--budget", "9", "--forward", "0"), "a number above 0"),
    (("--budget", "9", "--recompute", "nan"), "a number from 0"),
    (("--budget", "9", "--saved", "1,2"), "--saved has 2 numbers for 4 stages"),
    (("--budget", "9", "--weight-grad", "3"), "--weight-grad is more than --backward"),
    (("--budget", "9", "--boundary", "2"), "--boundary is more than --saved; received: 2 of 1 on stage 0"),
    (("--budget", "9", "--last", "1,2"), "forward, backward and bytes, such as 1,2,2"),
    (("--budget", "9", "--ranks", "3"), "the stages do not divide among the ranks of 1f1b"),
    (("--budget", "9", "--ranks", "2"), "1f1b takes 1 stage on each rank, not 2; received: --stages 4 --ranks 2"),
    (("--budget", "9", "--ranks", "0"), "argument --ranks: not a whole number from 1, such as 4; received: 0"),
    (("--budget", "9", "--stages", "0"), "argument --stages: not a whole number from 1, such as 4; received: 0"),
    (("--budget", "9", "--microbatches", "2"), "1F1B needs m >= p"),
    (("--budget", "9", "--schedule", "2f2b"), "the schedule is not one of"),
    (("--budget", "9", "--svg", "/nowhere/plan.svg"), "cannot write /nowhere/plan.svg"),
    ((), "the following arguments are required: --budget; works: plan --schedule 1f1b --stages 4 --microbatches 8 "
         "--blocks 8 --budget 50%"),
]


@few(9)
@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input_is_one_line(capsys, arguments, message):
    assert message in refused(capsys, *SMALL, *arguments)


def test_csv_says_the_stages(capsys, tmp_path):
    file = tmp_path / "order.csv"
    file.write_text("0F0,0R0,0B0\n", encoding="utf-8")
    assert main(["plan", "--csv", str(file), "--blocks", "2", "--budget", "1"]) == 2
    assert "the schedule has R already" in capsys.readouterr().err
    assert main(["plan", "--csv", str(file), "--blocks", "2", "--budget", "1", "--stages", "1"]) == 2
    assert "--stages is given with --csv" in capsys.readouterr().err
    assert main(["plan", "--schedule", "1f1b", "--blocks", "2", "--budget", "1"]) == 2
    assert "--schedule is given without --stages and --microbatches" in capsys.readouterr().err


def test_it_does_not_import_torch():
    arguments = [*SMALL, "--budget", "60%"]
    code = f"import sys, torchckpt.__main__ as c; c.main({arguments!r}); sys.exit('torch' in sys.modules)"
    root = Path(__file__).parent.parent.parent
    assert subprocess.run((sys.executable, "-c", code), cwd=root, stdout=subprocess.DEVNULL).returncode == 0
