"""Mesh: ranks that are not there, for the costs of a model that its code has parallelized."""
from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations, product
from typing import TYPE_CHECKING

from torchckpt.errors import Fault, brief, called, check, raise_fault
from torchckpt.modules import imported

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Layout", "fake_mesh", "layout_around", "sharded_over"]


@dataclass(frozen=True)
class Layout:
    """The dimensions of a mesh, the last of which has neighbouring ranks, and one rank of it."""

    sizes: dict[str, int]
    rank: int

    def dimensions_of(self, ranks: tuple[int, ...]) -> tuple[str, ...]:
        """The names of the dimensions that ``ranks`` are along. An ArgumentError, if there are none."""
        choices = (names for count in range(1, len(self.sizes) + 1) for names in combinations(self.sizes, count))
        along = next((names for names in choices if self._ranks_along(names) == tuple(sorted(ranks))), None)
        if along is None:
            given = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
            rule = "a collective or DTensor is on ranks that are no dimension of the mesh, and no product of dimensions"
            received = f"the ranks {brief(ranks)}, as rank {self.rank} of {given}"
            raise_fault(Fault(rule, received, "mesh.get_group('tp'), or a dimension of the mesh for each group"))
        return along

    def _ranks_along(self, names: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks that differ from this one along the dimensions ``names`` alone."""
        choices, stride = list[list[int]](), 1
        for name, size in reversed(self.sizes.items()):
            places = range(size) if name in names else [self.rank // stride % size]
            choices.append([stride * place for place in places])
            stride *= size
        return tuple(sorted(map(sum, product(*choices))))


_entered: list[Layout] = []
"""That of the :func:`fake_mesh` that is entered: at most one, as of process groups, and in all threads."""


def layout_around() -> Layout | None:
    """The layout of the :func:`fake_mesh` that is entered; None if none is."""
    return next(iter(_entered), None)


def sharded_over(tensor: Tensor) -> str:
    """The dimensions of the mesh that a DTensor is sharded over, such as ``dp_tp``; empty if each rank has it whole."""
    layout = layout_around()
    if layout is None or not isinstance(tensor, imported("torch.distributed.tensor", "DTensor")):
        return ""
    mesh = tensor.device_mesh
    if mesh.get_coordinate() is None:  # of other ranks
        return ""
    from torch.distributed import get_process_group_ranks

    shards = (place for place, each in enumerate(tensor.placements) if not (each.is_replicate() or each.is_partial()))
    groups = [tuple(get_process_group_ranks(mesh.get_group(place))) for place in shards]
    names = {name for ranks in groups if len(ranks) > 1 for name in layout.dimensions_of(ranks)}
    return "_".join(name for name in layout.sizes if name in names)


@contextmanager
def fake_mesh(*, rank: int = 0, **dimensions: int) -> Iterator[DeviceMesh]:
    """Inside this context, this process is one rank of a mesh whose other ranks are not there.

    Collectives return at once, and change nothing. :func:`~torchckpt.costs.pipeline_costs` counts this rank's share of
    a model that is parallelized over the mesh. It has to be made by the function that ``pipeline_costs`` calls.

    >>> def stages(mesh):
    ...     layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(2)))
    ...     for layer in layers:
    ...         parallelize_module(layer, mesh["tp"], {"0": ColwiseParallel(output_layouts=Replicate())})
    ...     return [layers], torch.randn(8, 64)
    >>> with torchckpt.costs.fake_mesh(dp=2, tp=4) as mesh:
    ...     costs = torchckpt.costs.pipeline_costs(lambda: stages(mesh), "h100")
    >>> costs.counted[0].blocks[0].collectives[0]
    Collective(kind='all_gather', bytes=2048, ranks=4, dimension='tp', phase='forward', count=1)

    Args:
        rank: the rank that is counted. Default: 0. Others have other bytes only where shards are uneven.
        **dimensions: the sizes by name, as ``mesh_dim_names`` of a ``DeviceMesh``; the last is that of neighbours, and
            belongs inside a node. Groups of other meshes have to be along these dimensions, too, or along several.

    Raises:
        ArgumentError: a size is no number above 0, ``rank`` is not below their product, or there is a process group.
    """
    with called("fake_mesh()"):
        check(_faults(rank, dimensions))
    from torch.distributed.device_mesh import init_device_mesh

    from torchckpt.costs.private.mesh import ranks_without_processes

    with ranks_without_processes(rank, math.prod(dimensions.values())):
        _entered.append(Layout(dimensions, rank))
        try:
            yield init_device_mesh("cpu", tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))
        finally:
            _entered.clear()


def _faults(rank: object, dimensions: dict[str, int]) -> Iterator[Fault]:
    import torch.distributed as dist

    wrong = [f"{name}={size!r}" for name, size in dimensions.items() if type(size) is not int or size < 1]
    if wrong or not dimensions:
        rule = "the sizes of a mesh are not whole numbers above 0, by the name of its dimension"
        yield Fault(rule, ", ".join(wrong) or "no dimension", "fake_mesh(dp=2, tp=4)")
    elif type(rank) is not int or not 0 <= rank < math.prod(dimensions.values()):
        rule = f"rank is not below {math.prod(dimensions.values())}, the number of ranks of the mesh"
        yield Fault(rule, f"rank={rank!r}", "rank=0")
    if dist.is_available() and dist.is_initialized():
        rule, works = "this process has a process group already", "dist.destroy_process_group() before"
        yield Fault(rule, f"one of {dist.get_world_size()} ranks, backend {dist.get_backend()}", works)
