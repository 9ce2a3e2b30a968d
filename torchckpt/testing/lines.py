"""Lines: the bytes that autograd keeps, by module, operation and source line, as a table and as a picture."""
from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch

from torchckpt.errors import called
from torchckpt.planning.draw.canvas import CHARACTER, STYLE, TEXT, Axis, Canvas, clipped
from torchckpt.planning.draw.units import aligned, percent, units_of_bytes
from torchckpt.planning.figures import Drawn
from torchckpt.regions.places import shown_line
from torchckpt.tensors import tensors_in
from torchckpt.testing.counts import check_step
from torchckpt.testing.kept import KeptStorages, storages_alive

__all__ = ["SavedByLine", "SavedLine", "lines_of", "saved_by_line"]

_without_numbers = partial(re.compile(r"(?<![^.])\d+(?![^.])").sub, "*")
_LONGEST, _TITLE = 36, "What autograd keeps for the backward"
_WIDTH, _LEFT, _RIGHT, _ROW = 960.0, 16.0, 96.0, 24.0


@dataclass(frozen=True)
class SavedLine:
    """What autograd keeps for an operation, such as ``Addmm``, of a module, at a line outside of torch."""

    module: str
    operation: str
    file: str
    line: int
    bytes: int
    storages: int

    @property
    def place(self) -> str:
        """``model.py:23``, from the current folder on; or with the file's own folder."""
        return shown_line(self.file, self.line)


@dataclass(frozen=True)
class SavedByLine(Drawn):
    """What autograd kept at the moment when it kept the most bytes. ``print`` shows a table."""

    rows: tuple[SavedLine, ...]
    """The largest first."""
    before_bytes: int
    """What autograd kept of tensors from before the step, without parameters. No row has them."""

    @property
    def total(self) -> int:
        """The bytes of all rows."""
        return sum(row.bytes for row in self.rows)

    @property
    def summary(self) -> str:
        units = units_of_bytes(max(self.total, self.before_bytes))
        before = f"{units.of_memory(self.before_bytes)} that were there before"
        return f"autograd keeps {units.of_memory(self.total)}, and {before}"

    def __str__(self) -> str:
        """Rows that differ only in numbers of modules, such as ``layers.0`` and ``layers.1``, are one."""
        units, cells = units_of_bytes(self.total), [("module", "operation", "line", "storages", "bytes", "share")]
        for row in _summed(self.rows, _without_numbers):
            amount = str(row.storages), units.of_memory(row.bytes), percent(row.bytes / max(self.total, 1))
            cells.append((clipped(row.module, _LONGEST, tail=True), row.operation, row.place, *amount))
        return f"{self.summary}\n\n{aligned(cells)}" if self.rows else self.summary

    def _svg(self) -> str:
        rows, units = _summed(self.rows, _without_numbers), units_of_bytes(self.total)
        names = [clipped(f"{row.module} {row.operation} {row.place}".strip(), 2 * _LONGEST) for row in rows]
        start = 2 * _LEFT + max(map(len, names), default=0) * TEXT * CHARACTER
        axis = Axis(max((row.bytes for row in rows), default=0), start, _WIDTH - _RIGHT)
        canvas = Canvas(_WIDTH)
        y = canvas.headed(_LEFT, _TITLE, self.summary) + _ROW
        for name, row in zip(names, rows):
            canvas.words(start - 8, y, name, class_="end")
            canvas.rectangle(start, y - 12, axis(row.bytes) - start, _ROW - 8, class_="F")
            canvas.words(axis(row.bytes) + 8, y, units.of_memory(row.bytes))
            y += _ROW
        return canvas.text(y, f"{_TITLE}: {self.summary}", STYLE)


def saved_by_line(step: Callable[[], object]) -> SavedByLine:
    """Run ``step()``, and tell which lines made autograd keep memory for the backward.

    Counted is the moment at which autograd keeps the most, so of micro-batches that follow each other the largest. A
    storage counts once, in full, for the operation that saved it first. What was there before, and parameters, have no
    rows. Of a region the inputs count, and what ``torchckpt.keep`` or a selective policy keeps. Compiled code is one
    operation. Other threads do not count, nor do tensors that saved-tensor hooks inside of the step take.

    >>> print(saved_by_line(lambda: model(tokens).sum().backward()))

    Args:
        step: a forward, with its backward or without. Without one, names of operations come from what it returns.

    Raises:
        ArgumentError: ``step`` is not callable.
        torch.OutOfMemoryError: of the step, with the table in a note, from Python 3.11 on.
    """
    with called("saved_by_line()"):
        check_step(step, "saved_by_line")
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
    rows = []
    for place, size in kept.at_peak():
        operation = place.operation or kept.operations.get(place.node, "?")
        rows.append(SavedLine(place.module, operation, place.file, place.line, size, 1))
    return SavedByLine(tuple(_summed(rows, str)), kept.before_bytes)


def _summed(rows: Iterable[SavedLine], like: Callable[[str], str]) -> list[SavedLine]:
    """Rows of which all is equal, and modules are by ``like``, as one; the largest first."""
    groups = defaultdict(list)
    for row in rows:
        groups[like(row.module), row.operation, row.file, row.line].append(row)
    sums = []
    for (module, *_), group in groups.items():
        name = module if len({row.module for row in group}) > 1 else group[0].module
        sizes = sum(row.bytes for row in group), sum(row.storages for row in group)
        sums.append(SavedLine(name, group[0].operation, group[0].file, group[0].line, *sizes))
    return sorted(sums, key=lambda row: -row.bytes)
