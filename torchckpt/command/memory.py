"""Memory: a script that is run unchanged, and the lines that make autograd keep memory for its backward passes."""
from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchckpt.command.shared import Parser, Unusable, add_command, count, file_to_write, say, write

if TYPE_CHECKING:
    from torchckpt.testing.lines import SavedByLine
    from torchckpt.testing.script import BackwardPasses

__all__ = ["add", "run", "split"]

_EXAMPLES = """\
The script runs as "python train.py" runs it, and is ended when so many backward passes are done. Of each pass, what
autograd keeps is told at the moment when it is most: since the pass before, or the beginning. A script that fails, as
for want of memory, is told of up to there. What it starts in other processes and threads is not seen.

examples:
  python -m torchckpt memory train.py
  python -m torchckpt memory train.py --steps 4 --svg memory.svg -- --batch-size 8
"""
_WORKS = "a script that calls loss.backward() in its main thread, without torchrun or spawn"


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    short = "run a script, and show which lines keep memory"
    description = "Run a script, and show which lines make autograd keep memory for its backward passes."
    memory = add_command(commands, "memory", short, description, _EXAMPLES)
    memory.add_argument("script", type=_script, metavar="SCRIPT", help="its own arguments stand behind --")
    memory.add_argument("--steps", type=count, default=2, metavar="N", help="backward passes (default: %(default)s)")
    memory.add_argument("--svg", type=file_to_write(".svg"), metavar="FILE", help="draw the pass that keeps the most")


def split(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """The arguments of the command, and those that it passes on to a script: what stands behind ``--``."""
    passes_on = arguments[:1] == ["memory"] and "--" in arguments
    end = arguments.index("--") if passes_on else len(arguments)
    return arguments[:end], arguments[end + 1 :]


def run(options: argparse.Namespace) -> None:
    from torchckpt.testing.script import BackwardPasses, run_script

    passes = BackwardPasses(options.steps)
    raised = run_script(options.script, options.of_script, passes)
    failed = raised is not None and not (isinstance(raised, SystemExit) and raised.code in (None, 0))
    kept = {f"pass {number}": lines for number, lines in enumerate(passes.passes, 1)}
    if failed and passes.rest().rows:
        kept["until it failed"] = passes.rest()
    if kept:
        say("\n".join(_told(options.script, kept, passes)))
        if options.svg is not None:
            write(options.svg, max(kept.values(), key=lambda lines: lines.total).draw())
    elif not failed:
        received = f"{options.script}, which ran to its end" + "".join(f"; {note}" for note in _unseen(passes))
        raise Unusable(f"the script has no backward pass; received: {received}; works: {_WORKS}")
    if raised is not None:
        _end_as(raised)


def _told(script: str, kept: dict[str, SavedByLine], passes: BackwardPasses) -> Iterator[str]:
    total = len(passes.passes)
    yield f"\n{script}: {total} backward pass{'es' * (total != 1)}"
    yield from (f"{name}: {lines.summary}" for name, lines in kept.items())
    name = max(kept, key=lambda name: kept[name].total)
    if kept[name].rows:
        yield f"\n{name}\n{kept[name].table()}\n"
    yield from (f"not seen: {note}" for note in _unseen(passes))


def _unseen(passes: BackwardPasses) -> Iterator[str]:
    operations = {row.operation for lines in passes.passes for row in lines.rows}
    if "CompiledFunction" in operations:
        yield "which lines of compiled code (CompiledFunction) save what"
    if "checkpoint" in operations:
        yield "what regions (checkpoint) keep while they are recomputed"
    if not all(lines.rows for lines in passes.passes):
        yield "forwards in other threads, if a pass that keeps nothing has one"
    if passes.elsewhere:
        yield f"backward passes of other threads, of which there were {passes.elsewhere}"


def _end_as(raised: BaseException) -> None:
    """End as the script did."""
    if isinstance(raised, SystemExit):
        raise raised
    traceback.print_exception(raised)
    sys.exit(1)


def _script(text: str) -> str:
    if not Path(text).is_file():
        reason = "it is a folder" if os.path.isdir(text) else "there is no such file"
        raise argparse.ArgumentTypeError(f"cannot run {text}: {reason}; works: train.py")
    return text
