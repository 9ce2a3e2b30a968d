"""``memory``: a script runs unchanged, and the command prints which of its lines keep memory."""
from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.command.lines import printed, refused
from tests.scripts import run
from torchckpt.__main__ import main
from torchckpt.command.memory import split

SCRIPT = """\
import argparse
import torch
from torch import nn


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--fail", action="store_true")
    options = parser.parse_args()
    net = nn.Sequential(nn.Linear(4, options.width), nn.ReLU(), nn.Linear(options.width, 1))
    for step in range(4):
        loss = net(torch.randn(8, 4)).mean()
        if options.fail and step:
            raise ValueError("the pump is off")
        loss.backward()
        print("step", step)


if __name__ == "__main__":
    main()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("train.py").write_text(SCRIPT)
    return "train.py"


def test_the_table_of_a_script(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "memory", script).split("\n") == [
        "step 0",
        "",
        "train.py: 2 backward passes",
        "pass 1: autograd keeps 512 B in 1 storage, and 192 B that were there before",
        "pass 2: autograd keeps 512 B in 1 storage, and 192 B that were there before",
        "",
        "pass 1",
        "  B    share  storages  module  operation  line",
        "512  100.0 %         1  1       Relu       train.py:13  loss = net(torch.randn(8, 4)).mean()",
        "",
        "",
    ]


def test_arguments_of_the_script_stand_behind_two_dashes(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = printed(capsys, "memory", script, "--steps", "1", "--svg", "memory.svg", "--", "--width", "32")
    assert "pass 1: autograd keeps 1.024 kB in 1 storage" in said
    words = [word.text for word in ElementTree.parse("memory.svg").iter("{http://www.w3.org/2000/svg}text")]
    assert words[2:] == ["1 Relu train.py:13", "1.024 kB"]


def test_arguments_are_split_for_this_command_alone() -> None:
    assert split(["memory", "a.py", "--", "-x", "--", "1"]) == (["memory", "a.py"], ["-x", "--", "1"])
    assert split(["memory", "a.py"]) == (["memory", "a.py"], [])
    assert split(["fit", "--", "a:b"]) == (["fit", "--", "a:b"], [])


def test_a_script_that_fails_ends_as_without_the_command(script: str) -> None:
    done = run("-m", "torchckpt", "memory", script, "--", "--fail")
    assert done.returncode == 1
    assert "until it failed: autograd keeps 512 B in 1 storage" in done.stdout
    lines = done.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1] == f'  File "{script}", line 21, in <module>'
    assert lines[-1] == "ValueError: the pump is off"


def test_a_script_that_exits_ends_with_its_code(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["memory", script, "--", "--unknown"])
    assert ended.value.code == 2
    assert "train.py: error: unrecognized arguments: --unknown" in capsys.readouterr().err


def test_a_script_without_backward(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(script).write_text("import threading, torch\nx = torch.ones(3, requires_grad=True)\n"
                            "thread = threading.Thread(target=lambda: x.sin().sum().backward())\n"
                            "thread.start(), thread.join()\n")
    assert refused(capsys, "memory", script) == (
        "python -m torchckpt memory: error: the script has no backward pass; received: train.py, which ran to its end; "
        "backward passes of other threads, of which there were 1; works: a script that calls loss.backward() in its "
        "main thread, without torchrun or spawn"
    )


def test_what_could_not_be_seen_is_said(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(script).write_text("import torch, torchckpt\nx = torch.ones(3, requires_grad=True)\n"
                            "torchckpt.checkpoint(torch.sin, x * 1).sum().backward()\nx.sum().backward()\n")
    assert printed(capsys, "memory", script).split("\n")[-3:] == [
        "not seen: what regions (checkpoint) keep while they are recomputed",
        "not seen: forwards in other threads, if a pass that keeps nothing has one",
        "",
    ]


@pytest.mark.parametrize(
    ("name", "reason"), [("nowhere.py", "there is no such file"), (".", "it is a folder")], ids=["missing", "folder"]
)
def test_no_script(name: str, reason: str, script: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "memory", name)
    assert said == f"python -m torchckpt memory: error: argument SCRIPT: cannot run {name}: {reason}; works: train.py"
