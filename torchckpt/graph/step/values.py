"""Values: the storages that a joint graph's forward makes, by names that users know: modules and marks."""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from torchckpt.graph.annotate.annotations import mark_of, module_of, regions_of
from torchckpt.graph.step.joint import Joint
from torchckpt.planning.remat.flow.late import Home, Region

__all__ = ["Value", "Values"]


@dataclass(frozen=True)
class Value:
    """One tensor that the forward makes, as it is passed to the function in ``keep=function``.

    Args:
        name: of its node in the traced graph.
        module: the qualified name of the innermost module that made it; empty for what the root makes itself.
        marks: names of the marks that were put on it.
        operator: such as ``aten.addmm``.
        shape, dtype: of the tensor.
        bytes: of its storage.
        flops: of the operation that made it.
    """

    name: str
    module: str
    marks: tuple[str, ...]
    operator: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    flops: int


class Values:
    """The storages that a forward makes, with their modules, marks and regions."""

    def __init__(self, joint: Joint) -> None:
        self._joint, self._flow = joint, joint.flow

    @cached_property
    def made(self) -> tuple[int, ...]:
        """Storages that the forward writes, in order, without the results of the step, which are always kept."""
        forward = self._flow.operations[: self._flow.forward]
        free = self._tensors - self._flow.results
        return tuple(storage for operation in forward for storage in operation.writes if storage in free)

    @cached_property
    def marks(self) -> dict[str, frozenset[int]]:
        """By name of a mark, the storages of the tensors with that mark."""
        found: dict[str, frozenset[int]] = {}
        for node in self._joint.storages:
            name = mark_of(node)
            if name is not None and node.target is torch.ops.aten.alias.default:
                found[name] = found.get(name, frozenset()) | (self._joint.storages[node] & frozenset(self.made))
        return found

    @cached_property
    def modules(self) -> dict[str, frozenset[int]]:
        """By qualified name of a module, the storages that it makes and that operations outside of it read."""
        found: dict[str, set[int]] = {}
        for storage, (writer, readers) in self._uses.items():
            module = self.paths[writer]
            while module:
                outside = [reader for reader in readers if not _is_inside(self.paths[reader], module)]
                if outside or not readers:
                    found.setdefault(module, set()).add(storage)
                module = module.rpartition(".")[0]
        return {name: frozenset(storages) for name, storages in found.items()}

    @cached_property
    def depths(self) -> dict[int, int]:
        """By storage, the number of nested regions that drop it; 0 if none does.

        A storage that enters a region is not dropped by that region, only by the regions around it.
        """
        found = {}
        for storage, (writer, readers) in self._uses.items():
            path, others = self.regions[writer], [self.regions[reader] for reader in readers]
            found[storage] = min([len(path), *(_common(path, other) for other in others if _enters(path, other))])
        return found

    @cached_property
    def homes(self) -> dict[int, Home]:
        """The regions of each storage that two or more nested regions drop."""
        found = {}
        for storage, depth in self.depths.items():
            if depth > 1:
                writer, readers = self._uses[storage]
                inside = self.regions[writer][:depth]
                around = min([depth, *(_common(inside, self.regions[reader]) for reader in readers)])
                found[storage] = Home(inside, inside[:around])
        return found

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """For each operation, the regions that it is in."""
        return tuple(() if node is None else regions_of(node) for node in self._joint.nodes)

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """For each operation, the qualified name of its module; empty for the root module."""
        return tuple("" if node is None else module_of(node) for node in self._joint.nodes)

    def value(self, storage: int) -> Value:
        index = self._flow.writer[storage]
        operation, storages = self._flow.operations[index], self._joint.storages
        node = next(node for node in storages if node not in self._joint.views and storage in storages[node])
        like = node.meta["val"]
        marks = tuple(name for name, storages in self.marks.items() if storage in storages)
        operator = str(self._joint.nodes[index].target).removesuffix(".default")  # type: ignore[union-attr]
        size, shape = self._flow.sizes_bytes[storage], tuple(like.shape)
        return Value(node.name, self.paths[index], marks, operator, shape, like.dtype, size, operation.flops)

    @cached_property
    def _uses(self) -> dict[int, tuple[int, list[int]]]:
        """By storage that the forward makes: the forward operation that writes it, and those that read it."""
        found: dict[int, tuple[int, list[int]]] = {}
        for index, operation in enumerate(self._flow.operations[: self._flow.forward]):
            for storage in operation.reads:
                if storage in found:
                    found[storage][1].append(index)
            for storage in operation.writes:
                if storage in self._tensors:
                    found[storage] = index, []
        return found

    @cached_property
    def _tensors(self) -> frozenset[int]:
        """All storages of tensors: without the tokens that keep operations in order."""
        return frozenset[int]().union(*self._joint.storages.values())


def _is_inside(module: str, outer: str) -> bool:
    return module == outer or module.startswith(f"{outer}.")


def _common(path: tuple[str, ...], other: tuple[str, ...]) -> int:
    """The number of outermost regions that both paths share."""
    return next((place for place, (one, two) in enumerate(zip(path, other)) if one != two), min(len(path), len(other)))


def _enters(path: tuple[str, ...], reader: tuple[str, ...]) -> bool:
    """Whether a value that is made in the regions ``path`` and read in ``reader`` enters a region."""
    return reader != path[: len(reader)]
