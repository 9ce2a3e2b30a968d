"""The command that plans a described model."""
from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.command.lines import printed, refused
from tests.scripts import ROOT
from tests.slow import few
from torchckpt.__main__ import main
from torchckpt.planning.device import DEVICES
from torchckpt.planning.plan import PipelinePlan

JOB = ("plan", "--model", "llama3-70b", "--gpus", "64", "--device", "h100", "--global-batch", "256")
SPLIT = ("--tp", "8", "--pp", "4", "--dp", "2", "--micro-batch", "1", "--sequence", "8192")


def test_a_job_its_memory_by_part_and_the_line_that_people_quote(capsys, tmp_path):
    picture = tmp_path / "memory.svg"
    lines = printed(capsys, *JOB, *SPLIT, "--svg", str(picture)).split("\n")
    assert lines[0].startswith("llama3-70b: 70.55 G parameters on 64 x h100: tp 8 x cp 1 x pp 4 x dp 2; 1f1b")
    parts = ["weights", "gradients", "optimizer", "gathered", "activations", "working", "buffers"]
    assert lines[2].split() == ["rank", *parts, "of", "all", "device"]
    assert lines[-2].startswith("step ")
    assert ElementTree.fromstring(picture.read_text(encoding="utf-8")).tag.endswith("svg")


def test_the_memory_of_the_device_is_the_default(capsys):
    answer = json.loads(printed(capsys, *JOB, *SPLIT, "--json"))
    assert answer["device_bytes"] == DEVICES["h100"].memory_bytes
    assert answer["recomputed_share"] == 0
    tight = json.loads(printed(capsys, *JOB, *SPLIT, "--json", "--device-memory", "40GB"))
    assert tight["recomputed_share"] > 0
    assert tight["step"] > answer["step"]


def test_options_reach_the_job(capsys):
    def step(*options):
        return json.loads(printed(capsys, *JOB, *SPLIT, "--json", *options))["step"]

    plain = step()
    assert step("--policy", "full") > plain
    assert step("--schedule", "zb-2p") != step("--schedule", "zero_bubble") < plain
    assert step("--schedule", "interleaved_1f1b", "--chunks", "4") != step("--schedule", "interleaved_1f1b")
    assert step("--network", "5GB") > plain
    assert step("--node", "4") > plain
    assert step("--device", "a100") > plain
    assert step("--framework", "torchtitan") != plain


def test_what_is_recomputed_stands_below(capsys):
    text = printed(capsys, *JOB, *SPLIT, "--device-memory", "40GB")
    assert text.rstrip().endswith("kept; recomputed before the gradient arrives; inside the backward")
    numbers = json.loads(printed(capsys, *JOB, *SPLIT, "--device-memory", "40GB", "--json"))
    assert len(numbers["plan"]["stages"]) == 4
    assert PipelinePlan.from_json(json.dumps(numbers["plan"])).recomputed_share == numbers["recomputed_share"]


@pytest.mark.slow
def test_a_host_beside_each_device(capsys):
    host = ("--host", "200GB", "--host-link", "50GB")
    few = (*JOB[:-1], "32", *SPLIT, "--device-memory", "40GB")
    answer = json.loads(printed(capsys, *few, *host, "--json"))
    assert answer["away_share"] > 0
    assert "away on the host" in printed(capsys, *few, *host)


