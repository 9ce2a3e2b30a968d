"""A script that is run to its second backward pass, or its end, or its error; and what was kept for each pass."""
from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.slow import few
from torchckpt.__main__ import main
from torchckpt.command.memory import run_script
from torchckpt.testing import SavedByLine

NET = """
import sys, torch
from torch import nn
net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(net.parameters())
"""
LOOP = NET + """
for step in range(4):
    loss = net(torch.randn(8, 4)).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
RELU = 8 * 16 * 4


class Ran(NamedTuple):
    """What came of a script."""

    passes: list[SavedByLine]
    raised: BaseException | None

    @property
    def totals(self) -> list[int]:
        return [lines.total for lines in self.passes]


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """Runs the source of a script."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(source: str, *arguments: str, most: int = 2) -> Ran:
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(source))
        passes: list[SavedByLine] = []
        try:
            run_script([str(path), *arguments], most, passes)
        except BaseException as raised:
            return Ran(passes, raised)
        return Ran(passes, None)

    return run


def test_a_plain_loop_is_ended_after_so_many_passes(ran):
    assert ran(LOOP).totals == [RELU] * 2
    assert ran(LOOP, most=3).totals == [RELU] * 3
    assert ran(LOOP, most=9).totals == [RELU] * 4


def test_batch_parameters_and_buffers_do_not_count_from_the_first_pass_on(ran):
    (row,) = ran(LOOP, most=1).passes[0].rows
    assert (row.module, row.operation, row.place) == ("1", "Relu", f"{Path(row.file).parent.name}/train.py:8")


def test_each_backward_of_an_accumulation_is_a_pass(ran):
    source = NET + "for size in (2, 8, 4):\n    net(torch.randn(size, 4)).mean().backward()\noptimizer.step()\n"
    assert ran(source, most=9).totals == [RELU // 4, RELU, RELU // 2]


def test_forwards_before_one_backward_are_one_pass(ran):
    source = NET + "x = torch.randn(8, 4)\n(net(x).mean() + net(x).mean()).backward()\n"
    assert ran(source).totals == [2 * RELU]


def test_torch_autograd_grad_ends_a_pass_unless_it_makes_a_graph(ran):
    source = NET + """
loss = net(torch.randn(8, 4)).mean()
first = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
sum(one.sum() for one in first).backward()
torch.autograd.grad(net(torch.randn(8, 4)).mean(), list(net.parameters()))
"""
    assert [total >= RELU for total in ran(source, most=9).totals] == [True, True]


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize("how", ["create_graph=True", "None, None, True"])
def test_a_backward_that_makes_a_graph_is_no_pass(ran, how):
    penalised = LOOP.replace("loss.backward()", f"""loss.backward({how})
    sum(parameter.grad.square().sum() for parameter in net.parameters()).backward()""")
    assert len(set(ran(penalised, most=4).totals)) == 1


@few(1)
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch 2.15, where it compiles such a layer
@pytest.mark.parametrize("compiled", [
    'net = torch.compile(net, backend="aot_eager")',
    'net[0].compile(backend="aot_eager"); net[2].compile(backend="aot_eager")',
    "from torchckpt import graph; net = graph.rematerialize(net)",
])
def test_a_trace_is_no_pass_and_what_it_makes_is_not_kept(ran, compiled):
    script = LOOP.replace("for step", f"{compiled}\nfor step").replace(".mean()", ".exp().mean()")
    passes = ran(script, most=4)
    assert passes.raised is None
    assert len(passes.totals) == 4
    assert len(set(passes.totals)) == 1
    assert passes.totals[0] >= 32


def test_passes_inside_of_a_pass_are_part_of_it(ran):
    source = NET + """
from torch.utils.checkpoint import checkpoint
x = torch.randn(8, 4, requires_grad=True)
checkpoint(net, x, use_reentrant=True).mean().backward()
"""
    assert ran(source, most=9).totals == [RELU]


def test_a_graph_that_is_retained_is_no_part_of_the_next_pass(ran):
    source = NET + """
losses = []
for _ in range(2):
    losses.append(net(torch.randn(8, 4)).mean())
    losses[-1].backward(retain_graph=True)
"""
    assert ran(source, most=9).totals == [RELU] * 2


def test_evaluation_between_passes(ran):
    source = NET + """
for step in range(2):
    with torch.no_grad():
        net(torch.randn(64, 4))
    net(torch.randn(8, 4)).mean().backward()
"""
    assert ran(source, most=9).totals == [RELU] * 2


def test_a_script_without_backward(ran):
    assert ran(NET + "net(torch.randn(8, 4))\n") == ([], None)


def test_a_script_that_fails_tells_of_what_was_kept_until_then(ran):
    source = NET + """
def forward():
    loss = net(torch.randn(8, 4)).mean()
    raise ValueError("the pump is off")

net(torch.randn(8, 4)).mean().backward()
forward()
"""
    result = ran(source)
    assert result.totals == [RELU, RELU]
    assert isinstance(result.raised, ValueError)


def test_a_script_that_cannot_be_read_as_python(ran):
    result = ran("for\n")
    assert result.passes == []
    assert isinstance(result.raised, SyntaxError)


def test_a_script_that_ends_python(ran):
    assert ran("raise SystemExit(3)").raised.code == 3


def test_a_script_that_catches_exceptions_is_ended(ran):
    caught = "    try:\n        loss.backward()\n    except Exception:\n        pass"
    source = LOOP.replace("    loss.backward()", caught)
    assert ran(source).totals == [RELU] * 2


def test_arguments_guard_and_folder_are_those_of_python(ran, tmp_path):
    (tmp_path / "beside.py").write_text("there = True")
    before = sys.argv[:], sys.path[:], sys.modules["__main__"]
    source = """
    import sys, beside
    assert __name__ == "__main__" and sys.modules["__main__"].__file__ == __file__
    assert sys.argv == [__file__, "--rate", "3"], sys.argv
    assert sys.path[0] in __file__
    """
    assert ran(source, "--rate", "3").raised is None
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before


def test_backward_passes_of_other_threads_are_none(ran):
    source = """
    import threading, torch

    def step():
        torch.ones(3, requires_grad=True).mul(2).sin().sum().backward()

    for _ in range(3):
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
    step()
    """
    assert ran(source, most=9).totals == [12]


def test_torch_is_as_before(ran):
    functions = torch.autograd.backward, torch.autograd.grad
    for source in (LOOP, NET, "raise ValueError('the pump is off')"):
        ran(source)
        assert (torch.autograd.backward, torch.autograd.grad) == functions


def test_the_picture_is_where_the_command_began(tmp_path, monkeypatch, capsys):
    (tmp_path / "else").mkdir()
    (tmp_path / "train.py").write_text("import os\nos.chdir('else')\n" + LOOP)
    monkeypatch.chdir(tmp_path)
    main(["memory", "train.py", "--svg", "step.svg"])
    assert (tmp_path / "step.svg").exists()
    assert not [*(tmp_path / "else").iterdir()]
