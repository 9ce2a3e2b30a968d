"""``offload``: a region whose saved tensors go to the host after its forward, and are back before its backward.

The function runs once, so there is no state to restore and nothing to compare: what comes back are the same bytes.

    forward     pack puts each tensor into a slot. At the end, the storages are known that move
    send        copies of them to the host are queued. All is still here
    release     the slots let go of them. It is called at a boundary, from which on the memory is free
    issue       memory is taken for them, and the copies back are queued
    backward    unpack lets the stream wait for them. If nobody has issued the region, it does: late, never wrong

A slot belongs to the graph node that saved the tensor. What came back is freed with the node in a plain backward, and
kept while the graph is kept. All others hold slots and storages weakly.
"""
from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchckpt.errors import Fault, check
from torchckpt.regions.core.checkpointing import outside, refuse_transforms
from torchckpt.regions.core.hooks import level_of
from torchckpt.regions.core.options import shown
from torchckpt.regions.flags import local
from torchckpt.regions.moved.copies import Bytes, copies_of, goes_from
from torchckpt.regions.moved.order import Order
from torchckpt.regions.moved.slot import MovedSlot, parts_of, parts_that_go, stays
from torchckpt.regions.private import (
    hooks_entered,
    hooks_in_force,
    is_exporting,
    keep_from_dynamo,
    look_through,
    mutation_is_allowed,
    pop_hooks,
    push_hooks,
    storage_key,
    use_count,
)
from torchckpt.regions.state.boundary import Hooks
from torchckpt.tensors import tensors_in
from torchckpt.typing import Function

__all__ = ["LEAST_BYTES", "Moved", "Moving", "least_bytes_faults", "move", "offload"]

LEAST_BYTES = 2**20


class Moving(NamedTuple):
    """The setting of a region that moves."""

    least_bytes: int


_lock = threading.RLock()
"""A backward in one thread may need a region that another thread releases."""


