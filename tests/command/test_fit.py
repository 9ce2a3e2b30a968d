"""fit as it is typed: its table and the line to paste, its files, and its one line on bad input."""
from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.command import lines
from tests.scripts import HOME, run
from tests.slow import few
from torchckpt import graph
from torchckpt.__main__ import main
from torchckpt.command import fit

MODEL = """
import torch
from torch import nn
from torchckpt import graph


def mlp():
    return nn.Sequential(*(kind() for _ in range(4) for kind in (lambda: nn.Linear(8, 8), nn.Tanh))), torch.randn(64, 8)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, scale):
        return graph.mark(self.linear(x), "h").tanh() * scale


def scaled():
    return Scaled(), (torch.randn(4, 8), torch.randn(4, 8))


class Pair(tuple):
    def __new__(cls):
        return super().__new__(cls, scaled())


class Batch(Scaled):
    def forward(self, batch):
        return super().forward(batch["x"], batch["scale"])


def batch():
    return Batch(), dict(zip(("x", "scale"), scaled()[1]))


def one_input():
    return Scaled(), torch.randn(4, 8)


class Branch(Scaled):
    def forward(self, x):
        return x if self.linear(x).sum() > 0 else -x


def branch():
    return Branch(), torch.randn(4, 8)


def bare():
    return Scaled()


def three():
    return Scaled(), *scaled()[1]


def fails():
    raise KeyError("of the user")


module = Scaled()
"""
pytestmark = pytest.mark.usefixtures("quick_planner")
ERROR = "python -m torchckpt fit: error: "
WORKS = "works: def gpt(): return model, tokens; or: return model, (tokens, mask)"
PLACE = "works: a file such as picture{}, in a folder that is there"
BUDGET = "argument --budget: not a size such as 100MB or 6GiB, or a share of eager's peak such as 40%; received: "


@pytest.fixture(autouse=True)
def model_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "my_model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_model", None)


