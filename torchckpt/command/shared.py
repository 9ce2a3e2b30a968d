"""Shared: the parser, the one line that an error is, and the types of arguments."""
from __future__ import annotations

import argparse
import errno
import importlib
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from torchckpt.model.amount import read

__all__ = [
    "Parser",
    "Unusable",
    "amount",
    "attribute_at",
    "check_size",
    "check_writable",
    "comma_list",
    "file_or_counts",
    "is_module",
    "line",
    "module_at",
    "positive",
    "shape",
    "size",
    "text_of",
    "write",
]

_LARGEST = 1e12


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


class Unusable(Exception):
    """The one line that says why."""


def line(error: Exception) -> str:
    """A message as one line: the rule, what was received, what works."""
    text = re.sub(r"^[\w.]+\(\): ", "", str(error))
    return " ".join(re.sub(r"\n\s*(received|works):\s*", r"; \1: ", text).split())


def attribute_at(place: str) -> Any:
    """What ``module:attribute`` names."""
    name, colon, attribute = place.partition(":")
    if not (name and colon and attribute):
        raise Unusable(f"the module is module:attribute; received: {place}; works: my_package.model:gpt")
    try:
        found: Any = importlib.import_module(name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:  # of the user's code
        raise _unmade(place, error) from error
    return found


def module_at(place: str) -> Any:
    """What ``module:attribute`` names, or what it returns if it is a function or a class."""
    found = attribute_at(place)
    try:
        return found if is_module(found) else found()
    except Exception as error:  # of the user's code
        raise _unmade(place, error) from error


def _unmade(place: str, error: Exception) -> Unusable:
    return Unusable(f"cannot make {place}: {type(error).__name__}: {error}")


def is_module(found: Any) -> bool:
    from torch import nn

    return isinstance(found, nn.Module)


def text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise Unusable(f"cannot read {path}: it is not text") from None
    except OSError as error:
        raise Unusable(f"cannot read {path}: {error.strerror}") from None


def write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Unusable(f"cannot write {path}: {error.strerror}") from None


def check_writable(path: Path) -> None:
    """Say what :func:`write` would, of a place where no file can be."""
    if path.is_dir() or not path.parent.is_dir():
        raise Unusable(f"cannot write {path}: {os.strerror(errno.EISDIR if path.is_dir() else errno.ENOENT)}")


def comma_list(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",")))


def shape(text: str) -> tuple[int, ...]:
    sizes = text.split(",")
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"whole numbers from 1, such as 8,128; received: {text}")
    return tuple(map(int, sizes))


def amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= _LARGEST:
        raise argparse.ArgumentTypeError(f"a number from 0 to {_LARGEST:g}; received: {text}")
    return value


def positive(text: str) -> float:
    value = amount(text)
    if not value:
        raise argparse.ArgumentTypeError("a number above 0; received: 0")
    return value


def size(text: str) -> float:
    """Bytes, such as ``80GB``."""
    found = read(float(text) if text.replace(".", "", 1).isdecimal() else text)
    if found is None or found.is_share:
        raise argparse.ArgumentTypeError(f"a size such as 80GB or 60GiB; received: {text}")
    return float(found.number)


def file_or_counts(
    options: argparse.Namespace, counts: Mapping[str, int | None], others: Mapping[str, int | None]
) -> Path | None:
    """The file of ``--csv``; None where ``--schedule`` and all of ``counts`` say what is asked for. ``others`` may."""
    if options.csv is not None:
        given = [name for name, value in {**counts, **others}.items() if value is not None]
        if given:
            raise Unusable(f"{given[0]} goes with --schedule; with --csv the file says it")
        csv: Path = options.csv
        return csv
    missing = [name for name, value in counts.items() if value is None]
    if missing:
        raise Unusable(f"--schedule needs {' and '.join(missing)}")
    return None


def check_size(options: argparse.Namespace, most: int) -> None:
    if options.stages * options.microbatches > most:
        raise Unusable(f"--stages times --microbatches is at most {most}")
