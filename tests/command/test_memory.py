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


def test_the_tables_of_a_script(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = [
        "autograd keeps 512 B, and 128 B that were there before",
        "",
        "module  operation         line  storages  bytes    share",
        "1            Relu  train.py:13         1  512 B  100.0 %",
        "",
    ]
    lines = printed(capsys, "memory", script).split("\n")
    assert lines == ["step 0", "", f"pass 1: {table[0]}", *table[1:], f"pass 2: {table[0]}", *table[1:]]


def test_arguments_of_the_script_stand_behind_two_dashes(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "memory", script, "--steps", "1", "--svg", "memory.svg", "--", "--width", "32")
    assert "pass 1: autograd keeps 1.024 kB, and" in text
    words = [word.text for word in ElementTree.parse("memory.svg").iter("{http://www.w3.org/2000/svg}text")]
    assert words[2:] == ["1 Relu train.py:13", "1.024 kB"]


def test_arguments_are_split_for_this_command_alone() -> None:
    assert split(["memory", "a.py", "--", "-x", "--", "1"]) == (["memory", "a.py"], ["-x", "--", "1"])
    assert split(["memory", "a.py"]) == (["memory", "a.py"], [])
    assert split(["fit", "--", "a:b"]) == (["fit", "--", "a:b"], [])


def test_arguments_of_the_script_before_two_dashes(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["memory", script, "--mode", "grad"])
    said = f"error: unrecognized arguments: --mode grad; works: memory {script} -- --mode grad"
    assert capsys.readouterr().err.strip().endswith(said)


def test_a_script_that_fails_ends_as_without_the_command(script: str) -> None:
    done = run("-m", "torchckpt", "memory", script, "--", "--fail")
    assert done.returncode == 1
    assert "pass 2: autograd keeps 512 B, and" in done.stdout
    assert done.stderr.endswith("ValueError: the pump is off\n")
    assert f'File "{script}", line 21, in <module>' in done.stderr


def test_a_script_that_exits_ends_with_its_code(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["memory", script, "--", "--unknown"])
    assert ended.value.code == 2
    assert "train.py: error: unrecognized arguments: --unknown" in capsys.readouterr().err


def test_a_script_that_exits_before_its_first_backward_tells_of_what_was_kept(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = Path(script).read_text()
    Path(script).write_text(text.replace("        loss.backward()\n", "        raise SystemExit(3)\n"))
    with pytest.raises(SystemExit) as ended:
        main(["memory", script])
    assert ended.value.code == 3
    assert "pass 1: autograd keeps 512 B, and" in capsys.readouterr().out
    Path(script).write_text(text.replace('print("step", step)', "net(torch.randn(8, 4)); raise SystemExit(3)"))
    with pytest.raises(SystemExit):
        main(["memory", script])
    assert capsys.readouterr().out.count("pass") == 1


def test_a_script_without_backward(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(script).write_text("import torch\ntorch.ones(3, requires_grad=True).sin()\n")
    text = printed(capsys, "memory", script)
    assert text == "\nThere was no backward pass in the main thread of this process.\n"


@pytest.mark.parametrize("name", ["nowhere.py", "."])
def test_no_script(name: str, script: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "memory", name)
    assert line == f"python -m torchckpt memory: error: there is no such script; received: {name}; works: train.py"


def test_the_help_says_what_cannot_be_seen(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["memory", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "Not seen is what the script does in other threads and processes, what compiled code and" in text
