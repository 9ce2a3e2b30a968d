"""The distributed example: the same losses in all variants, and after a restart."""
from __future__ import annotations

import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from tests.distributed.ranks import script_on_ranks
from tests.distributed.stages import not_on_old_stages
from tests.scripts import ROOT, home_without, run_script

EXAMPLE = str(ROOT / "examples/train_gpt_distributed.py")


def torchrun(folder, *arguments, processes=2):
    """What the example prints under torchrun where NumPy is missing, as after ``make demo`` in a fresh clone.

    Past the time, torchrun is asked to end, and ends its processes.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {**home_without(["numpy"], folder), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, EXAMPLE, "--quick", *arguments], env=environment, **pipes) as started:
        try:
            printed, errors = started.communicate(timeout=90)
        except BaseException:
            started.terminate()
            raise
    assert started.returncode == 0, errors
    return printed


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What the example prints, in less time: its processes need not import torch."""
    return lambda *arguments: script_on_ranks(EXAMPLE, "--quick", *arguments, folder=tmp_path_factory.mktemp("ranks"))


def losses(printed):
    """By step."""
    return dict(re.findall(r"^step +(\d+)   loss (\d\.\d{8})$", printed, re.MULTILINE))


# side by side ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def printed(out, run):
    return run("--compare", "2", "--out", str(out))


@pytest.mark.slow
def test_torchrun_prints_the_same_losses_where_numpy_is_missing(printed, tmp_path):
    assert losses(torchrun(tmp_path, "--compare", "2", "--out", str(tmp_path))) == losses(printed) != {}


@pytest.mark.parametrize("row", ["loss of step 1", "loss of step 2"])
def test_losses_are_the_same_in_all_variants(printed, row):
    cells = [line.removeprefix(row).split() for line in printed.splitlines() if line.startswith(row)]
    assert [len(set(found)) for found in cells] == [1]
    assert len(cells[0]) == 4
    assert re.fullmatch(r"\d\.\d{8}", cells[0][0])


def test_parameters_are_the_same_in_all_variants_and_processes(printed):
    assert re.search(r"^parameters bit-equal +yes +yes +yes +yes$", printed, re.MULTILINE)


def test_the_report_has_both_stages(printed):
    assert re.search(r"^this schedule \(measured\) ", printed, re.MULTILINE)
    assert re.search(r"^stage .*\n0 .*\n1 ", printed, re.MULTILINE)


def test_the_picture_shows_all_recomputes_above_and_none_of_the_last_stage_below(printed, out):
    picture = ElementTree.parse(out / "timeline.svg").getroot()
    boxes = [
        path.attrib["d"].count("z")
        for path in picture.iter("{http://www.w3.org/2000/svg}path")
        if path.attrib["class"] == "R"
    ]
    assert boxes == [4, 4, 3]  # a row each: stage 0 and 1 above, stage 0 below, whose first micro-batch is kept
    names = [word.text for word in picture.iter("{http://www.w3.org/2000/svg}text") if word.get("class") == "name"]
    assert [name.split(" (")[0] for name in names] == [
        "nothing recomputed",
        "recomputed when the gradient arrives",
        "recomputed ahead",
    ]
    assert printed.splitlines()[-1].endswith(f" The picture of the steps is {out / 'timeline.svg'}")


# within a budget -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_steps_within_a_budget_beside_the_rules(run, tmp_path):
    printed = run("--compare", "2", "--budget", "1MB", "--out", str(tmp_path))
    assert re.search(r"^ +all blocks +the same 0 of each stage +planned$", printed, re.MULTILINE)
    assert_equal_in_three_ways(printed)
    assert len(re.findall(r"^peak of process [01], of 1 MB( +[\d.]+ MB){3}$", printed, re.MULTILINE)) == 2
    assert "everything fits, so nothing need be recomputed" in printed
    assert printed.splitlines()[-1].endswith(f" The picture of the steps is {tmp_path / 'pipeline-plan.svg'}")


def assert_equal_in_three_ways(printed):
    (losses,) = re.findall(r"^loss of the last step +(.*)$", printed, re.MULTILINE)
    assert len(losses.split()) == 3
    assert len(set(losses.split())) == 1
    assert re.search(r"^parameters bit-equal +yes +yes +yes$", printed, re.MULTILINE)


@pytest.fixture(scope="module")
def sleeping(run, tmp_path_factory):
    """What the example prints, and its picture, where blocks sleep and half of the bytes are given."""
    folder = tmp_path_factory.mktemp("sleeping")
    printed = run("--sleep", "1", "--compare", "2", "--budget", "50%", "--out", str(folder))
    return printed, ElementTree.parse(folder / "pipeline-plan.svg").getroot()


def test_steps_within_half_of_the_bytes_are_equal(sleeping):
    assert_equal_in_three_ways(sleeping[0])


def test_blocks_that_sleep_are_said_to(sleeping):
    assert sleeping[0].startswith("Blocks sleep 1 ms forward and 2 ms backward, so that processes which share cores ")


def test_the_picture_has_the_steps_and_the_peaks_of_the_table(sleeping):
    printed, picture = sleeping
    words = ["".join(word.itertext()) for word in picture.iter("{http://www.w3.org/2000/svg}text")]
    steps = [re.split("[,(]", word)[0].strip() for word in words if word.startswith("step ")]
    assert steps == [f"step {step}" for step in cells(printed, "a step, measured")[-2:]]
    drawn = [words[place + 1] for place, word in enumerate(words) if re.fullmatch(r"memory \d", word)]
    peaks = [cells(printed, f"peak of process {rank}")[-2:] for rank in range(2)]
    assert drawn == [own[0] for own in peaks] + [own[1] for own in peaks]


def cells(printed, row):
    """Of a table, without the name of the row."""
    return re.split(" {2,}", next(line for line in printed.splitlines() if line.startswith(row)))[1:]


def test_recomputes_inside_backwards_are_orange(sleeping):
    _, picture = sleeping
    paths = picture.iter("{http://www.w3.org/2000/svg}path")
    boxes = [path.get("d").count("z") for path in paths if path.get("class") == "R"]
    assert len(boxes) >= 2  # of each rank, one above the other
    assert sum(boxes) >= 8


def test_training_within_a_budget(run, uninterrupted):
    printed = run("--steps", "6", "--budget", "1MB")
    assert losses(printed) == uninterrupted
    assert re.search(r"^planned +[\d.]+ ms", printed, re.MULTILINE)


# restart --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uninterrupted(run):
    return losses(run("--recompute", "none", "--steps", "6"))


@not_on_old_stages("the first step draws random numbers for metadata")
def test_a_restart_goes_on_with_the_losses_of_the_uninterrupted_run(run, uninterrupted, tmp_path):
    options = "--checkpoints", str(tmp_path), "--every", "2"
    before = losses(run(*options, "--steps", "3"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0-step3.pt", "rank1-step3.pt"]

    (tmp_path / "rank0-step4.pt").touch()  # the other process ended before it had written its own
    after = losses(run(*options, "--steps", "6"))
    assert list(before) == ["1", "2", "3"]
    assert list(after) == ["4", "5", "6"]
    assert {**before, **after} == uninterrupted
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0-step6.pt", "rank1-step6.pt"]


# faults ---------------------------------------------------------------------------------------------------------------


def test_it_says_that_torchrun_starts_it(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    done = run_script(EXAMPLE, timeout=60)
    assert done.returncode != 0
    assert "torchrun --standalone --nproc-per-node 2" in done.stderr
