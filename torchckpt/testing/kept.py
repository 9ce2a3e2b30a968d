"""Kept: the storages that autograd keeps during a step, when it keeps each, and where each was saved first."""
from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from torchckpt.regions.private import kept_by_policies, look_through, newest_node, number_of, running_node
from torchckpt.regions.saved import SavedBytes, storage_of

__all__ = ["KeptStorages", "Line", "storages_alive"]

_LIBRARIES = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))
_REGIONS = f"{_LIBRARIES[1]}regions{os.sep}", torch.utils.checkpoint.__file__
"""The code that saves the inputs of regions, which have no node yet."""
_INPUT = -1
_CALL = nn.Module.__call__.__code__
_APPLY = getattr(torch.autograd.Function.apply, "__code__", None)
"""Through it, regions of torch 2.11 save their inputs (torch/utils/checkpoint.py). No Python code in torch 2.15."""

Line: TypeAlias = tuple[str, str, int, int]
"""Where a tensor is saved: the path of the innermost module, file and line outside of torch, the number of the node."""


class _SavedTensor:
    """What autograd holds in place of a saved tensor, as long as it holds it."""

    def __init__(self, tensor: Tensor, changes: list[tuple[StorageWeakRef, int]], *storages: StorageWeakRef) -> None:
        self.tensor, self._changes, self._storages = tensor, changes, storages
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
        self._lines: dict[StorageWeakRef, Line] = {}
        self.names = {_INPUT: "checkpoint"}
        """The names of autograd nodes by their numbers."""

    @property
    def before_bytes(self) -> int:
        """The bytes that autograd kept of storages that do not count. Parameters are not among them."""
        return sum(self._storages.values()) - sum(self._storages[storage] for storage in self._lines)

    @contextmanager
    def entered(self) -> Iterator[None]:
        with saved_tensors_hooks(self._pack, self._unpack), kept_by_policies(self._saved):
            yield

    def at_peak(self) -> list[tuple[Line, int]]:
        """The line and the bytes of each storage that autograd kept when it kept the most bytes."""
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
        return [(self._lines[storage], self._storages[storage]) for storage, count in holders.items() if count]

    def learn(self, node: Node | None) -> None:
        """Note the names of ``node`` and of all nodes behind it."""
        stack = [node]
        while stack:
            node = stack.pop()
            if node is not None and number_of(node) not in self.names:
                self.names[number_of(node)] = node.name()
                stack.extend(parent for parent, _ in node.next_functions)

    def _pack(self, tensor: Tensor) -> Any:
        self.learn(tensor.grad_fn)
        caller: FrameType | None = sys._getframe(1)
        if caller is not None and caller.f_code is _APPLY:
            caller = caller.f_back
        return self._saved(tensor, caller is not None and caller.f_code.co_filename.startswith(_REGIONS))

    def _unpack(self, saved: _SavedTensor) -> Tensor:
        self.learn(running_node())
        return saved.tensor

    def _saved(self, tensor: Tensor, is_input: bool = False) -> _SavedTensor:
        if self._before is None:
            self._before = storages_alive(activations=False)
        saved = super()._pack(tensor)
        new = self._storages.keys() & storage_of(tensor).keys() - self._before
        for storage in new - self._lines.keys():
            self._lines[storage] = self._line(_INPUT if is_input else newest_node())
        return _SavedTensor(saved, self._changes, *new)

    def _line(self, node: int) -> Line:
        modules, lines = [], []
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code is _CALL:
                modules.append(frame.f_locals["self"])
            elif not frame.f_code.co_filename.startswith(_LIBRARIES):
                lines.append((frame.f_code.co_filename, frame.f_lineno or 0))
            frame = frame.f_back
        named = ((*named, root) for root in reversed(modules) for named in root.named_modules())
        paths = (path or type(root).__name__ for path, module, root in named if module is modules[0])
        return (next(paths, ""), *(lines[0] if lines else ("", 0)), node)


look_through(KeptStorages._pack)


def storages_alive(activations: bool = True) -> set[StorageWeakRef]:
    """The storages of all tensors that the garbage collector tells of: none that ``gc.freeze()`` hides."""
    storages: set[StorageWeakRef] = set()
    for tensor in gc.get_objects():
        if issubclass(type(tensor), Tensor):
            with suppress(Exception):  # a parameter of a lazy layer has no storage yet
                storages.update(storage_of(tensor) if activations or tensor.grad_fn is None else ())
    return storages
