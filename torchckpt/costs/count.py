"""Count: one stage run with tensors that have no memory: a forward, and two backwards.

    forward                    backward for inputs           backward for inputs and parameters
    [1] parts start and end;   [3] the number of a node      [4] the same; its excess
        each has the storages      tells the part that           over [3] is the
        that it saves              made it                       weight gradient
    [2] for each part, what has run when it saves its last tensor: a replay ends there

The parts are the blocks, and what runs before and after them. A block is an outermost region (``checkpoint``,
``checkpoint_module``, ``Checkpointing``). In a model without regions, blocks are children of ``nn.Sequential``,
``nn.ModuleList`` and ``nn.ModuleDict`` whose class occurs more than once among such children of all stages. A child
that is a container, too, is a block only if its own children have different classes, such as a convolution, a norm and
an activation. Otherwise its children may be blocks. Blocks do not nest.
"""
from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from torchckpt.costs.collective import Collective
from torchckpt.costs.operation import AFTER, BEFORE, BOTH_GRADS, FORWARD, INPUT_GRAD, REPLAY, Ledger, storages_in
from torchckpt.costs.repeat import Repeats
from torchckpt.modules import module_of
from torchckpt.planning.work.block import Block
from torchckpt.regions.core.frame import Frame
from torchckpt.regions.core.options import Options
from torchckpt.regions.core.scope import Scope
from torchckpt.regions.private import newest_node, number_of
from torchckpt.regions.saved import storage_of
from torchckpt.tensors import inner_tensors, nodes_behind, tensors_in
from torchckpt.typing import Function

__all__ = ["Counted", "Part", "RegionSeen", "counted", "repeated_children", "static_of"]


@dataclass(frozen=True)
class Part:
    """What was counted for a part of a stage: a block, or operations outside of blocks."""

    work: Block
    """Its seconds and bytes. A replay has the operations of the forward up to the last tensor that it saves."""
    forward_flops: int
    backward_flops: int
    replay_flops: int
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
    gathered_bytes: int = 0
    """The most that FSDP2 has gathered of parameters at once, with the buffers that it gathers into."""

    @property
    def parts(self) -> tuple[Part, ...]:
        return (self.before, *self.blocks, self.after)


class _Forward:
    """Data about a stage, collected during its forward."""

    def __init__(self, ledger: Ledger, static: Mapping[StorageWeakRef, float]) -> None:
        self.ledger = ledger
        self.repeats = Repeats()
        self.inputs: list[Tensor] = []  # inputs of blocks that need a gradient
        self.changing: set[int] = set()  # blocks that change what they are given
        self.boundaries: list[set[StorageWeakRef]] = []  # the inputs of each block
        self._saved: defaultdict[int, set[StorageWeakRef]] = defaultdict(set)  # by part
        self._static = static
        self._sizes: dict[StorageWeakRef, int] = {}
        self._versions: list[tuple[Tensor, int]] = []
        self._starts: list[tuple[int, int]] = [(-1, BEFORE)]  # the number of a node, and the part from there on

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = tensors_in((args, kwargs))
        self.inputs += [tensor for tensor in tensors if tensor.requires_grad and not isinstance(tensor, nn.Parameter)]
        self._versions = [(tensor, tensor._version) for tensor in tensors]
        self._turn(len(self.boundaries))
        self.boundaries.append({storage for tensor in tensors for storage in self._met(tensor)})

    def leave(self) -> None:
        if any(tensor._version != version for tensor, version in self._versions):
            self.changing.add(self.ledger.part)
        self._turn(AFTER)

    def run(self, function: Function, *args: Any, **kwargs: Any) -> Any:
        """Call a block that was entered, unless another stands for it."""
        part, module = self.ledger.part, module_of(function)
        outputs = self.repeats.run(part, function, args, kwargs, self._stands)
        if part in self.repeats.like and module is not None:
            for storage in storages_in([*module.parameters(), *module.buffers()]):
                self.ledger.use(storage)
        return outputs

    def _stands(self, part: int, outputs: Any) -> bool:
        """Whether a block can stand for others: nobody else holds what it returned, and it left its inputs alone."""
        held = self._saved[part] | self.boundaries[part] | self._static.keys()
        return part not in self.changing and held.isdisjoint(storages_in(outputs))

    def pack(self, tensor: Tensor) -> Tensor:
        self._saved[self.ledger.part].update(self._met(tensor))
        self.ledger.saved()
        return tensor if tensor.is_leaf else tensor.detach()

    def part_of(self, node: Node) -> int:
        place = bisect_right(self._starts, number_of(node), key=lambda start: start[0])
        return self._starts[place - 1][1]

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
            inner, boundary = saved[block] - always - times.keys(), inputs - always
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

    def _turn(self, part: int) -> None:
        self._starts.append((newest_node() + 1, part))
        self.ledger.part = part


