"""The command as it is typed: what it prints and writes, and its one line on bad input."""
from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.command.lines import refused
from tests.slow import few
from torchckpt import __main__ as program
from torchckpt.__main__ import main
from torchckpt.command import balance, simulate
from torchckpt.command.shared import say

ROOT = Path(__file__).parents[2]
SMALL = ("simulate", "--schedule", "1f1b", "--stages", "2", "--microbatches", "2")
TORCHS = "0F0,0F1,,,0B0,,0B1\n,1F0,1B0,1F1,1B1,,\n"


def typed(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "torchckpt", *arguments)
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def test_an_interrupt_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(simulate, "run", interrupted)
    assert main(SMALL) == 130
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "python -m torchckpt simulate: interrupted\n")


@pytest.mark.parametrize("can_start", [True, False])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_takes_long_says_so_once(monkeypatch, can_start, is_terminal):
    def no_thread(thread: threading.Thread) -> None:  # as where Python has none
        raise RuntimeError("can't start new thread")

    stderr = io.StringIO()
    monkeypatch.setattr(stderr, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(program, "_SILENCE_SECONDS", 0.05)
    monkeypatch.setattr(simulate, "run", lambda options: time.sleep(0.5))
    if not can_start:
        monkeypatch.setattr(threading.Thread, "start", no_thread)
    assert main(SMALL) == 0
    told = "python -m torchckpt simulate: still at work; Ctrl-C ends it\n"
    assert stderr.getvalue() == told * (can_start and is_terminal)


def test_the_table_of_the_readme() -> None:
    process = typed(
        *("simulate", "--schedule", "1f1b", "--stages", "8", "--microbatches", "32", "--forward", "1"),
        *("--backward", "2", "--recompute", "1", "--link", "0.25"),
        *("--compare", "none,arrival,ahead,ahead/last_stage"),
    )
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout.split("\n") == [
        "1f1b: 8 stages, 32 micro-batches; forward 1, backward 2, recompute 1, link 0.25, boundary 0",
        "",
        "recompute          step  overhead   bound  hidden  peak",
        "none                134     0.0 %   0.0 %       -   8 A",
        "arrival             173    29.1 %  13.8 %    0.00   1 A",
        "ahead             152.5    13.8 %  13.8 %    0.53   1 A",
        "ahead/last_stage  150.5    12.3 %  11.2 %    0.58   1 A",
        "",
    ]


def test_neither_the_package_nor_the_command_imports_torch() -> None:
    code = (
        "import sys, torchckpt, torchckpt.__main__ as command;"
        f"command.main({list(SMALL)!r});"
        "sys.exit('torch' in sys.modules)"
    )
    process = subprocess.run((sys.executable, "-c", code), cwd=ROOT, stdout=subprocess.DEVNULL)
    assert process.returncode == 0


def test_text_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--compare", "arrival,ahead/last_stage", "--gantt"]) == 0
    assert capsys.readouterr().out.split("\n")[6:] == [
        "arrival",
        "stage 0 | F0 F1 .  .  .  R0 B0--- .  R1 B1---",
        "stage 1 | .  F0 R0 B0--- F1 R1 B1--- .  .  .",
        "",
        "ahead/last_stage",
        "stage 0 | F0 F1 R0 .  B0--- R1 B1---",
        "stage 1 | .  F0 B0--- F1 B1--- .  .",
        "",
    ]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--json", "--boundary", "0.5"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["costs"] == {"forward": 1, "backward": 2, "recompute": 1, "link": 0, "boundary": 0.5}
    steps = {row["recompute"]: row["step_seconds"] for row in answer["rows"]}
    assert steps == {"none": 9, "arrival": 12, "ahead": 11}


def test_pictures_are_written(tmp_path: Path) -> None:
    drawn, traced = tmp_path / "step.svg", tmp_path / "step.json"
    assert main([*SMALL, "--svg", str(drawn), "--trace", str(traced), "--budget", "1.5"]) == 0
    words = [element.text for element in ElementTree.parse(drawn).iter("{http://www.w3.org/2000/svg}text")]
    assert {"nothing recomputed", "recomputed ahead of the gradient", "budget 1.5 micro-batches"} <= set(words)
    names = [e["args"]["name"] for e in json.loads(traced.read_text())["traceEvents"] if e["name"] == "process_name"]
    assert names == [f"{row}: rank {rank}" for row in ("none", "arrival", "ahead") for rank in (0, 1)]


@pytest.mark.parametrize(
    ("schedule", "stages", "ranks"),
    [("gpipe", 4, 4), ("zbv", 8, 4), ("interleaved-1F1B", 8, 4), ("ScheduleGPipe", 2, 2)],
)
def test_stages_are_those_of_the_whole_pipeline(
    schedule: str, stages: int, ranks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--schedule", schedule, "--stages", str(stages), "--microbatches", "8", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["stages"], answer["ranks"]) == (stages, ranks)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_schedule_of_torch_is_read(encoding: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(TORCHS, encoding=encoding)
    assert main(["simulate", "--csv", str(path)]) == 0
    assert capsys.readouterr().out.split("\n")[3] == "none          9     0.0 %   0.0 %       -   2 A"


_SIMULATE = "python -m torchckpt simulate: error: "
_CSV = "argument --csv: cannot read {}; works: a schedule as torch.distributed.pipelining writes it"
_COUNTS = "--stages 4 --microbatches 4"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            f"--schedule 1fb {_COUNTS}",
            "argument --schedule: the schedule is not one of gpipe, 1f1b, eager_1f1b, zbv, dualpipe_v, "
            "interleaved_1f1b, looped_bfs, zero_bubble; received: '1fb'; works: '1f1b'",
        ),
        (
            "--schedule 1f1b --stages 4 --microbatches 2",
            "m is too small: 1F1B needs m >= p; received: --microbatches 2, 4 ranks; "
            "works: --microbatches 4, the nearest",
        ),
        (f"--schedule 1f1b {_COUNTS} --forward -1", "argument --forward: not a number from 0 to 1e+12; received: -1"),
        (f"--schedule 1f1b {_COUNTS} --link nan", "argument --link: not a number from 0 to 1e+12; received: nan"),
        (
            f"--schedule 1f1b {_COUNTS} --recompute inf",
            "argument --recompute: not a number from 0 to 1e+12; received: inf",
        ),
        (f"--schedule 1f1b {_COUNTS} --budget much", "argument --budget: not a number from 0 to 1e+12; received: much"),
        (f"--schedule 1f1b {_COUNTS} --backward 0", "argument --backward: not a number above 0; received: 0"),
        ("--schedule 1f1b --stages 4", "--schedule is given without --microbatches; works: --schedule 1f1b --stages 4 "
         "--microbatches 8"),
        (
            "--schedule zbv --stages 7 --microbatches 8",
            "the stages do not divide among ranks of 2, as zbv has them; received: --stages 7; works: --stages 8",
        ),
        (
            "--schedule 1f1b --stages 99999 --microbatches 99999",
            "--stages times --microbatches is above 4000000; received: --stages 99999 --microbatches 99999; "
            "works: --microbatches 40",
        ),
        ("--csv missing.csv", _CSV.format("missing.csv: No such file or directory")),
        ("--csv tests", _CSV.format("tests: Is a directory")),
        ("--csv missing.csv --stages 4", "--stages is given with --csv, whose file says it"),
        (
            f"--schedule 1f1b {_COUNTS} --svg missing/step.svg",
            "argument --svg: cannot write missing/step.svg: No such file or directory; "
            "works: a file such as picture.svg, in a folder that is there",
        ),
        (
            f"--schedule 1f1b {_COUNTS} --trace tests",
            "argument --trace: cannot write tests: Is a directory; "
            "works: a file such as picture.json, in a folder that is there",
        ),
        (
            f"--schedule 1f1b {_COUNTS} --svg a.png",
            "argument --svg: the file's name does not end in .svg; received: a.png; works: a.svg",
        ),
        (
            "--schedule 1f1b --stages 0 --microbatches 4",
            "argument --stages: not a whole number from 1, such as 4; received: 0",
        ),
        (
            "--schedule 1f1b --stages 4 --microbatches -1",
            "argument --microbatches: not a whole number from 1, such as 4; received: -1",
        ),
        (
            f"--schedule 1f1b {_COUNTS} --compare none,ahed",
            "argument --compare: the policy is not none, arrival, ahead or ahead:K; the last three also with "
            "/last_stage, "
            "/last_micro_batch, /first_backward; received: 'ahed'; works: 'ahead'",
        ),
        (
            f"--schedule 1f1b {_COUNTS} --compare ahead:0",
            "argument --compare: k is not an integer >= 1; received: ahead:0; works: ahead:1",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)  # where "tests" is a folder
    assert refused(capsys, "simulate", *arguments.split()) == _SIMULATE + line


@few(1)
@pytest.mark.parametrize("arguments", ["", "frobnicate", "simulate", "simulate --nonsense", "simulate --stages x"])
def test_a_wrong_call_is_one_line_and_exit_code_2(arguments: str) -> None:
    process = typed(*arguments.split())
    assert (process.returncode, process.stdout, process.stderr.count("\n")) == (2, "", 1)
    assert process.stderr.startswith("python -m torchckpt")


def test_a_file_of_something_else_says_ten_of_its_faults(capsys, tmp_path):
    """It said all of them: one line of 30 kB for a plan as JSON, and more for a table of numbers."""
    path = tmp_path / "numbers.csv"
    path.write_text("\n".join(["1,2,3"] * 1000))
    text = refused(capsys, "simulate", "--csv", str(path))
    assert "3000 faults, the first 10 of them: line 1, column 1: this is no action" in text
    assert text.count("works: ") == 10


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "0F0,0X0\n",
            "argument --csv: {path}: line 1, column 2: this is no action: a stage, one of F B I W R, and a "
            "micro-batch; "
            "received: '0X0'; works: '0F3'",
        ),
        (
            f"0F{'9' * 5000}\n",
            "argument --csv: {path}: line 1, column 1: this is no action: a stage, one of F B I W R, and a "
            f"micro-batch; received: '0F{'9' * 5000}'; works: '0F3'",
        ),
        (
            "0B0,0F0\n",
            "argument --csv: {path}: line 1, column 1: 0B0 stands before its forward; received: 0B0 before 0F0; "
            "works: 0F0, ..., 0B0",
        ),
        (
            "",
            "argument --csv: {path}: a stage has no actions; stages are numbered from 0; received: no action; "
            "works: 0F0,0B0",
        ),
        (b"\xff\xfe\x00", _CSV.format("{path}: it is not text")),
    ],
)
def test_a_bad_file_says_where(
    text: str | bytes, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main(["simulate", "--csv", str(path)]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", _SIMULATE + line.format(path=path) + "\n")


def test_help_has_examples_that_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["simulate", "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out.replace("\\\n", "")
    examples = [line.split()[3:] for line in text.split("\n") if line.startswith("  python -m torchckpt")]
    assert len(examples) == 4
    for example in examples[:2]:
        assert main(example) == 0


# balance --------------------------------------------------------------------------------------------------------------

MODEL = """
from torch import nn

layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


class Layers(nn.Sequential):
    made = layers

    def __init__(self):
        super().__init__(nn.Embedding(5, 8), *layers)


class Sum(nn.Module):
    def forward(self, first, second):
        return first + second


def two_inputs():
    return nn.Sequential(Sum(), *layers)


def fails():
    raise KeyError("of the user")


def other():
    return "a word"


number = 3
linear = nn.Linear(8, 8)
"""
_WORKS = "works: def gpt(): return nn.Sequential(embedding, *blocks, head), tokens"
BALANCE = "python -m torchckpt balance: error: "


@pytest.fixture
def model_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "my_model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_model", None)


BY_BYTES = """\
my_model:layers: 2 stages, 3 layers

         layers     memory   share
stage 0       0  1.625 KiB  55.9 %  Linear
stage 1  1 to 2  1.281 KiB  44.1 %  ReLU, Linear

balance=[1, 2]
"""


def test_a_balance_and_the_line_to_paste(model_file: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["balance", "my_model:layers", "--stages", "2", "--input", "16,8", "--by", "bytes"]) == 0
    assert capsys.readouterr().out == BY_BYTES


@pytest.mark.slow
def test_balance_finds_modules_where_it_is_called(tmp_path: Path) -> None:
    (tmp_path / "my_model.py").write_text(MODEL)
    arguments = ("balance", "my_model:layers", "--stages", "2", "--input", "16,8", "--by", "bytes")
    home = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = (sys.executable, "-m", "torchckpt", *arguments)
    process = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=home)
    assert (process.returncode, process.stdout, process.stderr) == (0, BY_BYTES, "")


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ("my_model:layers --stages 2 --input 4,8", ["Linear", "ReLU", "Linear"]),
        ("my_model:Layers.made --stages 3 --input 4,8 --dtype float32 --by time", ["Linear", "ReLU", "Linear"]),
        ("my_model:Layers --stages 2 --input 4 --dtype int64", ["Embedding", "Linear", "ReLU", "Linear"]),
        ("my_model:two_inputs --stages 1 --input 4,8 --input 1,8", ["Sum", "Linear", "ReLU", "Linear"]),
    ],
)
def test_balance_as_json(
    arguments: str, names: list[str], model_file: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["balance", *arguments.split(), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert list(answer) == ["balance", "layers", "stages"]
    assert sum(answer["balance"]) == len(names)
    assert [layer["name"] for layer in answer["layers"]] == names
    assert len(answer["stages"]) == len(answer["balance"])
    assert sum(answer["stages"]) == pytest.approx(sum(layer["seconds"] for layer in answer["layers"]))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("layers", "the target is not written module:function; received: layers; works: my_package.model:gpt"),
        (":layers", "the target is not written module:function; received: :layers; works: my_package.model:gpt"),
        ("nowhere:gpt", "cannot make nowhere:gpt: ModuleNotFoundError: No module named 'nowhere'"),
        (
            "my_model:gpt",
            "cannot make my_model:gpt: my_model has no gpt; works: my_model:function, one that is there",
        ),
        ("my_model:fails", "cannot make my_model:fails: KeyError: 'of the user'"),
        ("my_model:number", f"the target is not a function; received: my_model:number, int; {_WORKS}"),
        (
            "my_model:other",
            "the target returns no module, and no list of modules; received: my_model:other, str; "
            f"{_WORKS}",
        ),
        (
            "my_model:linear",
            "the target returns no layers, in an nn.Sequential or a list; received: my_model:linear, Linear; "
            f"{_WORKS}",
        ),
        (
            "my_model:layers --stages 4",
            "cannot balance my_model:layers: there are fewer layers than stages; received: --stages 4, 3 layers; "
            "works: --stages 3, or more layers",
        ),
        (
            "my_model:layers --input 4,8",
            "my_model:layers does not run on these inputs: TypeError: Linear.forward() takes 2 positional arguments "
            "but 3 were given",
        ),
    ],
)
def test_a_bad_module_is_one_line_and_exit_code_2(
    arguments: str, line: str, model_file: None, capsys: pytest.CaptureFixture[str]
) -> None:
    module, *others = arguments.split()
    assert main(["balance", module, "--stages", "2", "--input", "4,8", *others]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", BALANCE + line + "\n")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--stages 0", "argument --stages: not a whole number from 1, such as 4; received: 0"),
        (
            "--input 8",
            "the following arguments are required: --stages; works: python -m torchckpt balance my_package.model:gpt "
            "--stages 4 --input 8,128 --dtype int64",
        ),
        ("--stages 2 --input 8,x", "argument --input: not whole numbers from 1, such as 8,128; received: 8,x"),
        ("--stages 2 --input 0", "argument --input: not whole numbers from 1, such as 8,128; received: 0"),
        ("--stages 2 --input 8,", "argument --input: not whole numbers from 1, such as 8,128; received: 8,"),
    ],
)
def test_bad_options_of_balance_are_one_line_and_exit_code_2(
    arguments: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["balance", "my_model:layers", *arguments.split()])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == BALANCE + line + "\n"


