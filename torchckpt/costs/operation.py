"""Operation: FLOPs and moved bytes of operator calls, counted from their shapes, by part of a stage and by phase.

Their pace is the seconds that they take on a device that is not there. By kind and size, where it is known what a
device reaches of its peaks (:mod:`torchckpt.planning.rates`): products in whole tiles, kernels of attention, what is
bound by memory, and the host that starts each kernel. Otherwise the larger of what an operator computes, at one share
of the peak, and what it moves.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import add
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from torchckpt.costs.private import TorchDispatchMode, fused_attention, is_view
from torchckpt.planning.device import Device
from torchckpt.planning.rates import RATES, Machine, Product
from torchckpt.planning.work.block import Collective
from torchckpt.regions.saved import storage_of
from torchckpt.tensors import flop_formula, tensors_in

__all__ = [
    "AFTER", "AGAIN", "BEFORE", "BOTH_GRADS", "FORWARD", "INPUT_GRAD", "KERNELS", "REPLAY", "Done", "Ledger",
    "Pace", "kernels_of", "pace_of", "storages_in", "work_of",
]


class Work(NamedTuple):
    """What an operator call does."""

    flops: int
    moved_bytes: int
    dtype: str
    """That it computes with, such as ``"bfloat16"``."""


class Pace(Protocol):
    @property
    def efficiency(self) -> float | None:
        """The share of the peak that stands for all operations, if one does."""

    def call(self, work: Work, operator: Any, args: Any, kwargs: Any) -> float:
        """Seconds of an operator call."""

    def part(self, seconds: float, kernels: int, beside: float) -> float:
        """Seconds of a part of a stage, whose operators take ``seconds`` in so many kernels; ``beside`` them run
        collectives."""


def pace_of(device: Device, efficiency: float | None, default: float) -> Pace:
    """By one share of the peak if it is given; ``default`` is that of devices of which no more is known."""
    if efficiency is None and device.name in RATES:
        return _ByKind(Machine(device, RATES[device.name]))
    return _ByShare(device, efficiency or default)


@dataclass(frozen=True)
class _ByShare:
    device: Device
    efficiency: float

    def call(self, work: Work, operator: Any, args: Any, kwargs: Any) -> float:
        return self.device.seconds(*work, self.efficiency)

    def part(self, seconds: float, kernels: int, beside: float) -> float:
        return max(seconds, beside)


_PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1}
"""Matrix products: the place of their first factor."""


@dataclass(frozen=True)
class _ByKind:
    machine: Machine
    efficiency: None = None

    def call(self, work: Work, operator: Any, args: Any, kwargs: Any) -> float:
        flops, moved_bytes, dtype = work
        name = operator.overloadpacket.__name__
        if not moved_bytes:
            return 0.0
        if flops and name in _PRODUCTS:
            first, second = args[_PRODUCTS[name] :][:2]
            product = Product(first.shape[-2], second.shape[-1], first.shape[-1], *first.shape[:-2])
            return self.machine.product(product, dtype, moved_bytes)
        if flops and name.startswith("_scaled_dot_product"):
            least = self.machine.operation(0, moved_bytes, dtype)
            return max(least, self._attention(flops, dtype, operator, args, kwargs))
        return self.machine.operation(flops, moved_bytes, dtype)

    def _attention(self, flops: int, dtype: str, operator: Any, args: Any, kwargs: Any) -> float:
        """That of torch is FlashAttention 2. Counted FLOPs have the scores that a causal mask leaves out."""
        given = {**dict(zip((argument.name for argument in operator._schema.arguments), args)), **kwargs}
        is_backward = operator.overloadpacket.__name__.endswith("_backward")
        forward = flops / (2.5 if is_backward else 1) / (2 if given.get("is_causal") else 1)
        longer = max(given["query"].shape[-2], given["key"].shape[-2])
        return self.machine.attention(forward, "flash2", longer, dtype)[is_backward]

    def part(self, seconds: float, kernels: int, beside: float) -> float:
        return self.machine.overlapped(self.machine.beside_host(seconds, kernels), beside)


def work_of(operator: Any, args: Any, kwargs: Any, outputs: Any) -> Work:
    """The FLOPs and moved bytes of one call, and the dtype it computes with.

    Torch's counter has the FLOPs of products and convolutions; other operators count none. Every tensor is read or
    written once; a view moves nothing.
    """
    name, read = operator.overloadpacket, tensors_in((args, {**kwargs, "out": None}))
    written = tensors_in(outputs) or tensors_in(kwargs.get("out"))
    moved_bytes = 0 if is_view(operator) or str(name) in _IDLE else sum(map(_bytes, written))
    if moved_bytes:
        moved_bytes += min(sum(map(_bytes, read)), 2 * moved_bytes if str(name) in _PICKS else _EVERYTHING)
    count = flop_formula(name)
    flops = 0 if count is None else int(count(*args, **kwargs, out_val=outputs))
    dtype = next((tensor.dtype for tensor in [*read, *written] if tensor.is_floating_point()), torch.float32)
    return Work(flops, moved_bytes, str(dtype).removeprefix("torch."))


_EVERYTHING = 1 << 62
_IDLE = {f"aten.{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")}
_PICKS = {f"aten.{name}" for name in ("embedding", "gather", "index", "index_select")}
"""Operators that read only as many bytes of a table as they return."""


def _bytes(tensor: Tensor) -> int:
    """The bytes that are moved. An expanded tensor counts as its storage."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


