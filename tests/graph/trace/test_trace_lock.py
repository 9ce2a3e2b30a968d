"""TraceLock: who waits for whom, as a list of what happened."""
from __future__ import annotations

import itertools
import linecache
import sys
import threading
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx

from tests.helpers import in_threads
from torchckpt import graph
from torchckpt.graph.private.dynamo import compile_lock
from torchckpt.graph.trace import capture
from torchckpt.graph.trace.capture import TRACE_LOCK, TraceLock
from torchckpt.regions.flags import state_lock


class Story:
    """What threads do, in its order. ``wait(name)`` waits until another has told it."""

    def __init__(self):
        self.told, self._changed = [], threading.Condition()

    def tell(self, name):
        with self._changed:
            self.told.append(name)
            self._changed.notify_all()

    def wait(self, name):
        with self._changed:
            assert self._changed.wait_for(lambda: name in self.told, timeout=60)


def run(*threads):
    threads = [threading.Thread(target=thread, daemon=True) for thread in threads]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()


def assert_waits(first, second):
    """Whoever wants ``second`` waits until ``first`` has ended."""
    story = Story()

    def one():
        with first():
            story.tell("one in")
            story.wait("two wants")
            story.tell("one out")

    def two():
        story.wait("one in")
        story.tell("two wants")
        with second():
            story.tell("two in")

    run(one, two)
    assert story.told == ["one in", "two wants", "one out", "two in"]


@pytest.mark.parametrize(("first", "second"), [("tracing", "calling"), ("calling", "tracing"), ("tracing", "tracing")])
def test_one_waits_for_the_other(first, second):
    lock = TraceLock()
    assert_waits(getattr(lock, first), getattr(lock, second))


def test_calls_are_side_by_side():
    lock, story = TraceLock(), Story()

    def caller(name, other):
        with lock.calling():
            story.tell(name)
            story.wait(other)

    run(lambda: caller("a", "b"), lambda: caller("b", "a"))


def test_two_callers_that_both_want_to_trace():
    """Each stands still while it waits, so that neither waits for ever."""
    lock, story = TraceLock(), Story()

    def caller(name, other):
        with lock.calling():
            story.tell(f"{name} calls")
            story.wait(f"{other} calls")
            with lock.tracing():
                story.tell(f"{name} traces")
                story.tell(f"{name} has traced")

    run(lambda: caller("a", "b"), lambda: caller("b", "a"))
    assert [name for name in story.told if "trace" in name] in (
        ["a traces", "a has traced", "b traces", "b has traced"],
        ["b traces", "b has traced", "a traces", "a has traced"],
    )


def test_one_thread_may_do_all_of_it_inside():
    lock = TraceLock()
    for outer in (lock.calling, lock.tracing):
        for inner in (lock.calling, lock.tracing):
            with outer(), inner(), outer():
                pass
    run(lambda: lock.tracing().__enter__())


def test_error_inside_lets_others_in():
    lock = TraceLock()
    for turn in (lock.calling, lock.tracing):
        with pytest.raises(KeyError), turn():
            raise KeyError
    with lock.tracing():
        pass


def test_call_without_gradients_waits_for_another_threads_trace():
    """Else it met the tensors of the trace."""
    story = Story()

    class Slow(nn.Linear):
        def forward(self, x):
            if torch.is_grad_enabled() and "two calls" not in story.told:
                story.tell("traced")
                story.wait("two calls")
            return super().forward(x)

    model, results = Slow(3, 3), []
    step = graph.rematerialize(model)

    def trace():
        step(torch.ones(2, 3)).sum().backward()

    def call():
        story.wait("traced")
        story.tell("two calls")
        with torch.no_grad():
            results.append(step(torch.ones(2, 3)))

    run(trace, call)
    with torch.no_grad():
        assert torch.equal(results[0], model(torch.ones(2, 3)))
    with TRACE_LOCK.tracing():
        pass


OTHERS = pytest.mark.parametrize("other", [compile_lock, lambda: state_lock], ids=["Dynamo", "regions"])


@OTHERS
def test_who_traces_holds_the_lock_of_others(other):
    """Else a forward that compiles waited for a compilation that waits for the trace."""
    lock = TraceLock()

    @contextmanager
    def tracing():
        with lock.tracing(), lock.tracing():
            yield

    assert_waits(tracing, other)


@OTHERS
def test_who_waits_to_trace_leaves_the_lock_of_others_to_calls(other):
    lock, story = TraceLock(), Story()

    def trace():
        story.wait("calls")
        with lock.tracing():
            story.tell("traces")

    def call():
        with lock.calling():
            story.tell("calls")
            with lock._changed:
                assert lock._changed.wait_for(lambda: lock._waiting, timeout=60)
            for _ in range(100):
                with other():
                    pass
            story.tell("has compiled")

    run(trace, call)
    assert story.told == ["calls", "has compiled", "traces"]


