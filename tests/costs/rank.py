"""A real rank: what a step of a parallel model computes, keeps and tells other ranks, seen from outside."""
from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import loss_parallel
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tests.costs.parallel_models import Way, built
from torchckpt.tensors import flop_formula

__all__ = ["loss_of", "measured"]


def loss_of(way: Way):
    """What has to be around a step."""
    return loss_parallel() if "lp" in way.how else nullcontext()


def measured(way: Way) -> dict:
    """A step on this rank; what a replay adds is the difference to a step whose blocks are checkpointed."""
    mesh = init_device_mesh("cpu", tuple(way.mesh.values()), mesh_dim_names=tuple(way.mesh))
    with loss_of(way):
        # DTensor runs an operator that is new to it with the global shapes; after one step none is new.
        _, plain, replayed = (_step(*built(way, mesh), mesh, replays) for replays in (True, False, True))
    plain["flops"]["replay"] = replayed["flops"]["backward"] - plain["flops"]["backward"]
    for (_, *collective), count in (replayed["collectives"] - plain["collectives"]).items():
        plain["collectives"][("replay", *collective)] = count
    return plain


def _step(stages, x, *rest):
    loss, mesh, replays = rest if len(rest) == 3 else (lambda y: y, *rest)
    (model,), saved, comm = stages, {}, CommDebugMode()
    for block in model if replays else ():
        if hasattr(block, "attention"):
            block.forward = _checkpointed(block.forward)

    def pack(tensor: Tensor) -> Tensor:
        saved.update(bytes_of(tensor))
        return tensor if tensor.is_leaf else tensor.detach()

    with comm, _Seen(mesh) as seen:
        seen.phase = "forward"
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            output = loss(model(x))
        weights = bytes_of([*model.parameters(), *model.buffers()])
        seen.phase = "backward"
        output.backward(torch.ones_like(output))
        parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
        counted = sum(comm.get_comm_counts().values())
        static = weights | bytes_of([parameter.grad for parameter in parameters])
        optimizer = torch.optim.AdamW(parameters)
        seen.phase = "step"
        optimizer.step()
    moments = bytes_of([(state["exp_avg"], state["exp_avg_sq"]) for state in optimizer.state.values()])
    return {
        "saved": sum(size for key, size in saved.items() if key not in weights and key not in seen.gathered),
        "static": sum((static | moments).values()),
        "gathered": seen.most_gathered,
        "flops": seen.flops,
        "collectives": seen.collectives,
        "torch's count": counted,
    }


def _checkpointed(forward):
    return lambda x: checkpoint(forward, x, use_reentrant=False)


def local(tree) -> list[Tensor]:
    """What this rank has of the tensors in ``tree``."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    while any(isinstance(x, (DTensor, AsyncCollectiveTensor)) for x in tensors):
        tensors = [
            x._local_tensor if isinstance(x, DTensor) else x.elem if isinstance(x, AsyncCollectiveTensor) else x
            for x in tensors
        ]
    return tensors


def bytes_of(tree) -> dict[StorageWeakRef, int]:
    storages = (tensor.untyped_storage() for tensor in local(tree))
    return {StorageWeakRef(storage): storage.nbytes() for storage in storages}


KINDS = {
    "all_reduce": "all_reduce", "allreduce_": "all_reduce", "all_gather_into_tensor": "all_gather",
    "_allgather_base_": "all_gather", "reduce_scatter_tensor": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter", "all_to_all_single": "all_to_all",
}  # fmt: skip


class _Seen(TorchDispatchMode):
    """Operators with the shapes of this rank."""

    def __init__(self, mesh) -> None:
        super().__init__()
        self.phase = ""
        self.flops, self.collectives = Counter(), Counter()
        self.gathered, self.most_gathered = set(), 0
        self.names = {tuple(dist.get_process_group_ranks(mesh.get_group(name))): name for name in mesh.mesh_dim_names}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        outputs = operator(*args, **kwargs)
        name, packet = operator.overloadpacket.__name__, operator.overloadpacket
        if formula := flop_formula(packet):
            self.flops[self.phase] += formula(*args, **kwargs, out_val=outputs)
        if operator.namespace in ("c10d", "_c10d_functional", "_dtensor") and name in KINDS:
            sides = (*args, outputs)
            size = max(sum(x.numel() * x.element_size() for x in local(side)) for side in sides)
            self.collectives[(self.phase, KINDS[name], size, *self._group(operator, args))] += 1
        if operator.namespace == "fsdp" and name != "chunk_cat":
            self.gathered |= bytes_of((outputs, kwargs.get("out"))).keys()
            alive = (torch.UntypedStorage._new_with_weak_ptr(key.cdata) for key in self.gathered)
            self.most_gathered = max(self.most_gathered, sum(x.nbytes() for x in alive if x is not None))
        return outputs

    def _group(self, operator, args):
        values = dict(zip((argument.name for argument in operator._schema.arguments), args))
        group = next(values[name] for name in ("group_name", "process_group") if name in values)
        if isinstance(group, str):
            group = dist.distributed_c10d._resolve_process_group(group)
        elif not isinstance(group, dist.ProcessGroup):
            group = dist.ProcessGroup.unbox(group)
        return group.size(), self.names[tuple(dist.get_process_group_ranks(group))]
