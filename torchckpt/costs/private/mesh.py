"""Mesh: what gets around torch, so that one process counts the share of one rank of many.

Imported by :func:`torchckpt.costs.fake_mesh` alone: torch's DTensor takes a second to import.
"""
from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import DTensor, _collective_utils, _redistribute, placement_types
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from torchckpt.tensors import tensors_in

__all__ = ["bytes_alive", "collective_kind", "group_of", "is_partial", "ranks_without_processes", "without_values"]


@contextmanager
def ranks_without_processes(rank: int, world: int) -> Iterator[None]:
    """Inside this context, this process is ``rank`` of ``world``, and collectives do nothing."""
    hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    unseen = patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", _unseen)
    try:
        with unseen, patch.object(placement_types, "shard_dim_alltoall", _all_to_all):
            yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook  # init_process_group() of torch/distributed/distributed_c10d.py wraps it each time
        # Caches of torch/distributed/tensor/_sharding_prop.py and _redistribute.py hold meshes, and with them the names
        # of groups that are gone; a later mesh finds them. torch.distributed.tensor.debug, which clears two of them,
        # imports NumPy.
        propagator: Any = DTensor._op_dispatcher.sharding_propagator
        propagator.propagate_op_sharding.cache_clear()
        torch._C._clear_DTensor_sharding_propagator_cache()
        _redistribute._gen_transform_infos.cache_clear()


@contextmanager
def without_values(node_devices: int) -> Iterator[None]:
    """Inside this context, which is inside the mode whose tensors have no memory, meshes can be made and read, and
    DTensor takes a node for one of so many devices: ``MeshTopoInfo`` of torch/distributed/tensor/_collective_utils.py
    asks the CPU, which says one."""
    nodes = SimpleNamespace(num_devices_per_host=lambda _: node_devices)
    with patch.object(_collective_utils, "_mesh_resources", nodes), _Integers():  # type: ignore[no-untyped-call]  # in torch
        yield


_propagate = ShardingPropagator._propagate_tensor_meta_non_cached


def _unseen(self: ShardingPropagator, schema: Any) -> Any:
    """DTensor runs an operator that is new to it with the global shapes, to learn the shape of its result
    (torch/distributed/tensor/_sharding_prop.py). Modes that count must not see that."""
    with _disable_current_modes():
        return _propagate(self, schema)


def _all_to_all(input: Tensor, gather_dim: int, shard_dim: int, mesh: Any, mesh_dim: int) -> Any:
    """A mesh of the CPU gathers and cuts where one of an accelerator has an all-to-all, since gloo once lacked it
    (``shard_dim_alltoall`` of torch/distributed/tensor/_collective_utils.py)."""
    return torch.ops._dtensor.shard_dim_alltoall(input, gather_dim, shard_dim, mesh.get_group(mesh_dim).group_name)


class _Integers(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Few integers whose values are known keep them. ``DeviceMesh`` reads the numbers of its ranks
    (torch/distributed/device_mesh.py), and FSDP2 makes meshes of meshes while a model is parallelized."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = tensors_in((args, kwargs))
        known = all(type(x) is Tensor and not x.is_floating_point() and x.numel() < _FEW for x in read)
        if not read:  # nothing but a few integers in a row
            numbers = all(isinstance(number, int) and number < _FEW for number in args)
            known = "arange" in str(operator) and numbers and not getattr(kwargs.get("dtype"), "is_floating_point", 0)
        with unset_fake_temporarily() if known else nullcontext():
            return operator(*args, **kwargs)


_FEW = 1 << 16
_KINDS = {
    "reducescatter": "reduce_scatter", "allgather": "all_gather", "allreduce": "all_reduce", "alltoall": "all_to_all",
    "broadcast": "broadcast", "send": "permute", "recv": "permute", "gather": "all_gather", "scatter": "broadcast",
    "reduce": "all_reduce",
}  # fmt: skip
"""The kind by a part of an operator's name without underscores; the first that fits."""


def collective_kind(operator: Any) -> str | None:
    """The kind of collective that ``operator`` is; empty for one that waits, None for an operator of another sort."""
    if operator.namespace not in ("c10d", "_c10d_functional", "_dtensor"):
        return None
    name = operator.overloadpacket.__name__.replace("_", "")
    return next((kind for part, kind in _KINDS.items() if part in name), "")


def group_of(operator: Any, args: Any, kwargs: Any) -> tuple[int, ...]:
    """The ranks of the group of a collective."""
    values = {argument.name: value for argument, value in zip(operator._schema.arguments, args)} | kwargs
    group: Any = next(values[name] for name in ("group_name", "process_group", "group") if name in values)
    if isinstance(group, str):
        group = c10d._resolve_process_group(group)  # type: ignore[attr-defined, arg-type]  # private
    elif not isinstance(group, dist.ProcessGroup):
        group = dist.ProcessGroup.unbox(group)
    return tuple(dist.get_process_group_ranks(group))


def is_partial(gradient: Tensor | None) -> bool:
    """Whether ``gradient`` is this rank's summand of one that other ranks have the rest of."""
    return isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements)


def bytes_alive(storages: Iterable[StorageWeakRef]) -> int:
    """The bytes that ``storages`` have now: none where they are gone, or where FSDP2 has freed a whole parameter."""
    living = (torch.UntypedStorage._new_with_weak_ptr(storage.cdata) for storage in storages)
    return sum(storage.nbytes() for storage in living if storage is not None)
