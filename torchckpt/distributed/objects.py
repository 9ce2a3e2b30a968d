"""Objects: sent between processes as bytes in tensors. torch's own ``all_gather_object`` needs NumPy, these do not."""
from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["all_gather", "broadcast"]


def all_gather(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values ``mine`` of all processes, in the order of ranks. Collective: all processes must call it."""
    data, device, ranks = pickle.dumps(mine), _device_of(group), dist.get_world_size(group)
    size = torch.tensor([len(data)], device=device)
    sizes = [torch.empty_like(size) for _ in range(ranks)]
    dist.all_gather(sizes, size, group=group)
    longest = max(map(int, sizes))
    padded = _tensor_of(data.ljust(longest, b"\0")).to(device)
    gathered = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(gathered, padded, group=group)
    return [_object_of(each) for each in gathered]  # pickles end by themselves


def broadcast(mine: Any) -> Any:
    """Return the value ``mine`` of rank 0. Collective: all processes must call it."""
    data, device = pickle.dumps(mine), _device_of(None)
    size = torch.tensor([len(data)], device=device)
    dist.broadcast(size, src=0)
    sent = torch.empty(int(size), dtype=torch.uint8)
    if dist.get_rank() == 0:
        sent = _tensor_of(data)
    sent = sent.to(device)
    dist.broadcast(sent, src=0)
    return _object_of(sent)


def _tensor_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _object_of(sent: Tensor) -> Any:
    data = bytearray(sent.numel())
    torch.frombuffer(data, dtype=torch.uint8).copy_(sent)
    return pickle.loads(data)


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Where the collectives of ``group`` are: the CPU if they can be, else the current accelerator."""
    devices = [backend.partition(":")[0] for backend in dist.get_backend_config(group).split(",")]
    return torch.device("cpu" if "cpu" in devices else devices[0])
