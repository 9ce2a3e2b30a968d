"""The command that plans, with a host beside the devices: its options, what it prints, its one line on bad input."""
from __future__ import annotations

import json

import pytest

from tests.command.lines import printed, refused
from torchckpt.planning import Block, Host, Stage, one_f_one_b
from torchckpt.planning.plan import PipelinePlan, plan_pipeline

SMALL = ("plan", "--schedule", "1f1b", "--stages", "4", "--microbatches", "8", "--blocks", "8", "--boundary", "0.06")
HOST = ("--budget", "30%", "--host", "40", "--host-link", "0.5")
FEW = ("plan", "--schedule", "1f1b", "--stages", "2", "--microbatches", "2", "--blocks", "3")
STAGES = [Stage((Block(boundary_bytes=0.06),) * 8)] * 4


def test_tables_and_the_line_that_people_quote(capsys):
    plan = plan_pipeline(one_f_one_b(4, 8), STAGES, "30%", host=Host(40, out=0.5))
    text = printed(capsys, *SMALL, *HOST)
    assert text == f"{plan}\n"
    assert "  kept/early/late/away\n" in text
    assert "rank  peak  budget    idle  on host  host  waits\n" in text
    assert text.endswith(f"{plan.summary}\n")


def test_json_has_choices_and_moves(capsys):
    found = json.loads(printed(capsys, *SMALL, *HOST, "--json"))
    stored = found["plan"]
    assert {len(choice) for stage in stored["choices"] for choice in stage} == {4}
    away = {(j, i, b) for j, own in enumerate(stored["choices"]) for i, choice in enumerate(own) for b in choice[3]}
    assert {tuple(move[:3]) for move in stored["moves"]} == away
    assert len(away) > 0
    assert all(len(boundary) == 2 for move in stored["moves"] for boundary in move[3:5])
    assert stored["host"] == {"bytes": [40] * 4, "out": 0.5, "back": 0.5, "half_duplex": False, "drag": 0}
    assert found["host_bytes"] == [40] * 4
    assert max(found["host_peak_bytes"]) <= 40
    assert found["bound"] <= found["step"] <= min(found["recompute_alone"], found["offload_alone"])
    assert PipelinePlan.from_json(json.dumps(stored)).step_seconds == pytest.approx(found["step"])


def test_both_ways_and_half_duplex(capsys):
    more = ("--budget", "60%", "--host", "40,30", "--host-link", "0.5,0.25", "--host-half-duplex", "--json")
    stored = json.loads(printed(capsys, *FEW, *more))["plan"]
    assert stored["host"] == {"bytes": [40, 30], "out": 0.5, "back": 0.25, "half_duplex": True, "drag": 0}


def test_bytes(capsys):
    more = ("--saved", "34e6", "--boundary", "2e6", "--budget", "350MB")
    host = ("--host", "2GB,2e9,2GiB,1GB", "--host-link", "20MB")
    stored = json.loads(printed(capsys, *SMALL, *more, *host, "--json"))["plan"]
    assert stored["host"]["bytes"] == [2e9, 2e9, 2 * 2**30, 1e9]
    assert stored["host"]["out"] == stored["host"]["back"] == 2e7


def test_every_schedule(capsys):
    more = ("--blocks", "2", "--budget", "60%", "--host", "9", "--host-link", "1", "--json")
    found = json.loads(printed(capsys, *FEW, "--schedule", "all", *more))
    assert found["plan"]["host"]["bytes"] == [9, 9]
    assert all(row["step"] >= row["bound"] for row in found["schedules"])


