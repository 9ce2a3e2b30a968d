"""One kind of target for fit, balance and plan; and the two names of the command."""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from tests.command.lines import printed, refused
from tests.scripts import run
from tests.slow import few
from torchckpt.__main__ import main
from torchckpt.command.shared import check_apart, in_options

MODEL = """
import torch
from torch import nn


def row(count=2):
    return nn.Sequential(*(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))) for _ in range(count)))


def gpt():
    return row(), torch.randn(4, 8)


def pair():
    return list(row()), (torch.randn(4, 8),), lambda y: y.sum()


def listed():
    return nn.ModuleList(row()), torch.randn(4, 8)


class Two(nn.Module):
    def forward(self, x):
        return x, x


class Sum(nn.Module):
    def forward(self, x, y):
        return x * y


def tuples():
    return [nn.Linear(8, 8), Two(), Sum()], torch.randn(4, 8)


def bare():
    return row()


def fails():
    raise KeyError("mine")


def asks():
    return row(int(torch.ones(2).sum().item())), torch.randn(4, 8)


def quits():
    raise SystemExit(0)


class Ends(nn.Linear):
    def forward(self, x):
        raise SystemExit(0)


def ends():
    return [Ends(8, 8)], torch.randn(4, 8)


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def mute():
    raise Mute


class Mutes(nn.Linear):
    def forward(self, x):
        raise Mute


def mutes():
    return [Mutes(8, 8)], torch.randn(4, 8)


def wide():
    return [nn.Linear(8, 8), nn.Linear(9, 9)], torch.randn(4, 8)
"""
REST = {
    "fit": (),
    "balance": ("--stages", "1", "--by", "bytes"),
    "plan": ("--device", "h100", "--schedule", "1f1b", "--microbatches", "2", "--budget", "100%"),
}


@pytest.fixture(autouse=True)
def model_file(tmp_path, monkeypatch):
    (tmp_path / "my_model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_model", None)


def words(command, name, *options):
    return [command, name if ":" in name else f"my_model:{name}", *REST[command], *options]


@few(1)
@pytest.mark.parametrize("command", REST)
@pytest.mark.parametrize("target", ["gpt", "pair", "listed"])
def test_the_same_target_works_for_each(command, target, capsys):
    assert printed(capsys, *words(command, target))


def test_a_list_runs_one_after_the_other_and_hands_tuples_on(capsys):
    assert "graph.rematerialize(model, example)" in printed(capsys, *words("fit", "tuples"))


def test_the_stages_of_a_plan_are_the_members(capsys):
    assert "1f1b: 2 stages on 2 ranks, 2 micro-batches" in printed(capsys, *words("plan", "gpt"))


def test_balance_takes_the_example_or_the_input(capsys):
    assert printed(capsys, *words("balance", "gpt", "--input", "2,8", "--dtype", "float32"))


BAD = [
    ("fit", "bare", "the target returns no example of a call; received: my_model:bare, Sequential; works: "),
    ("plan", "bare", "the target returns no example of a micro-batch; received: my_model:bare, Sequential; works: "),
    ("balance", "bare", "balance has no inputs; received: my_model:bare, without an example; works: --input 8,128"),
    *((command, "fails", "cannot make my_model:fails: KeyError: 'mine'") for command in REST),
    *((command, "quits", "cannot make my_model:quits: it ends Python: SystemExit: 0") for command in REST),
    *((command, "ends", "cannot run my_model:ends: it ends Python: SystemExit: 0") for command in REST),
    *((command, "mute", "Mute: it has no text, as its __str__ raises RuntimeError") for command in REST),
    *((command, "mutes", "Mute: it has no text, as its __str__ raises RuntimeError") for command in REST),
    *((command, "gtp", "cannot make my_model:gtp: my_model has no gtp; works: my_model:gpt") for command in REST),
    *((command, "nowhere:f", "cannot make nowhere:f: ModuleNotFoundError: No module named") for command in REST),
    *((command, "my_model.py:f", "received: my_model.py:f; works: my_model:f") for command in REST),
    ("plan", "asks", "cannot plan my_model:asks: the function that makes the stages failed"),
]


