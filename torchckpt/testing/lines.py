"""Lines: the bytes that autograd keeps, by module, operation and source line, as a table and as a picture."""
from __future__ import annotations

import linecache
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from torchckpt.errors import Fault, called, check, kind
from torchckpt.planning.draw.bars import draw_bars
from torchckpt.planning.draw.canvas import clipped
from torchckpt.planning.draw.units import number, percent, units_of_bytes
from torchckpt.planning.figures import Drawn
from torchckpt.tensors import tensors_in
from torchckpt.testing.kept import KeptStorages, storages_alive

__all__ = ["SavedByLine", "SavedLine", "lines_of", "saved_by_line"]

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_REGIONS_OF_TORCH = ("CheckpointFunction", "_NoopSaveInputs")
_MOST_ROWS = 24
_LONGEST_NAME, _LONGEST_SOURCE = 36, 44


@dataclass(frozen=True)
class SavedLine:
    """What autograd keeps for one operation at one line, called by one module."""

    module: str
    """The path of the innermost module, in the outermost one that has it; the class of the outermost one itself."""
    operation: str
    """The autograd node that saved it, such as ``Addmm``; empty where the graph was gone before it could be read."""
    file: str
    line: int
    """Of the innermost call outside of torch and torchckpt. 0 where there is none, as on a thread of a device."""
    bytes: int
    storages: int

    @property
    def place(self) -> str:
        """``model.py:23``, seen from the current folder; the file and its folder where it is not in there."""
        path = Path(self.file)
        inside = path.is_relative_to(os.getcwd())
        return f"{path.relative_to(os.getcwd()) if inside else Path(*path.parts[-2:])}:{self.line}" if self.line else ""

    @property
    def source(self) -> str:
        """The text of the line; empty where there is no source."""
        return linecache.getline(self.file, self.line).strip()


@dataclass(frozen=True)
class SavedByLine(Drawn):
    """What autograd kept at the moment when it kept the most bytes. ``print`` shows a table, a notebook a picture."""

    rows: tuple[SavedLine, ...]
    """The largest first."""
    before_bytes: int
    """What autograd kept of tensors that were there before, with parameters and buffers. No row has them."""

    @property
    def total(self) -> int:
        """The bytes of all rows."""
        return sum(row.bytes for row in self.rows)

    @property
    def summary(self) -> str:
        """How many bytes it is, in one line."""
        units = units_of_bytes(max(self.total, self.before_bytes))
        storages = sum(row.storages for row in self.rows)
        kept = f"autograd keeps {units.of_memory(self.total)} in {storages} storage{'s' * (storages != 1)}"
        return f"{kept}, and {units.of_memory(self.before_bytes)} that were there before"

    def table(self) -> str:
        """A line for each row, and at most 24: the others are summed up. Rows that differ only in the numbers of their
        modules, such as ``layers.0`` and ``layers.1``, are one: ``layers.*``."""
        units = units_of_bytes(self.total)
        cells = [(units.memory, "share", "storages", "module", "operation", "line")]
        for row in self._shown():
            amount = number(row.bytes / units.bytes), percent(row.bytes / max(self.total, 1)), str(row.storages)
            module, operation = clipped(row.module, _LONGEST_NAME, tail=True), clipped(row.operation, _LONGEST_NAME)
            line = f"{row.place}  {clipped(row.source, _LONGEST_SOURCE)}"
            cells.append((*amount, module or "-", operation or "-", line))
        return _in_columns(cells)

    def __str__(self) -> str:
        return f"{self.summary}\n\n{self.table()}" if self.rows else self.summary

    def _shown(self) -> list[SavedLine]:
        rows = _alike(self.rows)
        others = rows[_MOST_ROWS - 1 :] if len(rows) > _MOST_ROWS else []
        return [*rows[: len(rows) - len(others)], *([_sum(others, f"{len(others)} others")] if others else [])]

    def _svg(self) -> str:
        rows = [(" ".join(filter(None, (row.module, row.operation, row.place))), row.bytes) for row in self._shown()]
        return draw_bars(rows, units_of_bytes(self.total), "What autograd keeps for the backward", self.summary)


