"""Shared: the parser, the one line that an error is, and the types of arguments."""
from __future__ import annotations

import argparse
import errno
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from torchckpt.errors import ArgumentError, CheckpointError
from torchckpt.planning.budget import read
from torchckpt.planning.order.csv_format import from_csv
from torchckpt.planning.order.schedule import Schedule
from torchckpt.planning.order.schedules import NAMES, named_schedule

__all__ = [
    "Parser", "Unusable", "add_command", "add_schedule", "amount", "check_apart", "comma_list", "count",
    "file_to_write", "give", "given", "in_options", "line", "positive", "say", "schedule_name", "schedule_of_csv",
    "shape", "size", "state_bytes", "tell", "with_unit", "write",
]

_LARGEST = 1e12
_LEAST_BARE = 10_000
"""A number of bytes below this has a unit: ``80`` was meant as 80 GB."""
_CSV = "works: a schedule as torch.distributed.pipelining writes it"
_OPTIONS = (
    (r"\bbudget=None", "no --budget"),
    (r"\bexact=True", "--exact"),
    (r"\bDeviceMemory\((\d+)\)", r"--device-memory \1B"),
    (r"""\bworks: (['"]?)([\w.+]+)\1(?=, or a list)""", r"works: --host \2"),
    (r"""\b(budget|device)=(['"]?)([^'",; ]+)\2""", r"--\1 \3"),
    (r"""\b(keep)=\[?'([^',\]]+)'[^;]*?(?=$|\]|;)\]?""", r"--\1 \2"),
    (r"\bplan\.explain\('([^']*)'\)", r"--explain \1"),
    (r"\bchunks=(\d+)", r"--chunks \1"),
    (r"\bm=(\d+)", r"--microbatches \1"),
    (r"\bp=(\d+)", r"\1 ranks"),
)
_OF_MODEL = (
    (r"\bbudget=(\d+(?:\.\d+)?)(?=[\s,;]|$)", r"--budget \1B"),
    (r"--stages \d+ (?=--microbatches)", ""),
    (r"--stages (\d+)", r"\1 stages of the model"),
)
_MODULE = "python -m torchckpt"


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and whose examples have the name by which it was called."""

    def format_help(self) -> str:
        name = "torchckpt" if self.prog.startswith("torchckpt") else _MODULE
        return super().format_help().replace(_MODULE, name)

    def error(self, message: str) -> NoReturn:
        text = " ".join(message.split())
        if re.search(r" (is|are) required\b", text) and self.epilog:
            text += f"; works: {_first_example(self.format_help())}"
        self.exit(2, f"{self.prog}: error: {text}\n")


def _first_example(text: str) -> str:
    """The first call that ``text`` shows below "examples:", in one line."""
    lines = iter(text.partition("examples:\n")[2].splitlines())
    call = next(lines, "").strip()
    while call.endswith("\\"):
        call = f"{call[:-1].strip()} {next(lines, '').strip()}"
    return call


class Unusable(CheckpointError):
    """The input of a command is bad; the message is the one line that it prints."""


def line(error: Exception) -> str:
    """A message as one line: the rule, what was received, what works."""
    text = re.sub(r"^[\w.]+\(\): ", "", str(error))
    if several := re.match(r"\d+ faults.*\n", text):
        text = f"{several[0].strip()}: " + re.sub(r"\n(?=\S)", " | ", text[several.end() :])
    return " ".join(re.sub(r"\n\s*(received|works):\s*", r"; \1: ", text).split())


def given(options: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """Those of the options ``names`` that are given, as one writes them."""
    written = {"target": "MODULE:FUNCTION"}
    chosen = (name for name in names if getattr(options, name) is not None)
    return [written.get(name, f"--{name.replace('_', '-')}") for name in chosen]


def in_options(text: str, *, of_model: bool = False) -> str:
    """``text`` with the command's options in place of arguments of functions; ``of_model``: those of a model's plan."""
    for pattern, option in (*_OF_MODEL * of_model, *_OPTIONS):
        text = re.sub(pattern, option, text)
    return text


def add_command(
    commands: argparse._SubParsersAction[Parser], name: str, short: str, description: str, epilog: str
) -> Parser:
    """The parser of one command; ``short`` is its line in the help of all."""
    form = argparse.RawDescriptionHelpFormatter
    return commands.add_parser(name, help=short, description=description, epilog=epilog, formatter_class=form)


def add_schedule(
    parser: argparse.ArgumentParser, name: Callable[[str], str], more: str = "", *, required: bool = True
) -> argparse._ArgumentGroup:
    """The arguments that say which schedule: its ``name`` and counts, or a file. Return their group, for others.
    ``more``: what ``--schedule`` takes besides the names of schedules, for its help. ``required``: argparse asks for
    one of them. Default: True."""
    group = parser.add_argument_group("schedule")
    which = group.add_mutually_exclusive_group(required=required)
    names = f"one of {', '.join(NAMES)}, or torch's name of it{more}"
    which.add_argument("--schedule", type=name, metavar="NAME", help=names)
    which.add_argument("--csv", type=Path, metavar="FILE", help="a schedule as torch.distributed.pipelining writes it")
    group.add_argument("--stages", type=count, metavar="P", help="of the whole pipeline")
    group.add_argument("--microbatches", type=count, metavar="M", help="of one step")
    return group


def schedule_of_csv(options: argparse.Namespace, other: str, most: int) -> Schedule | None:
    """The schedule of ``--csv``; None where ``--schedule`` and all counts are given, and ``other`` may be. ``most``:
    stages times micro-batches."""
    counts = {"--stages": options.stages, "--microbatches": options.microbatches}
    if options.csv is None:
        missing = [name for name, value in counts.items() if value is None]
        if missing:
            works = "works: --schedule 1f1b --stages 4 --microbatches 8"
            raise Unusable(f"--schedule is given without {' and '.join(missing)}; {works}")
        visits = options.stages * options.microbatches
        if visits > most:
            received = f"--stages {options.stages} --microbatches {options.microbatches}"
            raise Unusable(f"--stages times --microbatches is above {most}; received: {received}; works: "
                           f"--microbatches {max(1, most // options.stages)}")
        return None
    counts[f"--{other}"] = getattr(options, other)
    given = [name for name, value in counts.items() if value is not None]
    if given:
        raise Unusable(f"{given[0]} is given with --csv, whose file says it")
    return _read_csv(options.csv)


def _read_csv(path: Path) -> Schedule:
    try:
        return from_csv(path.read_text(encoding="utf-8-sig"), path.stem)  # Excel's has a byte order mark
    except UnicodeDecodeError:
        raise Unusable(f"argument --csv: cannot read {path}: it is not text; {_CSV}") from None
    except OSError as error:
        raise Unusable(f"argument --csv: cannot read {path}: {error.strerror}; {_CSV}") from None
    except ArgumentError as error:
        raise Unusable(f"argument --csv: {path}: {line(error)}") from error


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def give(
    options: argparse.Namespace, numbers: Callable[[], Mapping[str, Any]], *parts: object, **files: Callable[[], str]
) -> None:
    """Print what was found, as JSON if that is asked for, then write each of ``files`` whose option is given. JSON has
    no infinity: where there is no such number, such as a bound, it has null."""
    if options.json:
        say(json.dumps(_finite(numbers()), indent=2, allow_nan=False))
    else:
        say("\n\n".join(str(part) for part in parts if part))
    for name, made in files.items():
        if (path := getattr(options, name)) is not None:
            write(path, made())


def say(text: str) -> None:
    """Print ``text``. What cannot be printed is an error; where nobody reads on, nothing more is printed."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except OSError as error:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # which Python flushes when it ends  # noqa: SIM115
        if not isinstance(error, BrokenPipeError):
            works = "works: > a file on a disk with room"
            raise Unusable(f"cannot print the result: {error.strerror}; {works}") from None


