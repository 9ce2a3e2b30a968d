"""Count: one stage run with tensors that have no memory: a forward, and two backwards.

    forward                    backward for inputs           backward for inputs and parameters
    [1] parts start and end;   [3] the number of a node      [4] the same; its excess
        each has the storages      tells the part that           over [3] is the
        that it saves              made it                       weight gradient
    [2] for each part, what has run when it saves its last tensor: a replay ends there
"""
from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from torchckpt.costs.mesh import sharded_over
from torchckpt.costs.operation import AFTER, BEFORE, BOTH_GRADS, FORWARD, INPUT_GRAD, REPLAY, Ledger
from torchckpt.costs.parts import Parts
from torchckpt.modules import imported
from torchckpt.planning.work.block import Block, Collective
from torchckpt.regions.saved import storage_of, telling_of_saved
from torchckpt.tensors import inner_tensors, nodes_behind, tensors_in
from torchckpt.typing import Function

__all__ = ["Counted", "Part", "Static", "counted", "static_of"]


@dataclass(frozen=True)
class Part:
    """What was counted for a part of a stage: a block, or operations outside of blocks."""

    work: Block
    """Its seconds and bytes. A replay has the operations of the forward up to the last tensor that it saves."""
    forward_flops: int
    backward_flops: int
    replay_flops: int
    forward_moved_bytes: int
    backward_moved_bytes: int
    replay_moved_bytes: int
    """What operators read and write of the device's memory."""
    unsaved_bytes: int = 0
    """Bytes of the boundary that a kept block does not save: half-precision inputs of which it saves copies in float32.
    If the block is recomputed before its gradient arrives, they are in memory beside its saved bytes."""
    changes_input: bool = False
    """Whether it changes an input in place. Then it cannot run again."""
    collectives: tuple[Collective, ...] = ()
    """What it tells other ranks, and hears of them; in a :func:`~torchckpt.costs.fake_mesh` alone."""


@dataclass(frozen=True)
class Counted:
    """What was counted for one stage, which never ran on its device."""

    before: Part
    blocks: tuple[Part, ...]
    after: Part
    message_bytes: int
    """The bytes of the floating-point tensors that the stage is called with."""
    parameters: int
    """The elements of its trained parameters, or of this rank's shares of them."""
    static: Static
    """What its parameters and buffers take."""
    sharded: Mapping[str, Static]
    """The same, by the dimensions of the mesh that a DTensor is sharded over, such as ``dp_tp``; empty: none."""
    gathered_bytes: int = 0
    """The most that FSDP2 has gathered of parameters at once, with the buffers that it gathers into."""

    @property
    def parts(self) -> tuple[Part, ...]:
        return (self.before, *self.blocks, self.after)