@called("saved_by_line()")
def saved_by_line(step: Callable[[], object]) -> SavedByLine:
    """Run ``step()``, and tell which lines made autograd keep memory for the backward, the largest first.

    Counted is what autograd keeps at the moment when it keeps the most, so that of several micro-batches one after the
    other one counts. Each storage counts once, in full, for the operation that saved it first. What was there before,
    parameters and buffers have no rows; they are summed up in ``before_bytes``. Of a region only its boundary counts,
    and what ``torchckpt.keep`` or a selective policy keeps. Compiled code is one operation. Other threads do not count.

    >>> print(saved_by_line(lambda: model(tokens).sum().backward()))

    Args:
        step: a forward, with its backward or without. What it returns is looked through for tensors, whose graphs tell
            the names of operations; so does a backward.

    Raises:
        ArgumentError: ``step`` is not callable.
        torch.OutOfMemoryError: of the step. From Python 3.11 on, it shows the table of what was kept until then.
    """
    fault = Fault("the step is not callable", kind(step), "saved_by_line(lambda: model(x).sum().backward())")
    check([] if callable(step) else [fault])
    kept = KeptStorages(storages_alive())
    try:
        with kept.entered():
            outputs = step()
    except torch.OutOfMemoryError as error:
        if hasattr(error, "add_note"):
            error.add_note(str(lines_of(kept)))
        raise
    for output in tensors_in(outputs):
        kept.learn(output.grad_fn)
    return lines_of(kept)


def lines_of(kept: KeptStorages) -> SavedByLine:
    """What was kept, by line."""
    lines: defaultdict[tuple[str, str, str, int], list[int]] = defaultdict(list)
    for storage in kept.at_peak():
        operation = re.sub(r"Backward\d*$", "", kept.name_of(storage))
        operation = "checkpoint" if operation in _REGIONS_OF_TORCH else operation
        lines[storage.place.module, operation, storage.place.file, storage.place.line].append(storage.size_bytes)
    rows = [SavedLine(*line, sum(sizes), len(sizes)) for line, sizes in lines.items()]
    return SavedByLine(_largest_first(rows), kept.before_bytes)


def _alike(rows: Iterable[SavedLine]) -> tuple[SavedLine, ...]:
    """Rows that differ only in numbers of modules as one."""
    groups: defaultdict[tuple[str, str, str, int], list[SavedLine]] = defaultdict(list)
    for row in rows:
        groups[_NUMBER.sub("*", row.module), row.operation, row.file, row.line].append(row)
    return _largest_first(_sum(group, key[0]) for key, group in groups.items())


def _sum(rows: Sequence[SavedLine], module: str) -> SavedLine:
    """``rows`` as one; of a single row as it is."""
    if len(rows) == 1:
        return rows[0]
    sizes = sum(row.bytes for row in rows), sum(row.storages for row in rows)
    first = rows[0] if len({(row.file, row.line) for row in rows}) == 1 else SavedLine("", "", "", 0, 0, 0)
    return SavedLine(module, first.operation, first.file, first.line, *sizes)


def _largest_first(rows: Iterable[SavedLine]) -> tuple[SavedLine, ...]:
    return tuple(sorted(rows, key=lambda row: -row.bytes))


def _in_columns(cells: Sequence[Sequence[str]]) -> str:
    """Rows of cells in columns, of which the first three are numbers."""
    widths = [max(map(len, column)) for column in zip(*cells)]
    aligned = ([cell.rjust(width) for cell, width in zip(row[:3], widths)] for row in cells)
    named = ([cell.ljust(width) for cell, width in zip(row[3:], widths[3:])] for row in cells)
    return "\n".join("  ".join((*left, *right)).rstrip() for left, right in zip(aligned, named))