def counted(
    stage: nn.Module,
    call: Callable[[], Any],
    inputs: Any,
    ledger: Ledger,
    children: Sequence[nn.Module] | None,
    optimizer_bytes: float | None,
) -> tuple[Counted, Any]:
    """Run ``call``, the forward of ``stage`` on ``inputs``, and its backwards. Returns the counts and the outputs.

    Args:
        ledger: a new one, of the same kind for each stage.
        children: the modules whose calls are blocks; None where regions are.
        optimizer_bytes: see :func:`~torchckpt.costs.count.static_of`.
    """
    ledger.watched = static_of(stage, optimizer_bytes)
    forward = _Forward(ledger, ledger.watched)
    parameters = [parameter for parameter in stage.parameters() if parameter.requires_grad]
    with ledger:
        blocks_watched = _watched(forward.enter, forward.leave, forward.run, children)
        with saved_tensors_hooks(forward.pack, lambda tensor: tensor), blocks_watched, _phase(ledger, FORWARD):
            outputs = call()
        graded = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
        leaves = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
        for node in nodes_behind(graded):
            node.register_prehook(_turning(ledger, forward.part_of(node)))
        gradients = [torch.ones_like(output) for output in graded]
        if graded:
            with _phase(ledger, BOTH_GRADS):  # FSDP2 reduces what it finds in .grad
                torch.autograd.backward(graded, gradients, retain_graph=True)
        if graded and (inner := [*leaves, *forward.inputs]):
            with _phase(ledger, INPUT_GRAD):
                torch.autograd.grad(graded, inner, gradients, allow_unused=True)
        static = static_of(stage, optimizer_bytes)  # the first forward of FSDP2 pads weights, the backward gradients
        ledger.step(parameters)
    for tensor in (*parameters, *leaves):
        tensor.grad = None
    before, after, *blocks = _parts(forward, static)
    shares = [share for tensor in tensors_in(inputs) for share in inner_tensors(tensor)]
    message = sum(share.nbytes for share in shares if share.is_floating_point())
    elements = sum(map(_elements, parameters))
    return Counted(before, tuple(blocks), after, message, elements, ledger.gathered_bytes), outputs


def _parts(forward: _Forward, static: Mapping[StorageWeakRef, float]) -> Iterable[Part]:
    """What is before the blocks, what is after them, and the blocks."""
    ledger, amounts = forward.ledger, forward.bytes_of_parts()
    static_bytes: defaultdict[int, float] = defaultdict(float)
    for storage, size in static.items():
        static_bytes[ledger.users.get(storage, BEFORE)] += size
    parts: dict[int, Part] = {}
    for part in (BEFORE, AFTER, *range(len(forward.boundaries))):
        if part in forward.repeats.like:
            parts[part] = parts[forward.repeats.like[part]]
            continue
        phases = FORWARD, INPUT_GRAD, BOTH_GRADS, REPLAY
        ahead, inner, both, replay = (max(ledger.seconds[phase, part], ledger.beside[phase, part]) for phase in phases)
        forward_flops, _, backward_flops, replay_flops = (ledger.flops[phase, part] for phase in phases)
        saved, boundary, unsaved = amounts[part]
        work = Block(ahead, inner, max(0.0, both - inner), replay, saved, boundary, static_bytes[part])
        flops, changes_input = (forward_flops, backward_flops, replay_flops), part in forward.changing
        parts[part] = Part(work, *flops, unsaved, changes_input, ledger.collectives(part))
    return parts.values()


def _turning(ledger: Ledger, part: int) -> Callable[[Any], None]:
    """A hook that notes, before a node runs backwards, the part in which it was made."""

    def turn(_: Any) -> None:
        ledger.part = part

    return turn


@contextmanager
def _phase(ledger: Ledger, phase: str) -> Iterator[None]:
    ledger.phase, ledger.part = phase, BEFORE
    try:
        yield
    finally:
        ledger.phase = None


_Enter: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any]], None]
_Run: TypeAlias = Callable[..., Any]
"""Calls its first argument, a block, with the others."""

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class RegionSeen(Exception):
    """Raised at the first region where blocks are children: the blocks of all stages are regions then."""