FORWARD, INPUT_GRAD, BOTH_GRADS, REPLAY = "forward", "input_grad", "both_grads", "replay"
AGAIN = "again"
"""What of a forward a replay runs again, if it goes as far."""
BEFORE, AFTER = -1, -2
"""Part numbers of operations outside of blocks: before the first block, and after it. Blocks count from 0."""


class Done(NamedTuple):
    """What ran."""

    seconds: float = 0.0
    kernels: int = 0
    flops: int = 0
    moved_bytes: int = 0


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Counts while it is entered and has a ``phase``.

    It has to be entered inside the mode whose tensors have no memory, so that it sees an operation first.
    """

    def __init__(self, pace: Pace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._pace = pace
        self.watched: Set[StorageWeakRef] = frozenset()
        """Storages of parameters and buffers."""
        self.gathered: set[StorageWeakRef] = set()
        self.gathered_bytes = 0
        """Storages of parameters that were gathered for a while, and the most that they took at once."""
        self._seconds_beside: defaultdict[tuple[str, int], float] = defaultdict(float)
        """The seconds of what runs beside the operators of each phase and part."""
        self.phase: str | None = None
        self.part = BEFORE
        self.is_keeping = False
        """Whether what runs in the forward is kept, so that no replay runs it."""
        self._done: defaultdict[tuple[str, int], Done] = defaultdict(Done)
        self.makers: dict[StorageWeakRef, int] = {}
        """The part in which a storage was made."""
        self.users: dict[StorageWeakRef, int] = {}
        """The part that read each storage: the first one that is not before the blocks, where FSDP2 pads all shares."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outputs = operator(*args, **kwargs)
        if self.phase is not None:
            work = work_of(operator, args, kwargs, outputs)
            seconds = self._pace.call(work, operator, args, kwargs)
            self.add(Done(seconds, int(work.moved_bytes > 0), work.flops, work.moved_bytes))
        if self.phase == FORWARD:
            self._look((args, kwargs), outputs)
        return outputs

    @property
    def phases(self) -> list[str]:
        """Those for which what runs now counts."""
        again = [AGAIN] if self.phase == FORWARD and not self.is_keeping else []
        return again if self.phase is None else [self.phase, *again]

    def add(self, done: Done) -> None:
        """Count what runs now."""
        for phase in self.phases:
            self._done[phase, self.part] = Done(*map(add, self._done[phase, self.part], done))

    def done(self, phase: str, part: int) -> Done:
        """What a phase does in a part; its seconds are those of the whole, with all that runs beside its operators."""
        done = self._done[phase, part]
        return done._replace(seconds=self._pace.part(done.seconds, done.kernels, self._seconds_beside[phase, part]))

    def saved(self) -> None:
        """Note that the part saved a tensor: a replay goes at least so far."""
        self._done[REPLAY, self.part] = self._done[AGAIN, self.part]

    def use(self, storage: StorageWeakRef) -> None:
        """Note that the part reads a storage."""
        if self.users.get(storage, BEFORE) == BEFORE:
            self.users[storage] = self.part

    def collectives(self, part: int) -> tuple[Collective, ...]:
        """Those of a part, each kind once with its count."""
        return ()

    def step(self, parameters: Iterable[nn.Parameter]) -> None:
        """Count what an optimizer communicates, whose gradients are there."""

    def _look(self, read: Any, written: Any) -> None:
        for storage in storages_in(read):
            self.use(storage)
            if storage not in self.watched:
                self.makers.setdefault(storage, BEFORE)  # it was made before the stage
        for storage in storages_in(written):
            self.makers.setdefault(storage, self.part)