class Moved:
    """One region in one forward. ``forward()`` is called once; then ``send()``, ``release()`` and ``issue()`` at
    boundaries, by the order of the thread or by a schedule. A second call does nothing, nor does one that is too late.
    """

    def __init__(
        self, least_bytes: int = LEAST_BYTES, going: Collection[int] | None = None, is_inner: bool = False
    ) -> None:
        """
        Args:
            going: the numbers of its storages that go, as :attr:`away_numbers` of an equal region. They go even where
                the caller still holds an input or an output, which it does for now. Default: found out.
            is_inner: whether its inputs and outputs stay.
        """
        self._least_bytes, self._going, self._is_inner = least_bytes, going, is_inner
        self._around: Hooks | None = None
        """The hooks around the region, while its forward runs."""
        self._slots: list[MovedSlot] = []
        """Those whose tensors may move, while the forward runs."""
        self._storages: dict[int, weakref.ref[Bytes]] = {}
        """Those that move, by number among all that could."""
        self._saved_on: set[str] = set()
        self._has_returned = self._is_sent = self.is_released = False
        self.has_begun = False
        """Whether its backward has begun. From then on everything stays."""
        local.thread.order = self._order = local.thread.order or Order()

    def forward(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._order.begins(self)
        self._around = hooks_in_force(True)
        push_hooks(self._pack, self._unpack)
        try:
            outputs = function(*args, **kwargs)
        finally:
            pop_hooks()
        with _lock:
            self._find((args, kwargs), outputs)
        self._around, self._has_returned = None, True
        return outputs

    @property
    def away_bytes(self) -> dict[int, int]:
        """By number, the bytes of the storages that are on the host alone. What a later region has saved, too, is of
        that one."""
        storages = ((number, reference()) for number, reference in self._storages.items())
        return {
            number: storage.size
            for number, storage in storages
            if storage is not None and storage.is_away and storage.owner is not None and storage.owner() is self
        }

    def send(self) -> None:
        """Queue the copies to the host of what moves."""
        with _lock:
            if self._is_sent or self.has_begun or not self._has_returned:
                return
            self._is_sent = True
            is_planned = self._going is not None
            unsent = (each for each in self._moving() if each.piece is None)
            here = [each for each in unsent if not _stays(each, each.is_output or is_planned)]
            for copies in dict.fromkeys(storage.copies for storage in here):
                copies.send([storage for storage in here if storage.copies is copies])

    def release(self) -> None:
        """Let go of what moves: its memory on the device is free from here on, in the order of the stream."""
        with _lock:
            self.send()
            if self.is_released or self.has_begun or not self._is_sent:
                return
            self.is_released = True
            for storage in self._moving():
                _release(storage, may_be_held=self._going is not None)

    def issue(self) -> None:
        """Take memory for what is away, and queue the copies back, what was saved last first."""
        with _lock:
            away = list(self._moving())[::-1]
            for copies in dict.fromkeys(storage.copies for storage in away):
                copies.fetch(storage for storage in away if storage.copies is copies)

    def _pack(self, tensor: Tensor) -> MovedSlot:
        self._saved_on.add(tensor.device.type)
        if stays(tensor, self._least_bytes):
            slot = MovedSlot(tensor)
            slot.save_by(self._around, tensor)
        else:
            slot = MovedSlot(tensor, copies_of(tensor.device).current())
            self._slots.append(slot)
        return slot

    def _unpack(self, slot: MovedSlot) -> Tensor:
        if self._has_returned and not self.has_begun:
            self._begin()
        if not slot.storages:
            return slot.unpack()
        with _lock:
            return slot.unpack()

    def _begin(self) -> None:
        """Begin the backward."""
        with _lock:
            self.has_begun = True
            self.issue()
            for storage in self._moving():
                storage.stay()
        self._order.returns(self)

    def _find(self, arguments: Any, outputs: Any) -> None:
        """Find the storages that move."""
        slots, self._slots = self._slots, []
        saved: dict[int | None, list[tuple[MovedSlot, Tensor]]] = {}
        for slot in slots:
            for part in parts_that_go(slot.tensor, self._least_bytes):
                saved.setdefault(storage_key(part), []).append((slot, part))
        inputs, results = _activations(arguments), _activations(outputs)
        stay = inputs | results if self._is_inner else set()
        for number, (key, places) in enumerate(saved.items()):
            if number in self._going if self._going is not None else key not in stay:
                self._add(number, places, key in inputs, key in results)
        for slot in slots:
            if not slot.storages and slot.tensor is not None:
                slot.save_by(self._around, slot.tensor)
        if self._saved_on == {"cpu"} and not goes_from(torch.device("cpu")):
            _say_that_nothing_moves()

    def _add(self, number: int, places: list[tuple[MovedSlot, Tensor]], is_input: bool, is_output: bool) -> None:
        """Have a storage move that the region has saved in ``places``, if it need not stay.

        The caller holds an activation that is an input or an output only for now.
        """
        part = places[0][1]
        copies = copies_of(part.device)
        storage = copies.known(part)
        if storage is None:
            if use_count(part) > len(places) and not (is_input or is_output):
                return
            streams = dict.fromkeys(slot.stream for slot, _ in places if slot.stream is not None)
            storage = copies.bytes_of(part, streams)
        elif _stays(storage, may_be_held=True):
            return
        elif storage.piece is not None and not _is_as_sent(storage, [each for _, each in places]):
            storage.stay()  # and is sent again
        storage.owner, storage.is_output = weakref.ref(self), is_output
        self._storages[number] = weakref.ref(storage)
        for slot, _ in places:
            slot.storages.append(storage)
            storage.slots.append(weakref.ref(slot))

    def _moving(self) -> Iterator[Bytes]:
        for reference in self._storages.values():
            storage = reference()
            if storage is not None and storage.owner is not None and storage.owner() is self:
                yield storage


def _activations(tree: Any) -> set[int | None]:
    """The keys of the storages of tensors that are made of others that require grad."""
    tensors = (tensor for tensor in tensors_in(tree) if tensor.requires_grad and not tensor.is_leaf)
    return {storage_key(part) for tensor in tensors for part in parts_of(tensor)}


def _slots_of(storage: Bytes) -> list[MovedSlot]:
    """Those that hold a tensor there."""
    slots = (reference() for reference in storage.slots)
    return [slot for slot in slots if slot is not None and slot.tensor is not None]


def _stays(storage: Bytes, may_be_held: bool = False) -> bool:
    """Whether somebody has changed it; or holds it, so that nothing would be freed."""
    slots = _slots_of(storage)
    is_held = use_count(storage.memory) > len(slots) + 1
    return storage.is_resized or any(slot.is_changed for slot in slots) or (is_held and not may_be_held)


def _is_as_sent(storage: Bytes, parts: list[Tensor]) -> bool:
    """Whether ``parts`` of it, which are saved after it was sent, surely have not changed since. Those of
    ``torch.unsafe_chunk`` do not count each other's changes."""
    held = (slot.tensor for slot in _slots_of(storage))
    saved = (part for tensor in held if tensor is not None for part in parts_of(tensor))
    known = {(part._version, part.data_ptr()) for part in saved}
    return all(not part._version or (part._version, part.data_ptr()) in known for part in parts)


def _release(storage: Bytes, may_be_held: bool) -> None:
    if storage.piece is None or _stays(storage, may_be_held):
        storage.stay()
        return
    for slot in _slots_of(storage):
        slot.let_go()
    storage.let_go()


@functools.cache
def _say_that_nothing_moves() -> None:
    warnings.warn(
        "torchckpt.offload: there is nothing to move: all that the region saves is on the CPU, which is the host. Its "
        "calls are plain calls",
        stacklevel=5,
    )


def move(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], setting: Moving) -> Any:
    """Run ``function(*args, **kwargs)`` as a region that moves."""
    if is_exporting():
        return function(*args, **kwargs)
    if torch.compiler.is_dynamo_compiling():
        return outside(move, function, args, kwargs, setting)
    if not torch.is_grad_enabled() or local.thread.tracing is not None or mutation_is_allowed():
        return function(*args, **kwargs)
    refuse_transforms()
    if _is_inside_of_a_region():
        return function(*args, **kwargs)
    return Moved(setting.least_bytes).forward(function, args, kwargs)


