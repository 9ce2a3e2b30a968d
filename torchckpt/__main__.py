"""The command: ``python -m torchckpt simulate``, which needs no torch, and ``python -m torchckpt balance``."""
from __future__ import annotations

import argparse
import importlib
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torchckpt.errors import ArgumentError
from torchckpt.model.costs import Link, StageCosts
from torchckpt.model.gantt import gantt
from torchckpt.model.named import NAMES, named_schedule
from torchckpt.model.report import Report, report
from torchckpt.model.schedule import Schedule
from torchckpt.model.svg import svg
from torchckpt.model.table import from_csv
from torchckpt.model.trace import trace
from torchckpt.model.units import number
from torchckpt.version import __version__

if TYPE_CHECKING:
    from torchckpt.pipe import Balance

__all__ = ["main"]

_LARGEST = 1e12
_MOST = 4_000_000

_DESCRIPTION = "What recomputation costs, on paper; and where to cut a model into stages."
_EXAMPLES = """\
times are in any one unit, memory counts in A: all that one micro-batch saves on one stage

columns:
  overhead   of the step over the one in which nothing is recomputed
  bound      the least overhead that any placement of these recomputes can have
  hidden     the share of what recompute at arrival adds that this row does not
  peak       of the rank that needs most

ways to recompute, for --compare:
  none                      keep everything
  arrival                   when the gradient arrives, as torch.utils.checkpoint does
  ahead, ahead:2            before it arrives, at most 1 (2) micro-batches ahead
  ahead/last_stage          but keep what the last stage saves; so /last_micro_batch, and /first_backward:
                            of each stage the micro-batch that goes back first

examples:
  python -m torchckpt simulate --schedule 1f1b --stages 8 --microbatches 32 --link 0.25
  python -m torchckpt simulate --schedule 1f1b --stages 2 --microbatches 2 \\
      --compare none,arrival,ahead/last_stage --gantt
  python -m torchckpt simulate --schedule zbv --stages 8 --microbatches 8 --svg step.svg --trace step.json
  python -m torchckpt simulate --csv schedule.csv --json
"""

_BALANCE_EXAMPLES = """\
the module is an nn.Sequential, or a function without arguments that returns one. It gets inputs of random numbers, or
of zeros where they are integers, on the device of its parameters

by what a stage is weighed, for --by:
  time      forward twice, as a Pipe that recomputes runs it, and backward
  bytes     parameters with gradients and Adam's state, and what one micro-batch keeps

examples:
  python -m torchckpt balance my_package.model:gpt --stages 4 --input 8,128 --dtype int64
  python -m torchckpt balance my_package.model:layers --stages 2 --input 8,64 --by bytes --json
"""
_DTYPES = ("float32", "float64", "bfloat16", "float16", "int64", "int32")


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


