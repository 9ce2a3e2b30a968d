"""Mutations: which waits, events, streams and edges of the library does a test need?

``python -m tests.device.mutations`` takes each out of a copy of the package, in turn, and runs tests on the simulated
device until one fails. It prints how many were noticed, and every one that was not. What is taken out is found by
reading ``torchckpt/regions`` and ``torchckpt/pipe`` with ``ast``.
"""
from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import pytest

__all__ = ["Mutation", "mutated", "mutations", "mutations_of"]

ROOT = Path(__file__).parents[2]
FOLDERS = ("torchckpt/regions", "torchckpt/pipe")
SIMULATED, ACCELERATOR = ("-m", "not slow"), ("-m", "accelerator and not slow")
TESTS = (
    (*SIMULATED, "tests/device/library/test_waits.py", "tests/device/library/test_moved.py"),
    (*SIMULATED, "tests/device/library/test_pipe.py"),
    (
        *ACCELERATOR, "tests/regions/test_streams.py", "tests/regions/core/test_recompute.py",
        "tests/pipe/run/test_accelerators.py",
    ),
    (*SIMULATED, "tests/pipe/run/test_worker.py", "tests/pipe/run/test_interrupted_workers.py"),
    (*ACCELERATOR, "tests/regions", "tests/pipe", "tests/test_transparency.py"),
)
"""In this order, until one fails: on the simulated device, but for those of threads."""
TIMEOUT_SECONDS = 300

NO_CONTEXT = '__import__("contextlib").nullcontext()'


class Mutation(NamedTuple):
    """Something that is taken out of a file."""

    path: str
    line: int
    kind: str
    what: str
    start: int  # in bytes
    end: int
    without: str  # what stands there then

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.kind}: {self.what}"


# what is taken out ----------------------------------------------------------------------------------------------------

_Without = Callable[[ast.Call], "str | None"]


def _argument(place: int) -> _Without:
    return lambda call: ast.unparse(call.args[place]) if len(call.args) > place else None


def _always(text: str) -> _Without:
    return lambda call: text


def _wait(call: ast.Call) -> str | None:
    if len(call.args) != 3:
        return "None"
    *streams, tensors = map(ast.unparse, call.args)
    return None if streams == ["None", "None"] else f"wait(None, None, {tensors})"


def _event(call: ast.Call) -> str:
    assert isinstance(call.func, ast.Attribute)
    return f"torch.Event({ast.unparse(call.func.value)}.device)"  # one that was never recorded


CALLS: dict[str, tuple[str, _Without]] = {
    "wait": ("wait", _wait),
    "wait_for": ("wait", _always("None")),
    "hold": ("wait", _always("None")),
    "wait_event": ("wait", _always("None")),
    "wait_stream": ("wait", _always("None")),
    "wait_before_using": ("wait", _always("None")),
    "synchronize": ("wait", _always("None")),
    "SyncPoint": ("event", _always("None")),
    "record_event": ("event", _event),
    "mark": ("event", _always("None")),
    "record": ("event", lambda call: "None" if isinstance(call.func, ast.Attribute) else None),
    "record_stream": ("record_stream", _always("None")),
    "_record": ("record_stream", _always("None")),
    "device_index": ("device context", _always(NO_CONTEXT)),
    "Stream": ("stream", lambda call: f"torch.accelerator.current_stream({ast.unparse(call.args[0])})"),
    "fork": ("edge", lambda call: f"({ast.unparse(call.args[0])}, None)"),
    "join": ("edge", lambda call: ast.unparse(call.args[0]) if isinstance(call.func, ast.Name) else None),
    "before": ("edge", _argument(0)),
    "behind_checkpoints": ("edge", lambda call: "({}, {})".format(*map(ast.unparse, call.args[1:]))),
    "due": ("edge", _always("[]")),
    "rest": ("edge", _always("[]")),
    "passed": ("edge", _argument(1)),
}
"""By the name that is called: what it is, and what stands there without it."""

CONTEXTS = {"on": "stream context", "_on": "stream context", "_device": "device context"}
EDGES = ("fork", "join", "recompute", "checkpoint")
"""Those whose starred arguments are edges of the graph."""


def mutations() -> list[Mutation]:
    """All, in the order of the files and their lines."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return [one for path in paths for one in mutations_of(str(path.relative_to(ROOT)), path.read_bytes())]


def mutations_of(path: str, source: bytes) -> list[Mutation]:
    """Those of one file."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node, kind, without in _sites(ast.parse(source)):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        what = " ".join(source[start:end].decode().split())
        found.append(Mutation(path, node.lineno, kind, what, start, end, without))
    return sorted(found, key=lambda one: (one.start, -one.end))