def printed(arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    return lines.printed(capsys, "fit", *arguments.split())


def told(arguments: str, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    answer: dict[str, object] = json.loads(printed(f"{arguments} --json", capsys))
    return answer


def refused(arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr, without what it begins with."""
    line = lines.refused(capsys, "fit", *arguments.split())
    assert line.startswith(ERROR)
    return line.removeprefix(ERROR)


# the plan -------------------------------------------------------------------------------------------------------------


def test_the_table_of_the_plan_and_the_line_to_paste(capsys: pytest.CaptureFixture[str]) -> None:
    from my_model import mlp

    model, example = mlp()
    plan = graph.rematerialize(model, example, budget="12kB").plan
    text = printed("my_model:mlp --budget 12kB", capsys)
    assert text == f'my_model:mlp\n\n{plan}\n\ngraph.rematerialize(model, example, budget="12kB")\n'


@few(1)
@pytest.mark.parametrize(
    ("arguments", "call"),
    [
        ("mlp", "model, example"),
        ("scaled", "model, *example"),
        ("Pair", "model, *example"),
        ("batch", "model, example"),
        ("mlp --budget 1.5MiB", 'model, example, budget="1.5MiB"'),
        ("mlp --budget 12500", "model, example, budget=12500"),
        ("mlp --budget 90%", 'model, example, budget="90%"'),
        ("mlp --budget 90% --exact", 'model, example, budget="90%", exact=True'),
        ("mlp --keep speed", 'model, example, keep="speed"'),
        ("mlp --keep 1,3", 'model, example, keep=["1", "3"]'),
        ("scaled --keep collection", 'model, *example, keep="collection"'),
        ("scaled --keep h", 'model, *example, keep=["h"]'),
        ("mlp --costs profile --rng replay", 'model, example, costs="profile", rng="replay"'),
    ],
)
def test_the_line_says_what_was_chosen_and_works(
    arguments: str, call: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import my_model

    if "--exact" in arguments:
        pytest.importorskip("ortools")
    answer = told(f"my_model:{arguments}", capsys)
    assert answer["call"] == f"graph.rematerialize({call})"
    model, example = getattr(my_model, arguments.split()[0])()
    pasted = eval(str(answer["call"]), {"graph": graph, "model": model, "example": example})
    assert pasted.plan.eager_peak_bytes == answer["eager_peak_bytes"]


def test_json_has_the_numbers_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    answer = told("my_model:mlp --budget 12kB --explain 1", capsys)
    assert answer.pop("call") == 'graph.rematerialize(model, example, budget="12kB")'
    assert str(answer.pop("explain")).startswith("1:\n  tanh")
    assert list(answer) == [
        "peak_bytes", "budget_bytes", "lower_bound_bytes", "eager_peak_bytes", "recompute_share", "recompute_flops",
        "saved", "recomputed", "modules",
    ]
    modules, names = answer["modules"], ("kept_bytes", "dropped_bytes", "recomputed_count", "recomputed_flops")
    total = [sum(row[name] for row in modules) for name in names]
    table = printed("my_model:mlp --budget 12kB", capsys).split("\n\n")[2].split("\n")
    kept, dropped, repeats, flops = total
    assert table[-1].split()[1:] == [f"{kept / 1e3:.4g}", f"{dropped / 1e3:.4g}", f"{repeats}", f"{flops / 1e3:.4g}"]
    assert total[3] == answer["recompute_flops"]
    assert answer["lower_bound_bytes"] <= answer["peak_bytes"] <= answer["budget_bytes"] == 12_000
    assert answer["recomputed"] != []
    assert answer["recompute_share"] > 0


def test_a_plan_is_explained_below_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    *_, explained, line = printed("my_model:mlp --explain 1", capsys).split("\n\n")
    assert explained.split("\n")[0] == "1:"
    assert line == "graph.rematerialize(model, example)\n"


def test_the_plan_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from my_model import mlp

    path = tmp_path / "plan.json"
    answer = told(f"my_model:mlp --budget 12kB --plan {path}", capsys)
    plan = graph.Plan.from_json(path.read_text())
    assert plan.peak_bytes == answer["peak_bytes"]
    model, example = mlp()
    assert graph.rematerialize(model, example, keep=plan).plan.schedule == plan.schedule


def test_pictures_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph, "frontier", partial(graph.frontier, points=3))
    drawn, curve = tmp_path / "plan.svg", tmp_path / "frontier.svg"
    printed(f"my_model:mlp --budget 12kB --svg {drawn} --frontier {curve}", capsys)
    words = [
        {element.text for element in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")}
        for path in (drawn, curve)
    ]
    assert any("my_model:mlp: within the budget of 12 kB" in str(word) for word in words[0])
    assert "budget 12 kB" in words[0]
    assert {"Memory and recomputation: my_model:mlp", "this plan"} <= words[1]


def test_modules_are_found_where_it_is_called(tmp_path: Path) -> None:
    process = run("-m", "torchckpt", "fit", "my_model:mlp", cwd=tmp_path)
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout.endswith("\n\ngraph.rematerialize(model, example)\n")


def test_neither_its_help_nor_a_wrong_option_imports_torch() -> None:
    for arguments in (["fit", "--help"], ["fit", "my_model:mlp", "--budget", "much"]):
        code = (
            "import sys\nfrom torchckpt.__main__ import main\n"
            f"try: main({arguments!r})\nexcept SystemExit: sys.exit('torch' in sys.modules)"
        )
        process = subprocess.run((sys.executable, "-c", code), capture_output=True, env=HOME)
        assert process.returncode == 0


# bad input ------------------------------------------------------------------------------------------------------------


def test_a_budget_that_is_too_small_is_answered_by_one_that_works(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused("my_model:mlp --budget 1kB", capsys)
    assert re.match(r"the budget is too small: the least found is [\d.]+kB; received: 1kB; no schedule", line)
    budget = line.partition("works: --budget ")[2].partition(" ")[0]
    assert told(f"my_model:mlp --budget {budget}", capsys)["peak_bytes"] <= float(budget.removesuffix("kB")) * 1000


@few(5)
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("mlp", "the target is not written module:function; received: mlp; works: my_package.model:gpt"),
        ("nowhere:mlp", "cannot make nowhere:mlp: ModuleNotFoundError: No module named 'nowhere'"),
        ("my_model:fails", "cannot make my_model:fails: KeyError: 'of the user'"),
        (
            "my_model:module",
            f"the target returns no example of a call; received: my_model:module, Scaled; {WORKS}",
        ),
        ("my_model:bare", f"the target returns no example of a call; received: my_model:bare, Scaled; {WORKS}"),
        (
            "my_model:three",
            "the loss, the third value of the target, is no function; several arguments of a call are a tuple; "
            "received: "
            f"my_model:three, (Scaled, Tensor, Tensor); {WORKS}",
        ),
        (
            "my_model:one_input",
            "my_model:one_input does not run on its example: TypeError: Scaled.forward() missing 1 required positional "
            "argument: 'scale'",
        ),
        ("my_model:mlp --budget much", f"{BUDGET}much"),
        ("my_model:mlp --budget 12XB", f"{BUDGET}12XB"),
        ("my_model:mlp --budget 140%", f"{BUDGET}140%"),
        ("my_model:mlp --budget 1.4", f"{BUDGET}1.4"),
        ("my_model:mlp --budget 0", f"{BUDGET}0"),
        ("my_model:mlp --budget 0.4", f"{BUDGET}0.4"),
        ("my_model:mlp --budget 80", f"{BUDGET}80"),
        ("my_model:mlp --budget nan", f"{BUDGET}nan"),
        ("my_model:mlp --budget -5", f"{BUDGET}-5"),
        (
            "my_model:mlp --keep 1,",
            "argument --keep: not one of speed, memory, collection, or names with commas between; received: 1,",
        ),
        (
            "my_model:mlp --keep 9",
            "a name in keep is that of no module or mark of the traced call; received: '9'; "
            "works: --keep 0",
        ),
        (
            "my_model:mlp --exact",
            "--exact is given without a budget; received: no --budget; works: --budget 6GiB",
        ),
        (
            "my_model:mlp --svg missing/plan.svg",
            f"argument --svg: cannot write missing/plan.svg: No such file or directory; {PLACE.format('.svg')}",
        ),
        ("my_model:mlp --plan /", f"argument --plan: cannot write /: Is a directory; {PLACE.format('.json')}"),
        (
            "my_model:mlp --frontier missing/curve.svg",
            f"argument --frontier: cannot write missing/curve.svg: No such file or directory; {PLACE.format('.svg')}",
        ),
        ("my_model:mlp --svg a", "argument --svg: the file's name does not end in .svg; received: a; works: a.svg"),
        ("my_model:mlp --plan a", "argument --plan: the file's name does not end in .json; received: a; works: a.json"),
        (
            "my_model:mlp --svg a.svg --frontier a.svg",
            "--svg and --frontier write the same file; received: a.svg for both",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(arguments, capsys) == line


def test_a_call_that_cannot_be_traced_says_where(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused("my_model:branch", capsys)
    assert line.startswith("the call depends on the values of its tensors, and a graph cannot; received: ")
    assert "if self.linear(x).sum() > 0" in line


def test_a_name_that_there_is_not_is_answered_by_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused("my_model:scaled --explain linaer", capsys)
    assert line.endswith("received: 'linaer'; works: --explain linear")


# help -----------------------------------------------------------------------------------------------------------------


def test_help_has_examples_that_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out.split("\n")
    examples = [line.split()[3:] for line in text if line.startswith("  python -m torchckpt")]
    assert len(examples) == 4
    seen: list[argparse.Namespace] = []
    monkeypatch.setattr(fit, "run", seen.append)
    assert [main(example) for example in examples] == [0] * 4
    assert [options.module for options in seen] == ["my_package.model:gpt"] * 4


def test_each_policy_of_the_graph_is_in_the_help() -> None:
    """The command names them without an import of torch."""
    from torchckpt.command import fit
    from torchckpt.graph.keep import POLICIES

    assert set(fit._POLICIES) == set(POLICIES)
    assert all(f"\n  {name} " in fit._EXAMPLES for name in POLICIES)
