"""Kept: each storage that autograd keeps during a step, from when to when, and the place that saved it first."""
from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from torchckpt.costs.private import sequence_of
from torchckpt.regions.private import kept_by_policies, look_through, newest_node, running_node
from torchckpt.regions.saved import SavedBytes, storage_of

__all__ = ["Kept", "KeptStorages", "Place", "storages_alive"]

_OURS = Path(__file__).parents[1]
_LIBRARIES = f"{Path(torch.__file__).parent}{os.sep}", f"{_OURS}{os.sep}"
"""Lines of these folders are not the user's."""
_REGIONS = f"{_OURS / 'regions'}{os.sep}", torch.utils.checkpoint.__file__
"""What saves the inputs of a region, when no node is made."""
_REGION = -1
"""In place of the number of a node."""
_CALL = nn.Module.__call__.__code__


class Place(NamedTuple):
    """Where in the user's code a tensor was saved: the innermost module, and the innermost line outside of torch."""

    module: str
    """Its path in the outermost module that has it; its class where it is the outermost one. Empty without a module."""
    file: str
    line: int


class Kept:
    """A storage that autograd keeps while any saved tensor holds it. The log has the times at which that changes."""

    __slots__ = ("_holders", "_log", "node", "place", "size_bytes")

    def __init__(self, place: Place, node: int, size_bytes: int, log: list[tuple[Kept, int]]) -> None:
        self.place, self.node, self.size_bytes = place, node, size_bytes
        self._log, self._holders = log, 0

    def hold(self) -> None:
        self._holders += 1
        if self._holders == 1:
            self._log.append((self, self.size_bytes))

    def release(self) -> None:
        self._holders -= 1
        if not self._holders:
            self._log.append((self, -self.size_bytes))


class _SavedTensor:
    """What autograd has in place of a saved tensor. It dies when the node that saved the tensor lets go of it."""

    __slots__ = ("_kept", "tensor")

    def __init__(self, tensor: Tensor, kept: Kept | None) -> None:
        self.tensor, self._kept = tensor, kept
        if kept is not None:
            kept.hold()

    def __del__(self) -> None:
        if self._kept is not None:
            self._kept.release()


class KeptStorages(SavedBytes):
    """While it is entered, it records which storages autograd keeps in this thread. Each storage counts once, in full.

    Not counted, but summed in ``before_bytes``: what was there before, and the parameters and buffers of the modules
    that are called. What torch's selective policies keep counts, too.
    """

    def __init__(self, before: set[StorageWeakRef] | None = None) -> None:
        super().__init__()
        self.restart(before)

    def restart(self, before: set[StorageWeakRef] | None = None) -> None:
        """Forget everything. Later calls count another step.

        Args:
            before: the storages from before the step. Default: those that are there when the step saves its first
                tensor, but for results of differentiable operations.
        """
        self._before = before
        self._storages.clear()
        self._before_sizes: dict[StorageWeakRef, int] = {}
        self._kept: dict[StorageWeakRef, Kept] = {}
        self._log: list[tuple[Kept, int]] = []
        self._names = {_REGION: "checkpoint"}
        self._paths: dict[int, tuple[nn.Module, dict[int, str]]] = {}  # by id, of which the module is alive

    @property
    def before_bytes(self) -> int:
        """The bytes that autograd keeps of what was there before."""
        return sum(self._before_sizes.values())

    @contextmanager
    def entered(self) -> Iterator[None]:
        with saved_tensors_hooks(self._pack, self._unpack), kept_by_policies(self._saved):
            yield

    def at_peak(self) -> list[Kept]:
        """The storages that autograd kept when they were most bytes, in the order in which they were saved."""
        now_bytes = most_bytes = end = 0
        for index, (_, change) in enumerate(self._log):
            now_bytes += change
            if now_bytes > most_bytes:
                most_bytes, end = now_bytes, index + 1
        kept: dict[Kept, None] = {}
        for storage, change in self._log[:end]:
            if change > 0:
                kept[storage] = None
            else:
                kept.pop(storage, None)
        return list(kept)

    def name_of(self, kept: Kept) -> str:
        """The name of the autograd node that saved it; empty where the graph was gone before anybody could see it."""
        return self._names.get(kept.node, "")

    def learn(self, node: Node | None) -> None:
        """Note the names of ``node`` and of all nodes behind it."""
        stack = [node]
        while stack:
            node = stack.pop()
            if node is not None and sequence_of(node) not in self._names:
                self._names[sequence_of(node)] = node.name()
                stack.extend(parent for parent, _ in node.next_functions)

    def _pack(self, tensor: Tensor) -> Any:
        self.learn(tensor.grad_fn)
        return self._saved(tensor, sys._getframe(1).f_code.co_filename.startswith(_REGIONS))

    def _saved(self, tensor: Tensor, is_input: bool = False) -> _SavedTensor:
        if self._before is None:
            self._before = storages_alive(activations=False)
        saved = super()._pack(tensor)
        return _SavedTensor(saved, self._kept_of(tensor, _REGION if is_input else newest_node(), self._before))

    def _unpack(self, saved: _SavedTensor) -> Tensor:
        self.learn(running_node())
        return saved.tensor

    def _kept_of(self, tensor: Tensor, node: int, before: set[StorageWeakRef]) -> Kept | None:
        for storage, size_bytes in storage_of(tensor).items():
            if storage in self.storages and storage not in before and storage not in self._kept:
                place = self._place(before)
                if storage not in before:
                    self._kept[storage] = Kept(place, node, size_bytes, self._log)
            if storage in self._kept:
                return self._kept[storage]
            self._before_sizes[storage] = size_bytes
        return None

    def _place(self, before: set[StorageWeakRef]) -> Place:
        file, line, modules = "", 0, []
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code is _CALL:
                modules.append(frame.f_locals["self"])
            elif not file and not frame.f_code.co_filename.startswith(_LIBRARIES):
                file, line = frame.f_code.co_filename, frame.f_lineno or 0
            frame = frame.f_back
        for root in reversed(modules):
            paths = self._paths_in(root, before)
            if id(modules[0]) in paths:
                return Place(paths[id(modules[0])] or type(modules[0]).__name__, file, line)
        return Place("", file, line)

    def _paths_in(self, root: nn.Module, before: set[StorageWeakRef]) -> dict[int, str]:
        """The path of each module in ``root``. Its parameters and buffers were there before."""
        if id(root) not in self._paths:
            self._paths[id(root)] = root, {id(module): path for path, module in root.named_modules()}
            for tensor in (*root.parameters(), *root.buffers()):
                before |= _storages_of(tensor)
        return self._paths[id(root)][1]


look_through(KeptStorages._pack)


def storages_alive(activations: bool = True) -> set[StorageWeakRef]:
    """The storages of all tensors that Python's garbage collector knows.

    Args:
        activations: whether to count results of differentiable operations.
    """
    tensors = (one for one in gc.get_objects() if issubclass(type(one), Tensor))
    return {storage for tensor in tensors for storage in _storages_of(tensor, activations)}


def _storages_of(tensor: Tensor, activations: bool = True) -> set[StorageWeakRef]:
    try:
        return set(storage_of(tensor)) if activations or tensor.grad_fn is None else set()
    except Exception:  # a parameter of a lazy layer has no storage yet, and a wrapper of torch.func none to show
        return set()