@few(9)
@pytest.mark.parametrize(("command", "target", "message"), BAD)
def test_a_target_that_does_not_fit_is_named_in_one_line(command, target, message, capsys):
    assert message in refused(capsys, *words(command, target))


@pytest.mark.parametrize("command", ["fit", "plan"])
def test_torch_logs_no_traceback_of_a_shape(command, tmp_path):
    process = run("-m", "torchckpt", *words(command, "wide"), cwd=tmp_path)
    assert process.returncode == 2
    assert process.stderr.count("\n") == 1


# the names of the command ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/usr/bin/torchckpt", "torchckpt.exe"])
def test_the_script_says_its_own_name(path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [path])
    with pytest.raises(SystemExit):
        main(["fit", "--help"])
    text = capsys.readouterr().out
    assert text.startswith("usage: torchckpt fit ")
    assert "\n  torchckpt fit my_package.model:gpt\n" in text
    assert "python -m" not in text
    assert main(["fit", "nowhere"]) == 2
    assert capsys.readouterr().err.startswith("torchckpt fit: error: ")


def test_the_script_finds_modules_of_the_current_folder(tmp_path):
    root = Path(__file__).parents[2]
    assert 'torchckpt = "torchckpt.__main__:main"' in (root / "pyproject.toml").read_text(encoding="utf-8")
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "torchckpt"
    path = f"sys.path.insert(0, {str(root)!r})"
    lines = ["import sys", path, "from torchckpt.__main__ import main", "sys.exit(main())"]
    script.write_text("\n".join(lines))
    process = run(str(script), "balance", "my_model:fails", "--stages", "1", cwd=tmp_path)
    assert process.stderr == "torchckpt balance: error: cannot make my_model:fails: KeyError: 'mine'\n"


# errors in the words of the command line ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('works: budget="60GB", budget=6e10, or more', "works: --budget 60GB, --budget 6e10, or more"),
        ("received: budget='abc'; works", "received: --budget abc; works"),
        ("works: keep=['0', '1.a', '2']", "works: --keep 0"),
        ("received: chunks=2; works: m=4", "received: --chunks 2; works: --microbatches 4"),
    ],
)
def test_arguments_of_functions_are_said_as_options(text, expected):
    assert in_options(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("works: budget=896 or more, or fewer", "works: --budget 896B or more, or fewer"),
        ("works: budget=853.5; received: 3", "works: --budget 853.5B; received: 3"),
        ('works: budget="60GB", budget="50%", budget=6e10', "works: --budget 60GB, --budget 50%, --budget 6e10"),
        ("works: --schedule 1f1b --stages 4 --microbatches 8", "works: --schedule 1f1b --microbatches 8"),
        ("works: --stages 4 --ranks 2", "works: 4 stages of the model --ranks 2"),
    ],
)
def test_a_plan_of_a_model_has_units_and_no_number_of_stages(text, expected):
    assert in_options(text, of_model=True) == expected


def test_files_that_are_not_the_same_may_be_written_together(tmp_path):
    check_apart(argparse.Namespace(svg=tmp_path / "a.svg", frontier=tmp_path / "b.svg", trace=None))


def test_a_file_in_a_folder_that_is_gone_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    call = "simulate", "--schedule", "1f1b", "--stages", "2", "--microbatches", "2", "--svg"
    assert "argument --svg: cannot write a.svg: No such file or directory" in refused(capsys, *call, "a.svg")
    assert printed(capsys, *call, str(tmp_path / "a.svg"))


def test_a_link_to_itself_is_refused(tmp_path, capsys):
    link = tmp_path / "a.svg"
    link.symlink_to(link)
    call = "simulate", "--schedule", "1f1b", "--stages", "2", "--microbatches", "2", "--svg"
    assert "cannot write" in refused(capsys, *call, str(link))
