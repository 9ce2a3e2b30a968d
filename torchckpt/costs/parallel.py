"""Parallel: a ledger that sees one rank's share of operators, and its collectives.

The model's own code runs: DTensor, FSDP2 and functional collectives. Tensors that wrap others (DTensor) run first, so
that operators come with the shapes of this rank.
"""
from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from torchckpt.costs.mesh import Layout
from torchckpt.costs.operation import AGAIN, BEFORE, BOTH_GRADS, FORWARD, REPLAY, Done, Ledger, Pace, storages_in
from torchckpt.costs.private.mesh import bytes_alive, collective_kind, group_of, is_partial
from torchckpt.errors import Fault, raise_fault
from torchckpt.planning.device import Device
from torchckpt.planning.work.block import Collective
from torchckpt.tensors import tensors_in

__all__ = ["ParallelLedger"]

_KERNELS = 4
"""What a collective takes of a host, in kernels."""
_NAMES = {FORWARD: "forward", BOTH_GRADS: "backward", REPLAY: "replay", "step": "step"}


class ParallelLedger(Ledger):  # type: ignore[no-untyped-call]  # untyped in torch
    """Counts collectives, too, and what FSDP2 gathers.

    A collective is of FSDP2 if it reads what an operator or another collective of FSDP2 wrote. It runs beside the work
    of its part, and a gather is of the part whose parameters it gathers: in the backward it starts ahead. Every other
    collective is waited for.
    """

    def __init__(self, pace: Pace, layout: Layout, device: Device) -> None:
        super().__init__(pace)
        self._layout, self._device = layout, device
        self._waited: defaultdict[tuple[str, int], Counter[Collective]] = defaultdict(Counter)
        self._beside: defaultdict[tuple[str, int], Counter[Collective]] = defaultdict(Counter)
        self._buffers: set[StorageWeakRef] = set()  # what FSDP2 wrote
        self._gathers: dict[StorageWeakRef, tuple[Collective, float]] = {}  # under way, by where to
        self._owners: dict[StorageWeakRef, int] = {}  # the part of a whole parameter
        self._casts: set[StorageWeakRef] = set()  # flat parameters in the dtype of a MixedPrecisionPolicy

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        kwargs, kind = kwargs or {}, collective_kind(operator)
        if kind is not None:
            return self._communicate(kind, operator, args, kwargs)
        # Shares of a later dimension are joined.
        is_join = operator is torch.ops.aten.cat.out and not self.gathered.isdisjoint(storages_in(args))
        if operator.namespace == "fsdp" or is_join or self._is_whole_copy(operator, args):
            return self._copy(operator, types, args, kwargs)
        outputs = super().__torch_dispatch__(operator, types, args, kwargs)
        name = operator.overloadpacket.__name__
        if name == "_to_copy" and args[0].dim() == 1 and self._is_watched(args[0]):
            self._casts.update(storages_in(outputs))
        return outputs

    def _is_whole_copy(self, operator: Any, args: Any) -> bool:
        """Whether FSDP2 copies a parameter that no other rank has a share of, where it would gather it. A copy to a
        part of a storage pads a share."""
        if operator is not torch.ops.aten.copy_.default or args[0].dim() != 1:
            return False
        target, source = args[:2]
        is_whole = target.nbytes == target.untyped_storage().nbytes()
        is_share = self._is_watched(source) or not self._casts.isdisjoint(storages_in(source))
        return is_whole and is_share and not self._is_watched(target)

    def _is_watched(self, tensor: Tensor) -> bool:
        return not self.watched.isdisjoint(storages_in(tensor))

    def saved(self) -> None:
        super().saved()
        self._waited[REPLAY, self.part] = self._waited[AGAIN, self.part].copy()

    def collectives(self, part: int) -> tuple[Collective, ...]:
        return tuple(
            each._replace(phase=_NAMES[phase], count=count)
            for phase in _NAMES
            for counter in (self._waited, self._beside)
            for each, count in counter[phase, part].items()
        )

    def step(self, parameters: Iterable[nn.Parameter]) -> None:
        """Run an optimizer where gradients are still partial sums: it communicates, once for all micro-batches."""
        self.phase = "step"
        for parameter in filter(lambda parameter: is_partial(parameter.grad), parameters):
            self.part = next((self.users.get(key, BEFORE) for key in storages_in(parameter)), BEFORE)
            torch.optim.AdamW([parameter]).step()
        self.phase = None

    def _communicate(self, kind: str, operator: Any, args: Any, kwargs: Any) -> Any:
        outputs = self._unseen(operator, args, kwargs)
        if not kind or self.phase is None:
            return outputs
        ranks = group_of(operator, args, kwargs)
        sides = [tensors_in(side) for side in (*args, *kwargs.values(), outputs)]
        size = max(sum(tensor.numel() * tensor.element_size() for tensor in side) for side in sides)
        collective = Collective(kind, size, len(ranks), "_".join(self._layout.dimensions_of(ranks)), "")
        seconds, storages = self._seconds(collective, ranks), set(storages_in(sides))
        if self._buffers.isdisjoint(storages):
            for phase in self.phases:
                self._waited[phase, self.part][collective] += 1
            self.add(Done(seconds, _KERNELS))
        elif kind == "all_gather":
            self._gathers.update(dict.fromkeys(storages, (collective, seconds)))
        else:
            self._buffers |= storages
            self._note(self.phase, collective, seconds)
        return outputs

    def _seconds(self, collective: Collective, ranks: tuple[int, ...]) -> float:
        network = self._device.network
        if network is None:
            rule = "the stages communicate, and the device has no network"
            works = 'dataclasses.replace(device, network=device_named("h100").network), or another'
            raise_fault(Fault(rule, f"{collective.kind} over {collective.dimension!r} on {self._device.name}", works))
        node = self._layout.rank // network.node_devices
        on_node = sum(rank // network.node_devices == node for rank in ranks)
        return network.seconds(collective.kind, collective.bytes, len(ranks), on_node)

    def _note(self, phase: str, collective: Collective, seconds: float) -> None:
        self._beside[phase, self.part][collective] += 1
        self._seconds_beside[phase, self.part] += seconds

    def _copy(self, operator: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator of FSDP2, which copies before or after a collective."""
        name, phase, part = operator.overloadpacket.__name__, self.phase, self.part
        wholes = set(storages_in(kwargs.get("out")))
        self.part = next((self._owners[key] for key in wholes if key in self._owners), part)
        if name == "all_gather_copy_in":  # beside the work, too, and ahead of it
            outputs = self._unseen(operator, args, kwargs)
        else:
            outputs = super().__torch_dispatch__(operator, types, args, kwargs)
        written = wholes | set(storages_in(outputs))
        if name == "split_with_sizes_copy" and phase is not None:
            self._owners.update(dict.fromkeys(wholes, self.part))
            for gather in filter(None, [self._gathers.pop(key, None) for key in storages_in(args[0])]):
                self._note(phase, *gather)
        else:
            self._buffers |= written
        if name != "chunk_cat" and phase in (FORWARD, BOTH_GRADS):
            self.gathered |= written
            self.gathered_bytes = max(self.gathered_bytes, bytes_alive(self.gathered))
        self.part = part
        return outputs

    def _unseen(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator without counting it."""
        outputs = operator(*args, **kwargs)
        if self.phase == FORWARD:
            self._look((args, kwargs), outputs)
        return outputs
