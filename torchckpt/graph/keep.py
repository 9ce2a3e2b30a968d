"""Keep: the storages that a forward makes, by names that users know, and those that the option ``keep`` selects."""
from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import TypeAlias

import torch

from torchckpt.errors import Fault, check, raise_fault
from torchckpt.graph.annotations import mark_of, module_of, regions_of
from torchckpt.graph.step.joint import Joint
from torchckpt.planning.remat.flow.dataflow import Dataflow, Schedule
from torchckpt.planning.remat.flow.late import Home, Region, every_sqrt, late, separating_storages
from torchckpt.planning.remat.flow.memory import simulate
from torchckpt.planning.remat.search.improve import remove_repeats
from torchckpt.planning.remat.search.planner import least

__all__ = ["POLICIES", "Keep", "Value", "Values", "check_keep", "kept_by", "schedule_of"]


@dataclass(frozen=True)
class Value:
    """One tensor that the forward makes. It is passed to the function in ``keep=function``.

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
    """The storages that a traced forward makes, with their modules, marks and regions."""

    def __init__(self, joint: Joint) -> None:
        self._joint, self.flow = joint, joint.flow

    @cached_property
    def made(self) -> tuple[int, ...]:
        """Storages that the forward writes, in order, without the results of the step, which are always kept."""
        forward = self.flow.operations[: self.flow.forward]
        free = self._tensors - self.flow.results
        return tuple(storage for operation in forward for storage in operation.writes if storage in free)

    @cached_property
    def marks(self) -> dict[str, frozenset[int]]:
        """By name of a mark, the storages of the tensors with that mark."""
        marked: dict[str, frozenset[int]] = {}
        for node, storages in self._joint.storages.items():
            name = mark_of(node)
            if name is not None and node.target is torch.ops.aten.alias.default:
                marked[name] = marked.get(name, frozenset()) | storages.intersection(self.made)
        return marked

    @cached_property
    def modules(self) -> dict[str, frozenset[int]]:
        """By qualified name of a module, the storages that it makes and that operations outside of it read."""
        leaving: dict[str, set[int]] = {}
        for storage, (writer, readers) in self._uses.items():
            module = self.paths[writer]
            while module:
                if not readers or any(not f"{self.paths[reader]}.".startswith(f"{module}.") for reader in readers):
                    leaving.setdefault(module, set()).add(storage)
                module = module.rpartition(".")[0]
        return {name: frozenset(storages) for name, storages in leaving.items()}

    @cached_property
    def depths(self) -> dict[int, int]:
        """By storage, the number of nested regions that drop it; 0 if none does.

        A storage that enters a region is not dropped by that region, only by the regions around it.
        """
        depths = {}
        for storage, (writer, readers) in self._uses.items():
            path, others = self.regions[writer], [self.regions[reader] for reader in readers]
            entered = [other for other in others if other != path[: len(other)]]
            depths[storage] = min([len(path), *(_common(path, other) for other in entered)])
        return depths

    @cached_property
    def homes(self) -> dict[int, Home]:
        """The regions of each storage that two or more nested regions drop."""
        homes = {}
        for storage, depth in self.depths.items():
            if depth > 1:
                writer, readers = self._uses[storage]
                inside = self.regions[writer][:depth]
                around = min([depth, *(_common(inside, self.regions[reader]) for reader in readers)])
                homes[storage] = Home(inside, inside[:around])
        return homes

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """The regions that each operation is in."""
        return tuple(() if node is None else regions_of(node) for node in self._joint.nodes)

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """The qualified name of each operation's module; empty for the root module."""
        return tuple("" if node is None else module_of(node) for node in self._joint.nodes)

    def value(self, storage: int) -> Value:
        index = self.flow.writer[storage]
        operation, storages = self.flow.operations[index], self._joint.storages
        node = next(node for node in storages if node not in self._joint.views and storage in storages[node])
        like = node.meta["val"]
        marks = tuple(name for name, storages in self.marks.items() if storage in storages)
        operator = str(self._joint.nodes[index].target).removesuffix(".default")  # type: ignore[union-attr]
        size, shape = self.flow.sizes_bytes[storage], tuple(like.shape)
        return Value(node.name, self.paths[index], marks, operator, shape, like.dtype, size, operation.flops)

    @cached_property
    def _uses(self) -> dict[int, tuple[int, list[int]]]:
        """By storage that the forward makes: the forward operation that writes it, and those that read it."""
        uses: dict[int, tuple[int, list[int]]] = {}
        for index, operation in enumerate(self.flow.operations[: self.flow.forward]):
            for storage in operation.reads:
                if storage in uses:
                    uses[storage][1].append(index)
            for storage in operation.writes:
                if storage in self._tensors:
                    uses[storage] = index, []
        return uses

    @cached_property
    def _tensors(self) -> frozenset[int]:
        """All storages of tensors: without the tokens that keep operations in order."""
        return frozenset[int]().union(*self._joint.storages.values())


def _common(path: tuple[str, ...], other: tuple[str, ...]) -> int:
    """The number of outermost regions that both paths share."""
    pairs = enumerate(zip(path, other))
    return next((depth for depth, (region, also) in pairs if region != also), min(len(path), len(other)))