def tell(text: str) -> None:
    """Print a line on standard error, if there is one that takes it; without one, ``print`` takes standard output."""
    if sys.stderr is not None:
        try:
            print(text, file=sys.stderr, flush=True)
        except OSError:
            sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def write(path: Path, text: str) -> None:
    """Write a file, after all that is printed: that took long, and is there where this fails."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Unusable(f"cannot write {path}: {error.strerror}; works: a file on a disk with room") from None


def file_to_write(suffix: str) -> Callable[[str], Path]:
    """A type of arguments: where a file with this ``suffix`` can be. It is checked at once: a plan takes its time."""

    def checked(text: str) -> Path:
        path, works = Path(text), f"works: a file such as picture{suffix}, in a folder that is there"
        try:
            is_device = path.exists() and not path.is_file() and not path.is_dir()  # such as /dev/stdout
            path.resolve()
        except (OSError, RuntimeError) as error:  # its name is too long, the current folder is gone, a link to itself
            said = getattr(error, "strerror", None) or os.strerror(errno.ELOOP)
            raise argparse.ArgumentTypeError(f"cannot write {text}: {said}; {works}") from None
        reason = None
        if path.is_dir():
            reason = os.strerror(errno.EISDIR)
        elif not path.parent.is_dir():
            reason = os.strerror(errno.ENOTDIR if path.parent.exists() else errno.ENOENT)
        elif not os.access(path if path.exists() else path.parent, os.W_OK):
            reason = os.strerror(errno.EACCES)
        elif path.suffix.lower() != suffix and not is_device:
            works = f"works: {path.with_suffix(suffix) if path.name else 'picture' + suffix}"
            raise argparse.ArgumentTypeError(f"the file's name does not end in {suffix}; received: {text}; {works}")
        if reason is not None:
            raise argparse.ArgumentTypeError(f"cannot write {text}: {reason}; {works}")
        return path

    return checked


def check_apart(options: argparse.Namespace) -> None:
    """Raise Unusable where two options write one file."""
    seen: dict[Path, str] = {}
    for name in ("svg", "trace", "frontier", "plan"):
        path = getattr(options, name, None)
        if path is not None and (other := seen.setdefault(path.resolve(), name)) != name:
            raise Unusable(f"--{other} and --{name} write the same file; received: {path} for both")


def comma_list(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",")))


def shape(text: str) -> tuple[int, ...]:
    sizes = text.split(",")
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"not whole numbers from 1, such as 8,128; received: {text}")
    return tuple(map(int, sizes))


def count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _LARGEST:
        raise argparse.ArgumentTypeError(f"not a whole number from 1, such as 4; received: {text}")
    return int(text)


def schedule_name(text: str) -> str:
    try:
        return named_schedule(text, 1, 2).name
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(line(error)) from None


def amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= _LARGEST:
        raise argparse.ArgumentTypeError(f"not a number from 0 to {_LARGEST:g}; received: {text}")
    return value


def positive(text: str) -> float:
    value = amount(text)
    if not value:
        raise argparse.ArgumentTypeError("not a number above 0; received: 0")
    return value


def with_unit(text: str) -> str | float:
    """A budget as it was written: text, or a number of bytes. Unusable, if it is so small that a unit is missing."""
    if not text.replace(".", "", 1).isdecimal():
        return text
    number = float(text)
    if number < _LEAST_BARE:
        raise Unusable(f"{text} (it has no unit)")
    return int(number) if number.is_integer() else number


def size(text: str) -> float:
    """Bytes, such as ``80GB``."""
    try:
        amount_read = read(with_unit(text))
    except Unusable as error:
        raise argparse.ArgumentTypeError(f"not a size such as 80GB or 60GiB; received: {error}") from None
    if amount_read is None or amount_read.is_share:
        raise argparse.ArgumentTypeError(f"not a size such as 80GB or 60GiB; received: {text}")
    return float(amount_read.number)


def state_bytes(text: str) -> float:
    """Bytes for a parameter, such as ``12``, or ``12/64`` where 64 ranks share them."""
    whole, _, ranks = text.partition("/")
    try:
        return amount(whole) / (count(ranks) if "/" in text else 1)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"not a number from 0 such as 12, or 12/64; received: {text}") from None