def storages_in(tree: Any) -> Iterator[StorageWeakRef]:
    """The storages of the tensors in ``tree``."""
    return (storage for tensor in tensors_in(tree) for storage in storage_of(tensor))


KERNELS = ("accelerator", "cpu")
_LARGEST_HEAD = 256
"""The width of a head that fused kernels take."""


def kernels_of(name: str) -> AbstractContextManager[Any]:
    """Inside this context, operators run the kernels of ``name``, one of :data:`KERNELS`."""
    return _Others(_FUSED if name == "accelerator" else {})


class _Others(TorchFunctionMode):
    """Runs other functions in place of some, and copies tensors that have no memory."""

    def __init__(self, others: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self._others = {Tensor.__deepcopy__: _copied, **others}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = self._others.get(function, function)
        return run(*args, **(kwargs or {}))


def _copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """A deep copy. Torch's own, of a tensor without memory, has another storage than its views."""
    if not tensor.is_leaf:  # which torch refuses
        return Tensor.__deepcopy__(tensor, memo)  # type: ignore[no-any-return, no-untyped-call]
    if id(tensor) not in memo:
        copy = tensor.detach().clone()
        as_was: Any = nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor.requires_grad_
        memo[id(tensor)] = as_was(copy, tensor.requires_grad)
    return memo[id(tensor)]  # type: ignore[no-any-return]


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if inplace or not training or not 0 < p < 1:
        return F.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


def _rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    if weight is not None and weight.dtype != input.dtype:  # then an accelerator has no kernel either
        return F.rms_norm(input, normalized_shape, weight, eps)
    return _RMSNorm.apply(input, tuple(normalized_shape), weight)  # type: ignore[no-any-return, no-untyped-call]


def _accelerated_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False
) -> Tensor:
    grouped = query.shape[-3] != key.shape[-3]
    by_flash = attn_mask is None and query.dtype in (torch.float16, torch.bfloat16)
    if query.dim() != 4 or query.shape[-1] > _LARGEST_HEAD or value.shape[-1] != query.shape[-1] or (
        grouped and not by_flash
    ):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return fused_attention(query, key, value, attn_mask, dropout_p, is_causal, scale)


class _RMSNorm(torch.autograd.Function):
    """A stand-in for the fused RMS norm, which a CPU does not have. It runs layer norm, which reads and writes the same
    bytes, and leaves out the mean of each row. Its numbers would be wrong, but tensors without memory have none."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, shape: tuple[int, ...], weight: Tensor | None) -> Tensor:
        outputs, _, scale = torch.native_layer_norm(input, shape, weight, None, 1e-5)
        kind = torch.float64 if input.dtype == torch.float64 else torch.float32
        scale = torch.empty_like(scale, dtype=kind)  # like it, since a rank may have a share of the rows
        ctx.shape = shape
        ctx.save_for_backward(input, weight, scale)
        return outputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        input, weight, scale = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2], False]
        backward = torch.ops.aten.native_layer_norm_backward
        of_input, of_weight, _ = backward(gradient, input, ctx.shape, scale, scale, weight, None, wanted)
        return of_input, None, of_weight


_FUSED: dict[Any, Callable[..., Any]] = {
    F.dropout: _dropout,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    F.scaled_dot_product_attention: _accelerated_attention,
}