def test_the_search(capsys, tmp_path):
    small = ("plan", "--model", "llama3-8b", "--gpus", "8", "--device", "h100", "--global-batch", "16", "--search")
    picture = tmp_path / "best.svg"
    assert main([*small, "--svg", str(picture)]) == 0
    text, progress = capsys.readouterr()
    assert len(text.split("\n\n")[0].split("\n")) == 21
    assert "pruned by their bound; fell out: " in text
    assert progress.startswith("search: 1 of at most ")
    assert picture.exists()
    assert main([*small, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["best"]) == 20
    assert answer["whole"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--tp", "3"), "--tp is given without --model; works: plan --model llama3-70b"),
        (("--search",), "--search is given without --model"),
        (("--schedule", "zb-2p"), "--schedule zb-2p is given without --model; works: plan --model llama3-70b"),
        (("--model", "llama3-8b", "--gpus", "2000000", *JOB[5:]), "received: --gpus 2000000; works: --gpus 1048576"),
        ((*JOB[1:], "--blocks", "8"), "--blocks is given with --model, which says what stages are and take"),
        ((*JOB[1:], "--profile"), "--profile is given with --model, which says what stages are and take"),
        ((*JOB[1:], "examples.plan_llama:stages"), "MODULE:FUNCTION is given with --model"),
        (("--model", "llama3-8b", "--gpus", "8"), "--model is given without --device"),
        ((*JOB[1:], "--schedule", "all"), "--schedule all is given with --model; works: --search"),
        (("--model", "lama", *JOB[3:]), "received: --model lama; the nearest are "),
        (("--model", "my lama.json", *JOB[3:]), "; received: --model my lama.json; works: --model config.json"),
        ((*JOB[1:], "--dp", "3"), "received: tp 1 x cp 1 x pp 1 x dp 3 = 3, --gpus 64; works: --gpus 3"),
        ((*JOB[1:], "--tp", "64", "--pp", "2"), "the GPUs are not tp x cp x pp x dp"),
        ((*JOB[1:], "--tp", "4", "--policy", "none"), "the job does not fit: rank 0 needs "),
        ((*JOB[1:-1], "136", "--pp", "8", "--schedule", "interleaved_1f1b"), "do not divide into m // ranks rounds"),
        ((*JOB[1:], "--host", "200GB"), "a host is given without its bytes, or without those of its link"),
        ((*JOB[1:], *SPLIT, "--policy", "full", "--host", "1GB", "--host-link", "1GB"), "works: --policy planned"),
        ((*JOB[1:], "--search", "--policy", "none", "--host", "1GB", "--host-link", "1GB"), "works: --policy planned"),
        ((*JOB[1:], "--policy", "some"), "invalid choice: 'some'"),
        ((*JOB[1:], "--search", "--pp", "1", "--schedule", "zbv"), "a pipeline of one stage has no schedule"),
        ((*JOB[1:], "--link", "1"), "--link is given with --model"),
        ((*JOB[1:], "--balance"), "--balance is given with --model"),
        ((*JOB[1:], "--tp", "3", "--dp", "2"), "; works: --tp 2, --gpus 4 | the heads do not divide by tp; received: "),
        ((*JOB[1:-1], "16", "--pp", "4", "--schedule", "DualPipeV"), "works: --global-batch 128"),
        ((*JOB[1:], "--dp", "8", "--micro-batch", "3"), "received: --global-batch 256, --dp 8, --micro-batch 3; "),
        ((*JOB[1:], "--search", "--pp", "3", "--sharding", "none"), "works: other values of --pp, --sharding"),
        ((), "one of the arguments --schedule --csv --model is required; works: python -m torchckpt plan --schedule"),
    ],
)
def test_what_is_wrong_is_one_line(capsys, arguments, text):
    assert text in refused(capsys, "plan", *arguments)


@few(1)
@pytest.mark.parametrize("options", [("--schedule", "zbv"), ("--schedule", "interleaved_1f1b", "--chunks", "4"),
                                     ("--chunks", "2")])  # fmt: skip
def test_a_schedule_of_one_stage_does_nothing(capsys, options):
    call = (*JOB, "--tp", "8")
    error = refused(capsys, *call, *options)
    assert f"a pipeline of one stage has no schedule; received: {' '.join(options)}, --pp 1; works: the same w" in error
    several = error.partition(", or with ")[2].split()
    assert "step " in printed(capsys, *call, *options, *several)
    assert printed(capsys, *call) == printed(capsys, *call, "--schedule", "1f1b", "--chunks", "1")


@few(1)
@pytest.mark.parametrize("closed", ["2>&-", "2>/dev/full"])
def test_nothing_for_people_is_among_the_numbers(closed):
    """Without standard error, ``print`` takes standard output for it; a full one ended the search."""
    if closed.endswith("full") and not Path("/dev/full").exists():
        pytest.skip("the system has no /dev/full")
    words = " ".join((*JOB[:2], "llama3-8b", "--gpus", "2", *JOB[5:-1], "2", "--search", "--json"))
    call = f"{shlex.quote(sys.executable)} -m torchckpt {words} {closed}"
    done = subprocess.run(["sh", "-c", call], stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0
    assert json.loads(done.stdout)["whole"]
