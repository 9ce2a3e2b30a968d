"""Memory: a script that is run unchanged, and the lines that make autograd keep memory for its backward passes."""
from __future__ import annotations

import argparse
import functools
import inspect
import os
import runpy
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchckpt.command.shared import Parser, Unusable, add_command, count, file_to_write, say, write

if TYPE_CHECKING:
    from torchckpt.testing.lines import SavedByLine

__all__ = ["add", "run", "run_script", "split"]

_EXAMPLES = """\
The script runs as "python train.py" runs it, and is ended when so many backward passes are done. Of each pass, what
autograd keeps is told at the moment when it is most, since the pass before; graphs that earlier passes have retained do
not count. A script that fails, as for want of memory, or exits before its first pass, is told of up to there. Not seen
is what the script does in other threads and processes, what compiled code and graph.rematerialize keep, and what
regions (checkpoint) keep while they are recomputed.

examples:
  python -m torchckpt memory train.py
  python -m torchckpt memory train.py --steps 4 --svg memory.svg -- --batch-size 8
"""


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    short = "run a script, and show which lines keep memory"
    description = "Run a script, and show which lines make autograd keep memory for its backward passes."
    memory = add_command(commands, "memory", short, description, _EXAMPLES)
    memory.add_argument("script", metavar="SCRIPT", help="its own arguments stand behind --")
    memory.add_argument("--steps", type=count, default=2, metavar="N", help="backward passes (default: %(default)s)")
    memory.add_argument("--svg", type=file_to_write(".svg"), metavar="FILE", help="draw the pass that keeps the most")


def split(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """The arguments of the command, and those that it passes on to a script: what stands behind ``--``."""
    passes_on = arguments[:1] == ["memory"] and "--" in arguments
    end = arguments.index("--") if passes_on else len(arguments)
    return arguments[:end], arguments[end + 1 :]


def run(options: argparse.Namespace) -> None:
    if not os.path.isfile(options.script):
        raise Unusable(f"there is no such script; received: {options.script}; works: train.py")
    passes: list[SavedByLine] = []
    picture = None if options.svg is None else options.svg.absolute()  # the script may change the folder
    try:
        run_script([options.script, *options.of_script], options.steps, passes)
    finally:
        for number, kept in enumerate(passes, 1):
            say(f"\npass {number}: {kept}")
        if not passes:
            say("\nThere was no backward pass in the main thread of this process.")
        elif picture is not None:
            write(picture, max(passes, key=lambda kept: kept.total).draw())


class _Enough(BaseException):
    """Ends the script. No ``Exception``, which a script may catch."""


def run_script(arguments: Sequence[str], most: int, passes: list[SavedByLine]) -> None:
    """Run ``python arguments`` in this process until it ends, or until there are so many backward ``passes``.

    A pass begins where the one before ended. Calls inside of a pass, calls of other threads, those that make a graph of
    gradients (``create_graph``), and those of a trace are none. Of a script that fails, or exits before its first pass,
    the last one is what was kept until then.
    """
    from unittest.mock import patch  # late, as torch is: other commands do not need them

    import torch

    from torchckpt.regions.private import is_fake
    from torchckpt.testing.lines import KeptStorages, lines_of

    kept, thread, running = KeptStorages(), threading.get_ident(), threading.Lock()

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            makes_graph = signature.bind_partial(*args, **kwargs).arguments.get("create_graph")
            if makes_graph or threading.get_ident() != thread or running.locked() or is_fake():
                return function(*args, **kwargs)
            with running:
                results = function(*args, **kwargs)
            passes.append(lines_of(kept))
            kept.restart()
            if len(passes) == most:
                raise _Enough
            return results

        return run

    functions: dict[str, Any] = {name: watched(getattr(torch.autograd, name)) for name in ("backward", "grad")}
    folders = [str(Path(arguments[0]).resolve().parent), *sys.path[1:]]
    with patch.multiple(torch.autograd, **functions), patch("sys.argv", [*arguments]), patch("sys.path", folders):
        try:
            with kept.entered(), suppress(_Enough):
                runpy.run_path(arguments[0], run_name="__main__")
        except (Exception, SystemExit) as error:
            rest = [lines_of(kept)] if isinstance(error, Exception) or not passes else []
            passes += [lines for lines in rest if lines.rows]
            raise