class _Unusable(Exception):
    """The one line that says why."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code: 0, or 2 where the input is bad."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.error("say what to do: python -m torchckpt simulate --help, or balance --help")
    try:
        {"simulate": _simulate, "balance": _balance}[options.command](options)
    except (_Unusable, ArgumentError) as error:
        print(f"{parser.prog} {options.command}: error: {_line(error)}", file=sys.stderr)
        return 2
    return 0


def _simulate(options: argparse.Namespace) -> None:
    schedule = _schedule(options)
    half = options.backward / 2
    costs = StageCosts(options.forward, half, half, options.recompute, 1.0, options.boundary)
    found = report(schedule, costs, Link(options.link), options.compare)
    _write_pictures(found, options)
    if options.json:
        print(json.dumps({**found.as_json(), "costs": _costs(options)}, indent=2))
        return
    costed = ", ".join(f"{name} {number(value)}" for name, value in _costs(options).items())
    counted = f"{found.schedule.stages} stages, {found.schedule.micro_batches} micro-batches"
    print(f"{found.schedule.name}: {counted}; {costed}\n\n{found.table()}")
    for row in found.rows if options.gantt else ():
        print(f"\n{row.name}\n{gantt(row.timeline)}")


def _costs(options: argparse.Namespace) -> dict[str, float]:
    names = ("forward", "backward", "recompute", "link", "boundary")
    return {name: getattr(options, name) for name in names}


def _schedule(options: argparse.Namespace) -> Schedule:
    counts = {"--stages": options.stages, "--microbatches": options.microbatches}
    if options.csv is not None:
        given = [name for name, value in {**counts, "--chunks": options.chunks}.items() if value is not None]
        if given:
            raise _Unusable(f"{given[0]} goes with --schedule; with --csv the file says it")
        return from_csv(_text_of(options.csv), options.csv.stem)
    missing = [name for name, value in counts.items() if value is None]
    if missing:
        raise _Unusable(f"--schedule needs {' and '.join(missing)}")
    if options.stages * options.microbatches > _MOST:
        raise _Unusable(f"--stages times --microbatches is at most {_MOST}")
    each = named_schedule(options.schedule, 1, 2, options.chunks).stages  # on one rank
    if options.stages % each:
        works = max(each, round(options.stages / each) * each)
        raise _Unusable(
            f"{options.schedule} has {each} stages on each rank; received: --stages {options.stages}; "
            f"works: --stages {works}"
        )
    return named_schedule(options.schedule, options.stages // each, options.microbatches, options.chunks)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise _Unusable(f"cannot read {path}: it is not text") from None
    except OSError as error:
        raise _Unusable(f"cannot read {path}: {error.strerror}") from None


def _write_pictures(found: Report, options: argparse.Namespace) -> None:
    timelines = [row.timeline for row in found.rows]
    names = [f"{found.schedule.name}: {row.name}" for row in found.rows]
    if options.svg is not None:
        _write(options.svg, svg(*timelines, names=names, budget_bytes=options.budget))
    if options.trace is not None:
        _write(options.trace, trace(*timelines, names=[row.name for row in found.rows]))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _Unusable(f"cannot write {path}: {error.strerror}") from None


def _balance(options: argparse.Namespace) -> None:
    found = _balanced(_module_at(options.module), options)
    if options.json:
        layers = [{"name": name, found.unit: cost} for name, cost in zip(found.names, found.costs)]
        print(json.dumps({"balance": found, "layers": layers, "stages": found.stage_costs}, indent=2))
        return
    print(f"{options.module}: {len(found)} stages, {len(found.costs)} layers\n\n{found.table()}\n\nbalance={found}")


def _module_at(place: str) -> Any:
    """What ``module:attribute`` names, or what it returns if it is a function or a class."""
    name, colon, attribute = place.partition(":")
    if not (name and colon and attribute):
        raise _Unusable(f"the module is module:attribute; received: {place}; works: my_package.model:gpt")
    try:
        found: Any = importlib.import_module(name)
        for part in attribute.split("."):
            found = getattr(found, part)
        return found if _is_module(found) else found()
    except Exception as error:  # of the user's code
        raise _Unusable(f"cannot make {place}: {type(error).__name__}: {error}") from error


def _is_module(found: Any) -> bool:
    from torch import nn

    return isinstance(found, nn.Module)


def _balanced(module: Any, options: argparse.Namespace) -> Balance:
    import torch

    from torchckpt.pipe import balance_by_bytes, balance_by_time

    balance_by = {"time": balance_by_time, "bytes": balance_by_bytes}[options.by]
    dtype = getattr(torch, options.dtype)
    make = torch.randn if dtype.is_floating_point else torch.zeros
    try:
        parameters = module.parameters() if _is_module(module) else ()
        device = next((parameter.device for parameter in parameters), torch.device("cpu"))
        inputs = [make(shape, dtype=dtype, device=device) for shape in options.input]
        return balance_by(options.stages, module, *inputs)
    except ArgumentError:
        raise
    except Exception as error:  # of the user's code
        raise _Unusable(f"{options.module} does not run on these inputs: {type(error).__name__}: {error}") from error


def _line(error: Exception) -> str:
    """A message as one line: the rule, what was received, what works."""
    text = re.sub(r"^\w+\(\): ", "", str(error))
    return " ".join(re.sub(r"\n\s*(received|works):\s*", r"; \1: ", text).split())


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m torchckpt", description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"torchckpt {__version__}")
    commands = parser.add_subparsers(dest="command", title="commands", parser_class=_Parser)
    simulate = commands.add_parser(
        "simulate",
        help="simulate one step, and compare ways to recompute",
        description="Simulate one step of a pipeline schedule, and compare ways to recompute.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_schedule(simulate)
    _add_costs(simulate)
    _add_output(simulate)
    _add_balance(commands)
    return parser


def _add_balance(commands: argparse._SubParsersAction[_Parser]) -> None:
    balance = commands.add_parser(
        "balance",
        help="cut an nn.Sequential into stages that cost alike",
        description="Cut an nn.Sequential into stages that cost alike, by what its layers cost on a sample.",
        epilog=_BALANCE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    balance.add_argument("module", metavar="MODULE:ATTRIBUTE", help="where the nn.Sequential is")
    balance.add_argument("--stages", type=int, required=True, metavar="P", help="of the whole pipeline")
    balance.add_argument(
        "--input",
        type=_shape,
        action="append",
        required=True,
        metavar="SHAPE",
        help="of one micro-batch, such as 8,128; again for each further input of the first layer",
    )
    balance.add_argument("--dtype", choices=_DTYPES, default="float32", help="of the inputs (default: %(default)s)")
    balance.add_argument("--by", choices=("time", "bytes"), default="time", help="default: %(default)s")
    balance.add_argument("--json", action="store_true", help="print JSON instead of the table")


def _add_schedule(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("schedule")
    which = group.add_mutually_exclusive_group(required=True)
    which.add_argument("--schedule", metavar="NAME", help=f"one of {', '.join(NAMES)}, or torch's name of it")
    which.add_argument("--csv", type=Path, metavar="FILE", help="a schedule as torch.distributed.pipelining writes it")
    group.add_argument("--stages", type=int, metavar="P", help="of the whole pipeline")
    group.add_argument("--microbatches", type=int, metavar="M", help="of one step")
    group.add_argument("--chunks", type=int, metavar="N", help="stages per rank, where the schedule leaves that open")
    group.add_argument(
        "--compare",
        type=_names,
        default="none,arrival,ahead",
        metavar="LIST",
        help="ways to recompute, a row and a picture each (default: %(default)s)",
    )


def _add_costs(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("costs of one micro-batch on one stage")
    group.add_argument("--forward", type=_positive, default=1.0, metavar="TIME", help="default: 1")
    group.add_argument("--backward", type=_positive, default=2.0, metavar="TIME", help="default: 2; halves are equal")
    group.add_argument("--recompute", type=_amount, default=1.0, metavar="TIME", help="default: 1")
    group.add_argument("--link", type=_amount, default=0.0, metavar="TIME", help="of one message; default: 0")
    group.add_argument("--boundary", type=_amount, default=0.0, metavar="A", help="what recomputing keeps; default: 0")


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--gantt", action="store_true", help="also print the steps as text")
    group.add_argument("--svg", type=Path, metavar="FILE", help="draw the steps one over the other")
    group.add_argument("--budget", type=_amount, metavar="A", help="draw a line at so much memory")
    group.add_argument("--trace", type=Path, metavar="FILE", help="write the steps for https://ui.perfetto.dev")
    group.add_argument("--json", action="store_true", help="print JSON instead of the table")


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",")))


def _shape(text: str) -> tuple[int, ...]:
    sizes = text.split(",")
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"whole numbers from 1, such as 8,128; received: {text}")
    return tuple(map(int, sizes))


def _amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= _LARGEST:
        raise argparse.ArgumentTypeError(f"a number from 0 to {_LARGEST:g}; received: {text}")
    return value


def _positive(text: str) -> float:
    value = _amount(text)
    if not value:
        raise argparse.ArgumentTypeError("a number above 0; received: 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