GIVEN = "a host is given without its bytes, or without those of its link; received: "
WORKS = "; works: --host 40 --host-link 0.5"
BYTES = 'the bytes of a host are not a number of at least 1, or a size such as "200GiB"; received: '
LINK = 'the link to a host is not a number of bytes a second above 0, or a size such as "25GB"; received: '


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--host 40", f"{GIVEN}--host 40{WORKS}"),
        ("--host-link 1", f"{GIVEN}--host-link 1{WORKS}"),
        ("--host-half-duplex", f"{GIVEN}--host-half-duplex{WORKS}"),
        ("--host 0 --host-link 1", f"{BYTES}--host 0 --host-link 1{WORKS}"),
        ("--host -4 --host-link 1", f"{BYTES}--host -4 --host-link 1{WORKS}"),
        ("--host 50% --host-link 1", f"{BYTES}--host 50% --host-link 1{WORKS}"),
        ("--host many --host-link 1", f"{BYTES}--host many --host-link 1{WORKS}"),
        ("--host 40 --host-link 0", f"{LINK}--host 40 --host-link 0{WORKS}"),
        ("--host 40 --host-link -1", f"{LINK}--host 40 --host-link -1{WORKS}"),
        ("--host 40 --host-link 1,0", f"{LINK}--host 40 --host-link 1,0{WORKS}"),
        ("--host 40 --host-link 1,1,1", "the link to a host has two directions; received: --host 40 --host-link 1,1,1; "
         "works: --host-link 0.5,0.25"),
        ("--host 40GB --host-link 1", "the memory of the host is in bytes, and --saved is not; received: --host 40GB "
         "and --saved 1; works: --saved 34e6 --boundary 2e6 --host 40GB"),
        ("--host 40 --host-link 1GB", "the link to the host is in bytes, and --saved is not; received: --host-link 1GB "
         "and --saved 1; works: --saved 34e6 --boundary 2e6 --host-link 1GB"),
        ("--host 40,40 --host-link 1", "the bytes of a host are neither one for every rank nor a list of 4; received: "
         "2 amounts; works: --host 40.0, or a list with one for each rank"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(capsys, arguments, message):
    line = refused(capsys, *SMALL, "--budget", "30%", *arguments.split())
    assert line.startswith(f"python -m torchckpt plan: error: {message}") or message in line


def test_what_works_is_in_the_unit_that_is_used(capsys):
    printed(capsys, *SMALL, "--budget", "30%", *WORKS.removeprefix("; works: ").split())
    in_bytes = (*SMALL, "--saved", "34e6", "--boundary", "2e6", "--budget", "30%")
    line = refused(capsys, *in_bytes, "--host", "0", "--host-link", "1")
    assert line.endswith("; works: --host 200GB --host-link 25GB")
    printed(capsys, *in_bytes, "--host", "200GB", "--host-link", "25GB")
    assert refused(capsys, *SMALL, "--budget", "0").endswith("; works: --budget 50%, --budget 16.5")
    assert refused(capsys, *in_bytes[:-2], "--budget", "0").endswith("--budget 60GB, --budget 50%, --budget 6e10")


def test_a_host_does_not_make_up_for_every_budget(capsys):
    line = refused(capsys, *FEW, "--boundary", "0.5", "--budget", "1", "--host", "40", "--host-link", "1")
    assert "rank 0 needs 3.5 bytes even if it recomputes everything, and 40 bytes on its host do not make" in line


@pytest.mark.parametrize(("arguments", "what"), [("--host 40 --host-link 25GB", "the memory of the host"),
                                                ("--host 40GB --host-link 25", "the link to the host"),
                                                ("--host 40GB --host-link 0", "the link to the host"),
                                                ("--host 0 --host-link 25GB", "the memory of the host")])
def test_a_model_counts_in_bytes(capsys, monkeypatch, arguments, what):
    monkeypatch.setattr("torchckpt.costs.chain._each", None)  # before anything is counted
    model = ("plan", "examples.plan_llama:stages", "--device", "h100", "--schedule", "1f1b", "--microbatches", "8")
    message = refused(capsys, *model, "--budget", "60GB", *arguments.split())
    assert f"{what} is no size; received: --host" in message
    assert "(it has no unit); works: --host" in message
    assert " 0GB" not in message


def test_a_host_needs_a_budget(capsys):
    assert "are required: --budget" in refused(capsys, *SMALL, "--host", "40", "--host-link", "1")


def test_there_is_no_infinity_in_json(capsys):
    """Without the host the budget is too small, so that the rules have no bound."""
    more = ("--blocks", "4", "--boundary", "0.3", "--budget", "30%", "--host", "40", "--host-link", "1", "--json")
    found = json.loads(printed(capsys, *FEW, "--schedule", "1f1b", *more), parse_constant=pytest.fail)
    assert found["same_blocks"]["bound"] is found["recompute_all"]["bound"] is None
    assert found["bound"] <= found["step"]
