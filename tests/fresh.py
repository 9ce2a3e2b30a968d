"""Fresh processes: as ``python ...`` starts them, but forks of one that has imported torch, which takes seconds.

SymPy is imported too: most of torch's compiler is imported after it, and no page and no module of ours names it. The
compiler itself is where it is asked for.
"""
from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


class Fresh:
    """Starts processes, one after the other.

    Args:
        environment: what they have.
        compiler: whether torch's compiler is imported already.
    """

    def __init__(self, environment: Mapping[str, str], compiler: bool = False) -> None:
        command, pipe = [sys.executable, __file__, *["torch._dynamo"] * compiler], subprocess.PIPE
        self._server = subprocess.Popen(command, env=environment, text=True, stdin=pipe, stdout=pipe)

    def run(
        self, arguments: Sequence[str], cwd: Path, more: Mapping[str, str], timeout: int
    ) -> subprocess.CompletedProcess[str]:
        """What ``python`` with ``arguments`` does, in a process that ends by a signal after ``timeout`` seconds.

        Args:
            arguments: ``-c``, ``-m`` or a file, and what follows.
            more: what its environment has besides.
        """
        asked, answers = self._server.stdin, self._server.stdout
        assert asked is not None
        assert answers is not None
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps([arguments, str(cwd), folder, more, timeout]), file=asked, flush=True)
            code = int(answers.readline())
            said = [(Path(folder) / name).read_text() for name in ("out", "err")]
        return subprocess.CompletedProcess(list(arguments), code, *said)

    def end(self) -> None:
        self._server.communicate()


def _serve() -> tuple[Any, ...]:
    """Answer each call with the exit code of a process, in which this returns the call."""
    import sympy  # noqa: F401
    import torch  # noqa: F401

    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.freeze()  # or a collection in a fork would copy what is shared
    for line in sys.stdin:
        process = os.fork()
        if not process:
            return tuple(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
    sys.exit()


def _become(arguments: list[str], cwd: str, folder: str, more: Mapping[str, str], timeout: int) -> None:
    signal.alarm(timeout)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), stream)
    os.chdir(cwd)
    os.environ.update(more)
    kind, *rest = arguments
    if kind == "-c":
        sys.path[0], sys.argv[:] = "", [kind, *rest[1:]]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    elif kind == "-m":
        sys.path[0], sys.argv[:] = cwd, rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0], sys.argv[:] = str(Path(kind).absolute().parent), arguments
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    _become(*_serve())
