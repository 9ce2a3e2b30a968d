"""The command, as ``torchckpt`` or ``python -m torchckpt``: ``fit``, ``memory``, ``simulate``, ``plan``, ..."""
from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

try:
    from torchckpt.command import balance, env, fit, memory, plan, simulate
    from torchckpt.command.shared import Parser, check_apart, in_options, line, tell
    from torchckpt.errors import CheckpointError
    from torchckpt.notices import notice
    from torchckpt.planning.plan.pipeline import plan_of
    from torchckpt.version import __version__
except KeyboardInterrupt:  # there is nothing to tell yet
    sys.exit(130)

__all__ = ["main"]

_COMMANDS = {"fit": fit, "memory": memory, "simulate": simulate, "plan": plan, "balance": balance, "env": env}
_SILENCE_SECONDS = 5.0
_DESCRIPTION = "Train within a byte budget; recomputation in a pipeline, on paper or planned; a model cut into stages."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code: 0, 2 where the input is bad, or 130 where it was interrupted."""
    parser = _parser("torchckpt" if Path(sys.argv[0]).stem == "torchckpt" else "python -m torchckpt")
    of_command, of_script = memory.split(sys.argv[1:] if arguments is None else list(arguments))
    options, others = parser.parse_known_args(of_command, argparse.Namespace(of_script=of_script))
    if others:
        given = " ".join(others)
        works = f"; works: memory {options.script} -- {given}" if options.command == "memory" else ""
        parser.error(f"unrecognized arguments: {given}{works}")
    if options.command is None:
        parser.error(f"say what to do: {parser.prog} {', or '.join(f'{name} --help' for name in _COMMANDS)}")
    name = f"{parser.prog} {options.command}"
    long = threading.Timer(_SILENCE_SECONDS, notice, [f"{name}: still at work; Ctrl-C ends it"])
    long.daemon = True
    if options.command in ("plan", "simulate") and not getattr(options, "search", None):  # a search says how far it is
        with suppress(RuntimeError):  # no threads, as in a browser
            long.start()
    try:
        check_apart(options)
        _COMMANDS[options.command].run(options)
    except CheckpointError as error:
        text = in_options(line(error), of_model=getattr(options, "target", None) is not None)
        tell(f"{name}: error: {text}")
        return 2
    except KeyboardInterrupt as stop:
        if options.command == "memory":  # the script's, as of python
            raise
        tell(f"{name}: interrupted" + "; this is the best plan so far" * (plan_of(stop) is not None))
        return 130
    finally:
        long.cancel()
    return 0


def _parser(name: str) -> Parser:
    parser = Parser(prog=name, description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"torchckpt {__version__}")
    commands = parser.add_subparsers(dest="command", title="commands", parser_class=Parser)
    for command in _COMMANDS.values():
        command.add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
