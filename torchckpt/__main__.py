"""The command: ``python -m torchckpt fit``, ``balance``; ``simulate`` and ``plan``, which need no torch."""
from __future__ import annotations

import sys
from collections.abc import Sequence

from torchckpt.command import balance, fit, plan, simulate
from torchckpt.command.shared import Parser, Unusable, line
from torchckpt.errors import CheckpointError
from torchckpt.version import __version__

__all__ = ["main"]

_COMMANDS = {"fit": fit, "simulate": simulate, "plan": plan, "balance": balance}
_DESCRIPTION = "Train within a byte budget; recomputation in a pipeline, on paper or planned; a model cut into stages."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code: 0, or 2 where the input is bad."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.error("say what to do: python -m torchckpt fit --help, simulate --help, plan --help, or balance --help")
    try:
        _COMMANDS[options.command].run(options)
    except (Unusable, CheckpointError) as error:
        print(f"{parser.prog} {options.command}: error: {line(error)}", file=sys.stderr)
        return 2
    return 0


def _parser() -> Parser:
    parser = Parser(prog="python -m torchckpt", description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"torchckpt {__version__}")
    commands = parser.add_subparsers(dest="command", title="commands", parser_class=Parser)
    for command in _COMMANDS.values():
        command.add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