class _Forward(Parts):
    """Data about a stage, collected during its forward."""

    def __init__(self, ledger: Ledger, static: Set[StorageWeakRef]) -> None:
        super().__init__()
        self.ledger = ledger
        self.changing: set[int] = set()  # blocks that change what they are given
        self.boundaries: list[set[StorageWeakRef]] = []  # the inputs of each block
        self._saved: defaultdict[int, set[StorageWeakRef]] = defaultdict(set)  # by part
        self._kept: defaultdict[int, set[StorageWeakRef]] = defaultdict(set)  # likewise, if it is recomputed, too
        self._static = static
        self._sizes: dict[StorageWeakRef, int] = {}
        self._versions: list[tuple[Tensor, int]] = []

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().enter(args, kwargs)
        tensors = tensors_in((args, kwargs))
        self._versions = [(tensor, tensor._version) for tensor in tensors]
        self.boundaries.append({storage for tensor in tensors for storage in self._met(tensor)})

    def leave(self) -> None:
        if any(tensor._version != version for tensor, version in self._versions):
            self.changing.add(self.ledger.part)
        super().leave()

    def begins(self, part: int) -> None:
        super().begins(part)
        self.ledger.part = part

    def reaches(self, part: int, *_: object) -> None:
        self.ledger.part = part

    def keep_result(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        was_keeping, self.ledger.is_keeping = self.ledger.is_keeping, True
        try:
            outputs = function(*args, **kwargs)
        finally:
            self.ledger.is_keeping = was_keeping
        self._kept[self.ledger.part].update(key for tensor in tensors_in(outputs) for key in self._met(tensor))
        return outputs

    def saves(self, tensor: Tensor) -> None:
        """Autograd saves a tensor."""
        storages = self._met(tensor)
        self._saved[self.ledger.part].update(storages)
        if self.ledger.is_keeping:
            self._kept[self.ledger.part].update(storages)
        else:
            self.ledger.saved()

    def bytes_of_parts(self) -> dict[int, tuple[int, int, int]]:
        """The bytes of each part: saved, of its boundary, and of the boundary if it is kept and does not save them.
        Operations outside of blocks have no boundary."""
        makers, saved = self.ledger.makers, self._saved
        times = Counter(storage for inputs in self.boundaries for storage in inputs)
        before, after = set(saved[BEFORE]), set(saved[AFTER])
        before |= {storage for storage, count in times.items() if count > 1}
        for block in range(len(self.boundaries)):
            before |= {key for key in saved[block] if makers.get(key, BEFORE) != block} - times.keys()
        after -= before
        always, anywhere = before | after, set().union(*saved.values())
        amounts = {BEFORE: (self._bytes(before), 0, 0), AFTER: (self._bytes(after), 0, 0)}
        for block, inputs in enumerate(self.boundaries):
            inner = saved[block] - always - times.keys()
            boundary = (inputs | self._kept[block] - times.keys()) - always
            unsaved = boundary - anywhere
            kept = inner | boundary - unsaved
            amounts[block] = self._bytes(kept), self._bytes(boundary), self._bytes(unsaved)
        return amounts

    def _bytes(self, storages: Iterable[StorageWeakRef]) -> int:
        return sum(map(self._sizes.__getitem__, storages))

    def _met(self, tensor: Tensor) -> Iterable[StorageWeakRef]:
        apart = self._static, self.ledger.gathered
        sizes = {key: size for key, size in storage_of(tensor).items() if not any(key in keys for keys in apart)}
        self._sizes.update(sizes)
        return sizes


def counted(
    stage: nn.Module, call: Callable[[], Any], inputs: Any, children: Sequence[nn.Module] | None,
    ledger_of: Callable[[], Ledger], optimizer_bytes: float | None,
) -> tuple[Counted, Any]:
    """Run ``call``, the forward of ``stage`` on ``inputs``, and its backwards. Returns the counts and the outputs.

    Args:
        children: the modules whose calls are blocks; None where regions are.
        ledger_of: makes the ledger of a stage.
        optimizer_bytes: see :func:`~torchckpt.costs.count.static_of`.
    """
    ledger = ledger_of()
    ledger.watched = storages = static_of(stage, optimizer_bytes).keys()
    forward = _Forward(ledger, storages)
    parameters = [parameter for parameter in stage.parameters() if parameter.requires_grad]
    with ledger:
        with telling_of_saved(forward.saves), forward.watched(children), _phase(ledger, FORWARD):
            outputs = call()
        graded = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
        leaves = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
        forward.follow(nodes_behind(graded))
        gradients = [torch.ones_like(output) for output in graded]
        if graded:
            with _phase(ledger, BOTH_GRADS):  # FSDP2 reduces what it finds in .grad
                torch.autograd.backward(graded, gradients, retain_graph=True)
        if graded and (inner := [*leaves, *forward.inputs]):
            with _phase(ledger, INPUT_GRAD):
                torch.autograd.grad(graded, inner, gradients, allow_unused=True)
        _reshard(stage)
        static = static_of(stage, optimizer_bytes)  # the first forward of FSDP2 pads weights, the backward gradients
        ledger.step(parameters)
    for tensor in (*parameters, *leaves):
        tensor.grad = None
    before, after, *blocks = _parts(forward, static)
    shares = [share for tensor in tensors_in(inputs) for share in inner_tensors(tensor)]
    message = sum(share.nbytes for share in shares if share.is_floating_point())
    elements = sum(map(_elements, parameters))
    sharded = _by_dimensions(stage, static)
    holds = _sum(sharded.values())
    return Counted(before, tuple(blocks), after, message, elements, holds, sharded, ledger.gathered_bytes), outputs


def _reshard(stage: nn.Module) -> None:
    """Have shares in place of parameters that FSDP2 has left whole: without a backward, or as its user says. The whole
    ones count as gathered."""
    for module in stage.modules():
        if isinstance(module, imported("torch.distributed.fsdp", "FSDPModule")):
            module.reshard()


def _parts(forward: _Forward, static: Mapping[StorageWeakRef, Static]) -> Iterable[Part]:
    """What is before the blocks, what is after them, and the blocks."""
    ledger, amounts = forward.ledger, forward.bytes_of_parts()
    static_bytes: defaultdict[int, float] = defaultdict(float)
    for storage, size in static.items():
        static_bytes[ledger.users.get(storage, BEFORE)] += sum(size)
    parts: dict[int, Part] = {}
    for part in (BEFORE, AFTER, *range(len(forward.boundaries))):
        phases = FORWARD, INPUT_GRAD, BOTH_GRADS, REPLAY
        ahead, inner, both, replay = (ledger.done(phase, part) for phase in phases)
        saved, boundary, unsaved = amounts[part]
        seconds = ahead.seconds, inner.seconds, max(0.0, both.seconds - inner.seconds), replay.seconds
        work = Block(*seconds, saved, boundary, static_bytes[part])
        flops = ahead.flops, both.flops, replay.flops
        moved = ahead.moved_bytes, both.moved_bytes, replay.moved_bytes
        told = ledger.collectives(part)
        parts[part] = Part(work, *flops, *moved, unsaved, part in forward.changing, told)
    return parts.values()


@contextmanager
def _phase(ledger: Ledger, phase: str) -> Iterator[None]:
    ledger.phase, ledger.part = phase, BEFORE
    try:
        yield
    finally:
        ledger.phase = None


class Static(NamedTuple):
    """Bytes that are there at any time."""

    weights: float = 0
    """Of parameters and buffers."""
    gradients: float = 0
    optimizer: float = 0


_FLOAT32_BYTES = 4
"""Of a number of Adam's state: a copy of a smaller parameter, and two moments, which have the dtype of a larger one."""


def static_of(stage: nn.Module, optimizer_bytes: float | None = None) -> dict[StorageWeakRef, Static]:
    """The bytes of weights, gradients and optimizer state, by the storage of the parameter or buffer.

    A gradient has the dtype of its parameter. A frozen parameter has no gradient and no optimizer state.

    >>> list(static_of(nn.Linear(5, 1, bias=False, dtype=torch.bfloat16)).values())
    [Static(weights=10, gradients=10, optimizer=60)]

    Args:
        optimizer_bytes: state of a trained element. Default: Adam's, 12 for one of two bytes, 8 of four, 16 of eight.
    """
    sizes: dict[StorageWeakRef, Static] = {}
    gradients = _gradient_bytes(parameter for parameter in stage.parameters() if parameter.requires_grad)
    for tensor in (*stage.parameters(), *stage.buffers()):
        state_bytes: float = 3 * _FLOAT32_BYTES if tensor.element_size() < _FLOAT32_BYTES else 2 * tensor.element_size()
        if optimizer_bytes is not None:
            state_bytes = optimizer_bytes
        state = _elements(tensor) * state_bytes if tensor in gradients else 0.0
        gradient = gradients.get(tensor, 0)
        for storage, size in storage_of(tensor).items():  # several may be views of one storage
            there = sizes.get(storage, Static(size))
            sizes[storage] = Static(there.weights, there.gradients + gradient, there.optimizer + state)
    return sizes


def _by_dimensions(stage: nn.Module, static: Mapping[StorageWeakRef, Static]) -> dict[str, Static]:
    """What is sharded over which dimensions of the mesh."""
    tensors = (*stage.parameters(), *stage.buffers())
    over = {storage: sharded_over(tensor) for tensor in tensors for storage in storage_of(tensor)}
    names = sorted(set(over.values()))
    return {name: _sum(size for storage, size in static.items() if over[storage] == name) for name in names}


def _sum(sizes: Iterable[Static]) -> Static:
    return Static(*map(sum, zip(Static(), *sizes)))


def _elements(tensor: Tensor) -> int:
    return sum(share.numel() for share in inner_tensors(tensor))


def _gradient_bytes(parameters: Iterable[nn.Parameter]) -> dict[Tensor, int]:
    """The bytes of each gradient, or of one of its parameter's dtype. FSDP2 reduces the gradients of a module into one
    storage, whose padding is of the first."""
    sizes: dict[Tensor, int] = {}
    left: dict[StorageWeakRef, int] = {}
    firsts: dict[StorageWeakRef, Tensor] = {}
    for parameter in parameters:
        gradient = parameter.grad
        sizes[parameter] = _elements(parameter) * parameter.element_size() if gradient is None else 0
        for share in [] if gradient is None else inner_tensors(gradient):
            for storage, size in storage_of(share).items():
                firsts.setdefault(storage, parameter)
                taken = min(share.nbytes, left.setdefault(storage, size))
                sizes[parameter] += taken
                left[storage] -= taken
    for storage, rest in left.items():
        sizes[firsts[storage]] += rest
    return sizes
