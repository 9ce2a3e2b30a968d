"""Lines: the bytes that autograd keeps, by module, operation and source line, as a table and as a picture."""
from __future__ import annotations

import gc
import re
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from torchckpt.planning.draw.canvas import CHARACTER, STYLE, TEXT, Axis, Canvas, clipped
from torchckpt.planning.draw.units import aligned, percent, units_of_bytes
from torchckpt.planning.figures import Drawn
from torchckpt.regions.places import Place, operation_of, place_of, shown_line
from torchckpt.regions.private import is_fake, keep_from_dynamo, kept_by_policies, look_through, number_of, running_node
from torchckpt.regions.saved import SavedBytes, held, storage_of, unchanged
from torchckpt.tensors import node_name, nodes_behind, tensors_in, version_of
from torchckpt.testing.counts import check_step

__all__ = ["KeptStorages", "SavedByLine", "SavedLine", "lines_of", "saved_by_line", "storages_alive"]

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


# the storages that autograd keeps during a step -----------------------------------------------------------------------


class _SavedTensor:
    """What autograd holds in place of a saved tensor, as long as it holds it."""

    def __init__(self, tensor: Tensor, changes: list[tuple[StorageWeakRef, int]], *storages: StorageWeakRef) -> None:
        self.tensor, self.version, self._changes, self._storages = tensor, version_of(tensor), changes, storages
        changes.extend((storage, 1) for storage in storages)

    def __del__(self) -> None:
        self._changes.extend((storage, -1) for storage in self._storages)


class KeptStorages(SavedBytes):
    """While it is entered, it records what autograd and torch's selective policies keep in this thread.

    Storages of ``before`` do not count; by default those that are there when the first tensor is saved, but for results
    of differentiable operations."""

    def __init__(self, before: Set[StorageWeakRef] | None = None) -> None:
        super().__init__()
        self.restart(before)

    def restart(self, before: Set[StorageWeakRef] | None = None) -> None:
        """Forget everything, and record another step."""
        self._before = before
        self._storages.clear()
        self._changes: list[tuple[StorageWeakRef, int]] = []  # 1 where a saved tensor comes, -1 where it goes
        self._places: dict[StorageWeakRef, Place] = {}
        self.operations: dict[int, str] = {}
        """Operations by the numbers of their autograd nodes."""

    @property
    def before_bytes(self) -> int:
        """The bytes that autograd kept of storages that do not count. Parameters are not among them."""
        return sum(self._storages.values()) - sum(self._storages[storage] for storage in self._places)

    @contextmanager
    def entered(self) -> Iterator[None]:
        with saved_tensors_hooks(self._pack, self._unpack), _kept_in_this_thread(self._saved):
            yield

    def at_peak(self) -> list[tuple[Place, int]]:
        """The place and the bytes of each storage that autograd kept when it kept the most bytes."""
        holders: Counter[StorageWeakRef] = Counter()
        now_bytes = most_bytes = end = 0
        for index, (storage, change) in enumerate(self._changes, 1):
            holders[storage] += change
            if holders[storage] == max(change, 0):  # the first holder has come, or the last one has gone
                now_bytes += change * self._storages[storage]
            if now_bytes > most_bytes:
                most_bytes, end = now_bytes, index
        holders.clear()
        for storage, change in self._changes[:end]:
            holders[storage] += change
        return [(self._places[storage], self._storages[storage]) for storage, count in holders.items() if count]

    def learn(self, node: Node | None) -> None:
        """Note the names of ``node`` and of all nodes behind it."""
        for new in nodes_behind([node], lambda node: number_of(node) not in self.operations):
            self.operations[number_of(new)] = operation_of(node_name(new))

    def _pack(self, tensor: Tensor) -> Any:
        if is_fake():  # of a trace
            return _SavedTensor(tensor, self._changes)
        self.learn(tensor.grad_fn)
        return self._saved(tensor, sys._getframe().f_back)

    def _unpack(self, saved: _SavedTensor) -> Tensor:
        self.learn(running_node())
        return unchanged(saved.tensor, saved.version)

    def _saved(self, tensor: Tensor, caller: FrameType | None = None) -> _SavedTensor:
        if self._before is None:
            self._before = storages_alive(activations=False)
        self._note(tensor)
        new = self._storages.keys() & storage_of(tensor).keys() - self._before
        for storage in new - self._places.keys():
            self._places[storage] = place_of(caller or sys._getframe())
        return _SavedTensor(held(tensor), self._changes, *new)


keep_from_dynamo(KeptStorages._pack, KeptStorages._unpack)
look_through(KeptStorages._pack)

_watching: list[tuple[int, Callable[[Tensor], object]]] = []
"""The threads whose policies are watched, and by what."""
_lock, _policies = threading.Lock(), ExitStack()
"""Policies are watched in all threads, until the last of those has ended."""


@contextmanager
def _kept_in_this_thread(pack: Callable[[Tensor], object]) -> Iterator[None]:
    """Inside the block, ``pack`` gets each tensor that a selective policy of this thread keeps."""
    mine = threading.get_ident(), pack
    with _lock:
        if not _watching:
            _policies.enter_context(kept_by_policies(_packed))
        _watching.append(mine)
    try:
        yield
    finally:
        with _lock:
            _watching.remove(mine)
            if not _watching:
                _policies.close()


def _packed(tensor: Tensor) -> list[object]:
    return [pack(tensor) for thread, pack in tuple(_watching) if thread == threading.get_ident()]


def storages_alive(activations: bool = True) -> set[StorageWeakRef]:
    """The storages of all tensors that the garbage collector tells of: none that ``gc.freeze()`` hides."""
    storages: set[StorageWeakRef] = set()
    for tensor in gc.get_objects():
        if issubclass(type(tensor), Tensor):
            with suppress(Exception):  # a parameter of a lazy layer has no storage yet
                storages.update(storage_of(tensor) if activations or tensor.grad_fn is None else ())
    return storages