def _sites(tree: ast.Module) -> Iterator[tuple[ast.expr, str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield from ((name, "stream context", NO_CONTEXT) for name in _streams_entered(node))
        elif isinstance(node, ast.With):
            for item in node.items:
                if kind := CONTEXTS.get(_called(item.context_expr)):
                    yield item.context_expr, kind, NO_CONTEXT
        elif isinstance(node, ast.Call):
            kind, without = CALLS.get(_called(node), ("", _always("")))
            text = without(node)
            if kind and text is not None:
                yield node, kind, text
            if isinstance(node.func, ast.Name) and node.func.id in EDGES and isinstance(node.args[-1], ast.Starred):
                kept = ast.Call(node.func, node.args[:-1], node.keywords)
                yield node, "edge", ast.unparse(kept)


def _streams_entered(function: ast.FunctionDef) -> Iterator[ast.Name]:
    """``with stream``, where an argument of the function is said to be one."""
    known = {one.arg for one in function.args.args if one.annotation and "Stream" in ast.unparse(one.annotation)}
    for node in ast.walk(function):
        for item in node.items if isinstance(node, ast.With) else ():
            if isinstance(item.context_expr, ast.Name) and item.context_expr.id in known:
                yield item.context_expr


def _called(node: ast.expr) -> str:
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "id", "") or getattr(function, "attr", "")


def mutated(source: bytes, mutation: Mutation) -> bytes:
    """``source`` without it."""
    return source[: mutation.start] + mutation.without.encode() + source[mutation.end :]


# who notices ----------------------------------------------------------------------------------------------------------


class Copy:
    """A copy of the package and its tests, in which one thing at a time is missing."""

    def __init__(self, folder: Path, tests: Sequence[tuple[str, ...]]) -> None:
        self._folder, self._tests = folder, tests
        hidden = shutil.ignore_patterns("__pycache__")
        for name in ("torchckpt", "tests"):
            shutil.copytree(ROOT / name, folder / name, ignore=hidden)
        shutil.copy(ROOT / "setup.cfg", folder)

    def killer(self, mutation: Mutation, last: str | None) -> str | None:
        """The test that fails without it, first ``last``, which did the last time; None: there is none."""
        path = self._folder / mutation.path
        source = path.read_bytes()
        path.write_bytes(mutated(source, mutation))
        try:
            if last and (failed := self._failing((last,), may_be_gone=True)):
                return failed
            return next(filter(None, map(self._failing, self._tests)), None)
        finally:
            path.write_bytes(source)

    def _failing(self, tests: tuple[str, ...], may_be_gone: bool = False) -> str | None:
        options = ["-x", "--tb=no", "-p", "no:cacheprovider"]
        command = [sys.executable, "-B", "-m", "pytest", *options, *tests]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
        try:
            done = subprocess.run(
                command, cwd=self._folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
            )
        except subprocess.TimeoutExpired:
            return f"a timeout in {' '.join(tests)}"
        if done.returncode in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):
            if not may_be_gone:
                raise FileNotFoundError(f"pytest finds no tests in {' '.join(tests)}: {done.stderr}")
            return None
        if done.returncode == 0:
            return None
        named = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
        return named[1] if named else f"exit status {done.returncode} of {' '.join(tests)}"


def run(
    chosen: list[Mutation], jobs: int, known: dict[str, str], tests: Sequence[tuple[str, ...]] = TESTS
) -> dict[Mutation, str | None]:
    """Who notices each of ``chosen``."""
    with tempfile.TemporaryDirectory() as folder:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for job in range(jobs):
            copies.put(Copy(Path(folder) / str(job), tests))

        def killer(mutation: Mutation) -> str | None:
            copy = copies.get()
            try:
                found = copy.killer(mutation, known.get(_key(mutation)))
            finally:
                copies.put(copy)
            print(f"{'killed' if found else 'ALIVE '} {mutation}  [{found}]", flush=True)
            return found

        with ThreadPoolExecutor(jobs) as pool:
            return dict(zip(chosen, pool.map(killer, chosen)))


def _key(mutation: Mutation) -> str:
    return f"{mutation.path} {mutation.line} {mutation.what}"


def _memory() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchckpt"
    return Path(os.environ.get("TORCHCKPT_CACHE") or cache) / "mutations.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=2, help="how many run at once")
    parser.add_argument("--list", action="store_true", help="print what would be taken out, and run nothing")
    parser.add_argument("--only", default="", help="those whose line holds this, as pipeline.py or record_stream")
    parser.add_argument("--first", action="store_true", help="only with the first group of tests")
    chosen = parser.parse_args()
    every = [one for one in mutations() if chosen.only in str(one)]
    if chosen.list:
        print("\n".join(f"{one}  ->  {one.without}" for one in every))
        return 0
    known = json.loads(_memory().read_text()) if _memory().exists() else {}
    found = run(every, chosen.jobs, known, TESTS[: 1 if chosen.first else None])
    known.update({_key(one): killer for one, killer in found.items() if killer and "::" in killer})
    _memory().parent.mkdir(parents=True, exist_ok=True)
    _memory().write_text(json.dumps(known, indent=1))
    alive = [one for one, killer in found.items() if killer is None]
    print(f"killed {len(found) - len(alive)} / {len(found)}")
    for one in alive:
        print(f"survived: {one}")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