class _Regions(Scope):
    """The scope of all regions of a stage. It tells when outermost ones start and end, and each keeps what it saves."""

    def __init__(self, enter: _Enter, leave: Callable[[], None], run: _Run) -> None:
        super().__init__(keep=True)
        self._enter, self._leave, self._run = enter, leave, run
        self._depth = 0

    def run(
        self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
    ) -> tuple[Any, Frame | None]:
        if self._depth:
            return super().run(function, args, kwargs, options)
        self._enter(args, kwargs)
        self._depth += 1
        outputs = super().run(partial(self._run, function), args, kwargs, options)
        self._depth -= 1
        self._leave()
        return outputs


def _seen(*_: Any) -> None:
    raise RegionSeen


@contextmanager
def _watched(
    enter: _Enter, leave: Callable[[], None], run: _Run, children: Sequence[nn.Module] | None
) -> Iterator[None]:
    """Inside this context, ``enter`` and ``leave`` are called around each block, and ``run`` in its place: each
    outermost region, or each call of ``children``."""
    with ExitStack() as stack:
        stack.enter_context(_Regions(enter if children is None else _seen, leave, run).entered())
        for child in children or ():
            entering = child.register_forward_pre_hook(
                lambda _, args, kwargs: enter(args, kwargs), with_kwargs=True, prepend=True
            )
            leaving = child.register_forward_hook(lambda *_: leave())
            stack.callback(entering.remove)
            stack.callback(leaving.remove)
            if "forward" not in vars(child):
                child.forward = partial(run, child.forward)
                stack.callback(vars(child).pop, "forward")
        yield


def repeated_children(stages: Sequence[nn.Module]) -> list[nn.Module]:
    """The children of containers whose class occurs more than once among such children."""
    repeated: list[nn.Module] = []
    level: list[nn.Module] = list(stages)
    while level:
        children = [child for module in level for child in _in_containers(module)]
        counts = Counter(map(type, children))
        repeated += [child for child in children if counts[type(child)] > 1]
        level = [child for child in children if counts[type(child)] == 1]
    return list(dict.fromkeys(repeated))


def _in_containers(module: nn.Module) -> Iterator[nn.Module]:
    """The children of the outermost containers in ``module``, which may be one itself. A uniform container among these
    children is replaced by its own."""
    for child in module.children():
        if not isinstance(module, _CONTAINERS) or _is_uniform(child):
            yield from _in_containers(child)
        else:
            yield child


def _is_uniform(module: nn.Module) -> bool:
    kinds = list(map(type, module.children()))
    return isinstance(module, _CONTAINERS) and len(set(kinds)) < len(kinds)


_MASTER_BYTES, _MOMENTS_BYTES = 4, 8
"""Bytes of Adam's state in mixed precision: a float32 copy of a smaller parameter, and two float32 moments."""


def static_of(stage: nn.Module, optimizer_bytes: float | None = None) -> dict[StorageWeakRef, float]:
    """The bytes of weights, gradients and optimizer state, by the storage of the parameter or buffer.

    A gradient has the dtype of its parameter. A frozen parameter has no gradient and no optimizer state.

    >>> sum(static_of(nn.Linear(5, 1, bias=False, dtype=torch.bfloat16)).values())
    80

    Args:
        optimizer_bytes: state of each trained element. Default: Adam's, 12 for one of two bytes, 8 for one of four.
    """
    sizes: dict[StorageWeakRef, float] = {}
    gradients: set[StorageWeakRef] = set()
    for tensor in (*stage.parameters(), *stage.buffers()):
        state_bytes: float = _MOMENTS_BYTES + (_MASTER_BYTES if tensor.element_size() < 4 else 0)
        if optimizer_bytes is not None:
            state_bytes = optimizer_bytes
        added_bytes = 0.0
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
            added_bytes = _elements(tensor) * state_bytes + _gradient_bytes(tensor, gradients)
        for storage, size in storage_of(tensor).items():
            sizes[storage] = sizes.get(storage, size) + added_bytes  # several may be views of one storage
    return sizes


def _elements(tensor: Tensor) -> int:
    return sum(share.numel() for share in inner_tensors(tensor))


def _gradient_bytes(parameter: nn.Parameter, counted: set[StorageWeakRef]) -> int:
    """The bytes of the gradient, or of one of its dtype, without storages that were ``counted`` with another one's.
    FSDP2 reduces the gradients of a module into one storage."""
    if parameter.grad is None:
        return _elements(parameter) * parameter.element_size()
    sizes = {storage: size for storage, size in storage_of(parameter.grad).items() if storage not in counted}
    counted.update(sizes)
    return sum(sizes.values())
