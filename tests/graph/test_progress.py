"""The log of traces, and the line on a terminal: on a clock of the tests' own."""
from __future__ import annotations

import io
import logging
import sys

import pytest
import torch
from torch import nn

from tests.helpers import leaf
from tests.slow import few
from torchckpt import graph
from torchckpt.graph import progress
from torchckpt.graph.progress import Watch
from torchckpt.planning.remat.search.planner import fit


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """Says what is in the list, one after the other; the last again and again."""
    seconds = [0.0]
    monkeypatch.setattr(progress, "_clock", lambda: seconds.pop(0) if len(seconds) > 1 else seconds[0])
    return seconds


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.drop = nn.Parameter(torch.ones(50)), nn.Dropout(0.5)

    def forward(self, x, *, deep=False):
        for _ in range(4):
            x = self.drop((x * self.weight).tanh())
        return x.sum() if not deep else x.tanh().sum()


def lines(caplog):
    """Of the log, without the seconds and the plan."""
    return [record.getMessage().partition(". Plan: ")[0] for record in caplog.records if record.name == "torchckpt"]


# the log --------------------------------------------------------------------------------------------------------------


def test_each_trace_is_one_line_with_its_reason(clock, caplog):
    model = Chain()
    step = graph.rematerialize(model)
    with caplog.at_level(logging.INFO, logger="torchckpt"):
        for rows in (2, 2, 3, 2):
            step(torch.ones(rows, 50))
        model.eval()
        step(torch.ones(2, 50))
        with torch.autocast("cpu", torch.bfloat16):
            step(torch.ones(3, 50))
        step(torch.ones(2, 50), deep=True)
        step(torch.ones(2, 50, dtype=torch.float64))
    head = "rematerialize(): Chain traced in 0.00 s and planned in 0.00 s, because of "
    assert lines(caplog) == [head + reason for reason in (
        "the first call",
        "shape of args[0]: (2, 50), now (3, 50)",
        "eval()",
        "shape of args[0]: (2, 50), now (3, 50), autocast",
        "other arguments",
        "dtype of args[0]: torch.float32, now torch.float64",
    )]


def test_seconds_are_those_of_the_trace_and_of_the_plan(clock, caplog):
    clock[:] = [10.0, 20.0, 23.5, 31.0]  # the trace begins, planning begins and ends, the trace ends
    with caplog.at_level(logging.INFO, logger="torchckpt"):
        graph.rematerialize(Chain(), torch.ones(2, 50))
    assert lines(caplog) == [
        "rematerialize(): Chain traced in 17.50 s and planned in 3.50 s, because of the first call"
    ]


def test_nothing_is_printed(capfd):
    graph.rematerialize(Chain(), torch.ones(20, 50), budget="95%")
    assert capfd.readouterr() == ("", "")


def test_in_place_and_a_backend_log_too(clock, caplog):
    with caplog.at_level(logging.INFO, logger="torchckpt"):
        graph.rematerialize_(Chain(), torch.ones(2, 50))
        torch.compile(Chain(), backend=graph.backend(inner="eager"))(torch.ones(2, 50))
    first, second = lines(caplog)
    assert first.startswith("rematerialize_(): Chain traced in ")
    assert second.endswith("because of graph 1 of torch.compile")


# the terminal ---------------------------------------------------------------------------------------------------------


def test_a_line_is_shown_from_three_seconds_on_and_goes(clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    watch = Watch()
    with watch.planning(120) as tell:
        for clock[:] in ([2.9], [3.0], [3.1], [3.3]):
            tell(f"eviction {clock[0]}")
    assert terminal.getvalue() == (
        "\rtorchckpt plans 120 operations: eviction 3.0, 3 s\x1b[K"
        "\rtorchckpt plans 120 operations: eviction 3.3, 3 s\x1b[K"
        "\r\x1b[K"
    )
    assert watch.planning_seconds == 3.3


@pytest.mark.parametrize("stream", [io.StringIO, Terminal, lambda: None])
def test_nothing_is_shown_elsewhere_or_of_a_short_plan(clock, monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", stderr := stream())
    with Watch().planning(120) as tell:
        clock[:] = [2.0 if isinstance(stderr, Terminal) else 50.0]
        tell("eviction 1")
    assert stderr is None or stderr.getvalue() == ""


def test_the_line_goes_where_planning_raises(clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())

    def fail():
        with Watch().planning(120) as tell:
            clock[:] = [9.0]
            tell("eviction 1")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_a_plan_that_takes_long_shows_on_a_terminal(clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    moments = iter(range(1000))
    monkeypatch.setattr(progress, "_clock", lambda: next(moments) / 1.0)
    graph.rematerialize(Chain(), torch.ones(20, 50), budget="95%")
    assert "\rtorchckpt plans " in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_planner_says_what_it_does():
    told = []
    flow = graph.rematerialize(Chain(), leaf(20, 50)).plan.flow
    fit(flow, int(0.8 * graph.rematerialize(Chain(), leaf(20, 50)).plan.eager_peak_bytes), tell=told.append)
    assert told[0] == "eviction 1"
    assert told[-1].startswith(("search, of 4 number", "least memory"))


def test_a_trace_that_takes_long_shows_on_a_terminal(clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with Watch().tracing("Chain") as tell:
        for clock[:] in ([5.0], [7.9], [8.0], [8.1], [8.3]):  # it counts from the first update
            for _ in range(100):
                tell("an operator")
    assert terminal.getvalue() == (
        "\rtorchckpt traces Chain: 300 operations, 3 s\x1b[K"
        "\rtorchckpt traces Chain: 500 operations, 3 s\x1b[K"
        "\r\x1b[K"
    )


@few(1)
@pytest.mark.parametrize("take", [
    lambda: graph.rematerialize(Chain(), torch.ones(2, 50)),
    lambda: graph.gradient(Chain(), torch.ones(2, 50)),
    lambda: graph.gradients(Chain(), torch.ones(2, 50)),
], ids=["rematerialize", "gradient", "gradients"])
def test_each_operator_of_a_trace_counts(take, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    moments = iter(range(0, 100_000, 3))
    monkeypatch.setattr(progress, "_clock", lambda: float(next(moments)))
    monkeypatch.setattr(progress, "_BETWEEN_OPERATORS", 5)
    take()
    assert "\rtorchckpt traces Chain: 10 operations, 3 s\x1b[K" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_elsewhere_the_log_says_what_takes_long(clock, monkeypatch, caplog):
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    with caplog.at_level(logging.INFO, logger="torchckpt"), Watch().tracing("Chain") as tell:
        for clock[:] in ([0.0], [2.0], [4.0], [6.0], [13.0], [14.0]):
            for _ in range(100):
                tell("an operator")
    assert lines(caplog) == [
        "torchckpt traces Chain: 300 operations, 4 s", "torchckpt traces Chain: 600 operations, 14 s",
    ]
    assert stream.getvalue() == ""
