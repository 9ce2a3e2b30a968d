"""What is taken out of the library, to see who notices: that it is found, and that it is gone then."""
from __future__ import annotations

import ast
import subprocess

import pytest

from tests.device import mutations
from tests.device.mutations import ROOT, Copy, mutated, mutations_of

SOURCE = b'''
def ahead(stream: torch.Stream, event, tensors):
    """\xc3\xa9"""
    with on(stream), stream, open("x"):
        stream.wait_event(event); tensors[0].record_stream(stream)
        mark = stream.record_event()
        wait(None, None, tensors)
        tensors = wait(stream, other, (tensors[0],))
    tensors = before(tensors, lane.due()) if join(tensors[0], *edges) else ", ".join(names)
    return fork(tensors[0], *edges)
'''
NO_CONTEXT = '__import__("contextlib").nullcontext()'


def test_what_is_found_in_a_file_and_what_stands_there_without_it():
    found = [(one.line, one.kind, one.what, one.without) for one in mutations_of("ahead.py", SOURCE)]
    assert found == [
        (4, "stream context", "on(stream)", NO_CONTEXT),
        (4, "stream context", "stream", NO_CONTEXT),
        (5, "wait", "stream.wait_event(event)", "None"),
        (5, "record_stream", "tensors[0].record_stream(stream)", "None"),
        (6, "event", "stream.record_event()", "torch.Event(stream.device)"),
        (8, "wait", "wait(stream, other, (tensors[0],))", "wait(None, None, (tensors[0],))"),
        (9, "edge", "before(tensors, lane.due())", "tensors"),
        (9, "edge", "lane.due()", "[]"),
        (9, "edge", "join(tensors[0], *edges)", "tensors[0]"),
        (9, "edge", "join(tensors[0], *edges)", "join(tensors[0])"),
        (10, "edge", "fork(tensors[0], *edges)", "(tensors[0], None)"),
        (10, "edge", "fork(tensors[0], *edges)", "fork(tensors[0])"),
    ]


def test_the_rest_of_the_file_stays():
    first = mutations_of("ahead.py", SOURCE)[2]
    assert mutated(SOURCE, first) == SOURCE.replace(b"stream.wait_event(event)", b"None")


def test_those_of_the_library():
    every = mutations.mutations()
    assert {one.kind for one in every} == {
        "wait", "event", "record_stream", "stream", "stream context", "device context", "edge",
    }
    streams = {one.what for one in every if one.path == "torchckpt/regions/devices.py"}
    assert "current.wait_event(event)" in streams
    assert "fork(output, *phonies)" in {one.what for one in every if one.path == "torchckpt/pipe/run/pipeline.py"}
    for one in every:
        ast.parse(mutated((ROOT / one.path).read_bytes(), one))


@pytest.mark.parametrize("last", [None, "test_once"])
def test_the_tests_see_a_copy_that_lacks_it(tmp_path, monkeypatch, last):
    seen = []
    first = mutations.mutations()[0]
    place = tmp_path / first.path
    before = (ROOT / first.path).read_bytes()
    copy = Copy(tmp_path, [("test_some",), ("test_more",), ("test_never",)])

    def failing(tests, may_be_gone=False):
        seen.append((tests[0], place.read_bytes() == mutated(before, first)))
        return "test_more::this" if tests == ("test_more",) else None

    monkeypatch.setattr(copy, "_failing", failing)
    assert copy.killer(first, last) == "test_more::this"
    assert seen == [(name, True) for name in [last, "test_some", "test_more"] if name]
    assert place.read_bytes() == before == (ROOT / first.path).read_bytes()


@pytest.mark.parametrize("code", [4, 5])
def test_tests_that_are_not_there_notice_nothing(tmp_path, monkeypatch, code):
    """4: no such file, 5: no such test."""
    copy = Copy(tmp_path, [("tests/test_some.py",)])
    done = subprocess.CompletedProcess([], code, "", "file or directory not found")
    monkeypatch.setattr(mutations.subprocess, "run", lambda *args, **kwargs: done)
    with pytest.raises(FileNotFoundError, match=r"pytest finds no tests in tests/test_some\.py: file or directory not"):
        copy.killer(mutations.mutations()[0], "tests/test_more.py::test_that_was_renamed")