def _is_inside_of_a_region() -> bool:
    """Whether a region around the call does with what is saved as it wants, or a replay saves it."""
    stack = hooks_entered()
    level = level_of(stack)
    is_in_moved = any(isinstance(getattr(unpack, "__self__", None), Moved) for _, unpack in stack)
    return is_in_moved or bool(level.recording) or level.replayed is not None


def least_bytes_faults(least_bytes: object) -> Iterator[Fault]:
    if isinstance(least_bytes, bool) or not isinstance(least_bytes, int) or least_bytes < 0:
        yield Fault("min_bytes is not a whole number of bytes", f"min_bytes={shown(least_bytes)}", "min_bytes=2**20")


def offload(function: Function, /, *args: Any, min_bytes: int = LEAST_BYTES, **kwargs: Any) -> Any:
    """Run ``function(*args, **kwargs)``, and have what autograd saves of it on the host until its backward.

    Nothing is run again. Outputs and gradients are equal to the bit to those of the plain call, with dropout, double
    backward, ``torch.autograd.grad`` and all else in autograd. Copies run on two streams beside the computation.

    >>> block = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1))
    >>> y = torchckpt.offload(block, torch.randn(4, 8, device="cuda"))
    >>> y.sum().backward()

    Memory is free when the next region but one begins, and is taken again when the backward of the region after it
    begins: two regions are on the device at a time, beside what stays. That is parameters and buffers, views of them,
    what autocast and FSDP make of them, leaves that require grad, what others hold (a mask, a hidden state in a list),
    sparse and quantized tensors, those on the CPU, and storages below ``min_bytes``.

    Args:
        function: any callable. It may close over tensors, which stay.
        *args, **kwargs: its arguments, as it takes them.
        min_bytes: storages with fewer bytes stay. Default: 1 MiB.

    Returns:
        What ``function`` returns. It is the plain call under ``no_grad`` and ``inference_mode``, in other regions (a
        checkpointed one saves nothing), while ``graph`` traces, and on the CPU, where there is nothing to move.

    Raises:
        ArgumentError: ``function`` is not callable, or ``min_bytes`` is no number of bytes.
        CheckpointError: there is no pinned memory for the copies.
        TransformError: under ``vmap``, ``jvp`` or ``torch.func.grad``.
        RecomputationError: at backward, when a saved tensor was changed in place, or its storage resized, too early.

    Saved tensors went to the host by hooks first in :func:`torch.autograd.graph.save_on_cpu`.
    """
    faults = list(least_bytes_faults(min_bytes))
    if not callable(function):
        works = "offload(block, x), not offload(block(x))"
        faults.append(Fault("the function is not callable", shown(function), works))
    check(faults, "offload")
    return move(function, args, kwargs, Moving(min_bytes))


keep_from_dynamo(move, offload, Moved._pack, Moved._unpack)
look_through(Moved._pack)
