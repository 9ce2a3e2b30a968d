"""Scripts: examples and benchmarks, each run in a process of its own."""
from __future__ import annotations

import atexit
import functools
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.fresh import Fresh

__all__ = ["HOME", "ROOT", "home_without", "method_to_start", "printed_by", "run", "run_here", "run_script"]

ROOT = Path(__file__).parents[1]
HOME = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
"""An environment in which Python finds the package of this tree, installed or not."""


def home_without(packages: Sequence[str], folder: Path) -> dict[str, str]:
    """``HOME`` in which ``packages`` seem not to be installed; ``folder`` is for what has it so."""
    hidden = folder / "hidden"
    hidden.mkdir(exist_ok=True)
    for name in packages:
        (hidden / f"{name}.py").write_text(f"raise ModuleNotFoundError('no {name} here', name={name!r})\n")
    return {**HOME, "PYTHONPATH": os.pathsep.join([str(hidden), HOME["PYTHONPATH"]])}


PRELOADED = ["pytest", "tests.distributed.stages", "torch.distributed.fsdp"]


def run(
    *arguments: str,
    timeout: int = 300,
    cwd: Path | None = None,
    without: Sequence[str] = (),
    compiler: bool = False,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Python with ``arguments``, in ``HOME``: a fresh process, but for torch, which is imported already.

    Args:
        cwd: where. Default: the current folder.
        without: packages that seem not to be installed.
        compiler: whether torch's compiler is imported already, too: for what imports it anyway.
        environment: what its environment has besides.
    """
    return _fresh(tuple(without), compiler).run(arguments, cwd or Path.cwd(), environment, timeout)


@functools.cache
def _fresh(without: tuple[str, ...], compiler: bool) -> Fresh:
    folder = tempfile.TemporaryDirectory()
    processes = Fresh(home_without(without, Path(folder.name)), compiler)
    atexit.register(lambda: (processes.end(), folder.cleanup()))
    return processes


def printed_by(benchmark: str, *arguments: str, timeout: float = 300) -> Any:
    """The JSON that a benchmark prints."""
    done = run_script(f"benchmarks/{benchmark}", *arguments, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def run_script(path: str, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """The script at ``path`` of this tree: from a folder elsewhere and without ``PYTHONPATH``, as users may run it."""
    command = [str(ROOT / path), *arguments]
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context(method_to_start())
        process = context.Process(target=_script, args=(command, bare, folder))  # type: ignore[attr-defined]
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(command, timeout)
        said = [(Path(folder) / name).read_text() for name in ("out", "err")]
    return subprocess.CompletedProcess(command, process.exitcode, *said)


def run_here(path: str, *arguments: str) -> None:
    """Run the script at ``path`` in this process, as ``python path arguments`` does."""
    sys.argv[:] = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


def method_to_start() -> str:
    """On Linux, processes are forks of one that has only imported torch. That import takes each of them seconds."""
    if sys.platform != "linux":
        return "spawn"
    multiprocessing.set_forkserver_preload(PRELOADED)
    return "forkserver"


def _script(command: Sequence[str], environment: Mapping[str, str], folder: str) -> None:
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = [path for path in sys.path if path not in ("", str(ROOT))]
    run_here(*command)