def test_help_of_balance_has_examples_that_parse(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["balance", "--help"])
    assert stopped.value.code == 0
    lines = capsys.readouterr().out.split("\n")
    examples = [line.split()[3:] for line in lines if line.startswith("  python -m torchckpt")]
    seen: list[str] = []
    monkeypatch.setattr(balance, "run", lambda options: seen.append(options.module))
    assert [main(example) for example in examples] == [0, 0]
    assert seen == ["my_package.model:gpt", "my_package.model:layers"]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith("torchckpt ")


@few(1)
@pytest.mark.parametrize("command", ["simulate", "plan --blocks 2 --budget 60%", "plan --blocks 2 --budget 60% --json"])
def test_a_full_disk_is_one_line(command):
    small = ("--schedule", "1f1b", "--stages", "2", "--microbatches", "2")
    name, *more = command.split()
    with Path("/dev/full").open("w") as full:
        asked = [sys.executable, "-m", "torchckpt", name, *small, *more]
        process = subprocess.run(asked, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    works = "works: > a file on a disk with room"
    line = f"python -m torchckpt {name}: error: cannot print the result: No space left on device; {works}\n"
    assert (process.returncode, process.stderr) == (2, line)


JOB = "plan --model llama3-8b --gpus 8 --device h100 --tp 8 --global-batch 8"


@pytest.mark.parametrize("command", [" ".join(SMALL), "plan --blocks 2 --budget 60% " + " ".join(SMALL[1:]), JOB])
def test_what_was_found_is_printed_where_its_picture_has_no_room(capsys, command):
    assert main([*command.split(), "--svg", "/dev/full"]) == 2
    captured = capsys.readouterr()
    assert "step" in captured.out
    assert captured.err.endswith("cannot write /dev/full: No space left on device; works: a file on a disk with room\n")


def test_what_an_encoding_has_not_is_escaped(monkeypatch):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    say("modell:größe")
    assert stdout.buffer.getvalue() == b"modell:gr\\xf6\\xdfe\n"


@pytest.mark.parametrize(("arguments", "line"), [
    (("plan", "--svg", f"{'a' * 300}.svg"), "argument --svg: cannot write aaa"),
    (("memory", f"{'a' * 300}.py"), "there is no such script; received: aaa"),
])  # fmt: skip
def test_a_name_that_is_too_long_is_one_line(arguments, line, capsys):
    assert line in refused(capsys, *arguments)


@pytest.mark.slow
def test_where_nobody_reads_on_it_ends():
    asked = f"{sys.executable} -m torchckpt simulate --schedule 1f1b --stages 64 --microbatches 64 --gantt | head -1"
    process = subprocess.run(asked, shell=True, capture_output=True, text=True, check=False)
    assert process.stdout.startswith("1f1b: 64 stages")
    assert process.stderr == ""


def test_the_boundary_is_a_part_of_what_is_saved(capsys):
    assert main([*SMALL, "--boundary", "2"]) == 2
    line = "--boundary is above 1, all of A; received: --boundary 2; works: --boundary 0.25"
    assert line in capsys.readouterr().err