@OTHERS
def test_error_inside_gives_the_lock_of_others_back(other):
    def use():
        with other():
            pass

    with pytest.raises(KeyError), TraceLock().tracing():
        raise KeyError
    run(use)


MODULE = nn.Linear(3, 3)
TRACES = {
    "gradient": lambda: graph.gradient(lambda x: x.sin().sum(), torch.ones(3)),
    "gradients": lambda: graph.gradients(MODULE, torch.ones(2, 3), checkpoints=None),
    "simulate": lambda: graph.simulate(make_fx(torch.sin, tracing_mode="fake")(torch.ones(3))),
}


@pytest.mark.parametrize("trace", TRACES.values(), ids=TRACES)
def test_all_that_traces_or_measures_waits(trace):
    """Else the generator is left at the seed of a trace, and notes on nodes where another trace put them."""

    thread = threading.Thread(target=trace, daemon=True)
    with TRACE_LOCK.tracing():
        thread.start()
        with TRACE_LOCK._changed:
            assert TRACE_LOCK._changed.wait_for(lambda: thread.ident in TRACE_LOCK._waiting, timeout=60)
    thread.join(30)
    assert not thread.is_alive()


def test_threads_that_differentiate_leave_all_as_it_was():
    state, every = torch.get_rng_state(), sys.getswitchinterval()
    x, w = torch.ones(2, 3), torch.ones(3, 3)
    (expected,) = graph.gradients(lambda x: MODULE(x @ w).sin(), [x], checkpoints=None)

    def work():
        (found,) = graph.gradients(lambda x: MODULE(x @ w).sin(), [x], checkpoints=None)
        assert torch.equal(found, expected)

    sys.setswitchinterval(1e-5)
    try:
        in_threads(*[work] * 4)
    finally:
        sys.setswitchinterval(every)
    assert torch.equal(torch.get_rng_state(), state)
    assert (traceback.get_current_meta(), traceback.has_preserved_node_meta()) == ({}, False)


def test_call_that_compiles_while_a_backend_traces_in_another_thread(monkeypatch):
    story, backend = Story(), graph.backend(inner="eager")
    plan = backend._planner

    def planner():  # Dynamo has its lock here
        story.tell("compiling")
        story.wait("calls")
        return plan()

    class Compiling(nn.Linear):
        def forward(self, x):
            story.tell("calls")
            story.wait("compiling")
            return torch.compile(torch.sin, backend="eager")(super().forward(x))

    monkeypatch.setattr(backend, "_planner", planner)
    model, results = Compiling(3, 3), []
    step = graph.rematerialize(model)

    def compile_():
        torch.compile(nn.Linear(3, 3), backend=backend, dynamic=False)(torch.ones(2, 3)).sum().backward()

    def call():
        with torch.no_grad():
            results.append(step(torch.ones(2, 3)))

    run(compile_, call)
    assert torch.equal(results[0], nn.functional.linear(torch.ones(2, 3), model.weight, model.bias).sin())
    assert len(backend.plans) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")  # of the hooks of a trace in another thread
def test_traces_and_compilations_side_by_side():
    """A forward that ``torch.cond`` compiles, in calls and in traces, beside one that Dynamo gives to a backend."""

    class Conditional(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda x: self.linear(x).sin(), lambda x: self.linear(x).cos(), (x,))

    step = graph.rematerialize(Conditional())

    def call():
        with torch.no_grad():
            step(torch.ones(2, 3))

    def trace():
        step(torch.ones(2, 3)).sum().backward()

    def compile_():
        model = torch.compile(nn.Linear(3, 3), backend=graph.backend(inner="eager"), dynamic=False)
        model(torch.ones(2, 3)).sum().backward()

    run(call, trace, compile_)


@pytest.mark.parametrize("turn", ["calling", "tracing"])
def test_who_is_interrupted_before_it_begins_keeps_nobody_waiting(turn):
    lock, left = TraceLock(), 0

    def take():
        with compile_lock(), state_lock:
            pass

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code.co_filename != capture.__file__:
            return None
        here = linecache.getline(capture.__file__, frame.f_lineno).strip()
        if event == "line" and not here.startswith("with "):  # no signal comes there
            left -= 1
            if not left:
                raise KeyboardInterrupt
        return trace

    for line in itertools.count(1):
        left, before = line, sys.gettrace()
        sys.settrace(trace)
        try:
            with getattr(lock, turn)():
                sys.settrace(before)
                break  # it has begun
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        assert lock._is_free(0), line
        run(take)
    assert line > 3