Keep: TypeAlias = str | Sequence[str] | Callable[[Value], bool] | None
"""What a traced step keeps: the name of a policy; names or patterns of modules and marks; or a function of a value that
returns a bool."""


def check_keep(keep: Keep) -> None:
    """Raise an ArgumentError unless ``keep`` has one of the forms of :data:`Keep`."""
    if isinstance(keep, str) and keep not in POLICIES:
        near = get_close_matches(keep, POLICIES, 1) or ["speed"]
        known = ", ".join(f'"{name}"' for name in POLICIES)
        works = f'keep="{near[0]}"; or keep=["{keep}"], if it is the name of a module or a mark'
        raise_fault(Fault(f"keep is not one of {known}, a list of names, or a function", repr(keep), works))
    names = isinstance(keep, Sequence) and all(isinstance(name, str) for name in keep)
    if not (keep is None or names or callable(keep)):
        raise_fault(Fault("keep is not a policy, a list of names, or a function", repr(keep), 'keep="memory"'))


def kept_by(keep: Keep, values: Values) -> frozenset[int]:
    """The storages to keep. Results of the step, and values that cannot be recomputed, are always kept too.

    Raises:
        ArgumentError: a name is unknown, or ``keep`` selects nothing.
    """
    if keep is None:
        return frozenset(storage for storage, depth in values.depths.items() if depth == 0)
    if isinstance(keep, str):
        return POLICIES[keep](values)
    if callable(keep):
        wanted = frozenset(s for s in values.made if keep(values.value(s)))
        return _some(wanted, "a function that returns False for every value", "keep=lambda value: value.flops > 0")
    return _named(keep, values)


def schedule_of(keep: Keep, values: Values) -> Schedule:
    """The schedule that drops all other values and recomputes each right before its first use in the backward.

    With ``keep=None``, regions alone decide which values are dropped; marked values inside them are kept. Otherwise a
    value is not dropped where that would not lower the peak, such as a value that the backward needs first.
    """
    flow, kept = values.flow, kept_by(keep, values)
    if keep == "memory" and not kept:
        return least(flow).schedule
    if keep is None:
        return late(flow, kept | _marked(values), values.homes, values.regions)
    schedule = late(flow, kept, values.homes, values.regions)
    return remove_repeats(flow, schedule, simulate(flow, schedule).peak_bytes)


def _collection(values: Values) -> frozenset[int]:
    return _some(_marked(values), 'keep="collection", but no value is marked', 'h = graph.mark(h, "h") in the model')


def _speed(values: Values) -> frozenset[int]:
    """Outputs of convolutions and matrix products, which take the most time to recompute."""
    operations, writer = values.flow.operations, values.flow.writer
    products = frozenset(storage for storage in values.made if operations[writer[storage]].flops)
    return _some(products, 'keep="speed", but there is no convolution and no product', 'keep="memory"')


def _memory(values: Values) -> frozenset[int]:
    """About the square root of the values that separate inputs from outputs; empty if no value separates them."""
    shared = _shared(values.flow)
    separating = every_sqrt(values.flow, separating_storages(values.flow, shared))
    return separating | shared if separating else separating


def _shared(flow: Dataflow) -> frozenset[int]:
    """Small values that are read throughout, such as an attention mask. If they are kept, other values can separate."""
    forward = enumerate(flow.operations[: flow.forward])
    last = {storage: index for index, operation in forward for storage in operation.reads}
    throughout = {s for s, index in last.items() if s in flow.writer and index - flow.writer[s] > flow.forward // 2}
    size = sum(flow.sizes_bytes[storage] for storage in throughout)
    tokens = {storage for storage, size in enumerate(flow.sizes_bytes) if not size}
    is_small = size * 8 <= sum(flow.sizes_bytes[storage] for storage in last if storage in flow.writer)
    return frozenset(tokens | throughout) if is_small else frozenset(tokens)


POLICIES: dict[str, Callable[[Values], frozenset[int]]] = {
    "collection": _collection,
    "speed": _speed,
    "memory": _memory,
}


def _marked(values: Values) -> frozenset[int]:
    return frozenset[int]().union(*values.marks.values())


def _named(names: Sequence[str], values: Values) -> frozenset[int]:
    """The storages for ``names``. Each is matched as a full name, else as a pattern, else as a part of names."""
    known = {**values.modules, **values.marks}
    named, faults = frozenset[int](), []
    for name in names:
        matches = [name] if name in known else fnmatch.filter(known, name) or [key for key in known if name in key]
        named = named.union(*(known[match] for match in matches))
        if not matches:
            near = get_close_matches(name, known, 3, 0.3) or sorted(known)[:3]
            works = f"keep={near}" if near else 'graph.mark(h, "h") in the model, then keep=["h"]'
            faults.append(Fault("a name in keep is that of no module or mark of the traced call", repr(name), works))
    check(faults)
    return _some(named, f"keep={list(names)!r}", 'the name of a module that computes something, or keep="memory"')


def _some(storages: frozenset[int], received: str, works: str) -> frozenset[int]:
    """``storages``, of which there must be any."""
    if not storages:
        raise_fault(Fault("keep selects no value", received, works))
    return storages
