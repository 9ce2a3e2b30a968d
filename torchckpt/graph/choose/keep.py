"""Keep: turn the option ``keep`` into the storages to keep, and into a schedule that recomputes the others."""
from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import TypeAlias

from torchckpt.errors import Fault, check, raise_fault
from torchckpt.graph.step.joint import Joint
from torchckpt.graph.step.values import Value, Values
from torchckpt.planning.remat.flow.dataflow import Dataflow, Schedule
from torchckpt.planning.remat.flow.late import every_sqrt, late, separating_storages
from torchckpt.planning.remat.flow.memory import simulate
from torchckpt.planning.remat.search.improve import remove_repeats
from torchckpt.planning.remat.search.planner import least

__all__ = ["POLICIES", "Keep", "check_keep", "kept_by", "schedule_of"]

Keep: TypeAlias = str | Sequence[str] | Callable[[Value], bool] | None
"""The name of a policy; names or patterns of modules and marks; or a function of a value that returns a bool."""


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


def kept_by(keep: Keep, joint: Joint) -> frozenset[int]:
    """The storages to keep. Results of the step, and values that cannot be recomputed, are always kept too.

    Raises:
        ArgumentError: a policy or a name is unknown, or ``keep`` selects nothing.
    """
    check_keep(keep)
    values = Values(joint)
    if keep is None:
        return frozenset(storage for storage, depth in values.depths.items() if depth == 0)
    if isinstance(keep, str):
        return POLICIES[keep](joint, values)
    if callable(keep):
        wanted = frozenset(s for s in values.made if keep(values.value(s)))
        return _some(wanted, "a function that returns False for every value", "keep=lambda value: value.flops > 0")
    return _named(keep, values)


def schedule_of(joint: Joint, keep: Keep) -> Schedule:
    """The schedule that drops all other values and recomputes each right before its first use in the backward.

    With ``keep=None``, regions alone decide which values are dropped; marked values inside them are kept. Otherwise a
    value is not dropped where that would not lower the peak, such as a value that the backward needs first.
    """
    flow, values = joint.flow, Values(joint)
    kept = kept_by(keep, joint)
    if keep == "memory" and not kept:
        return least(flow).schedule
    if keep is None:
        return late(flow, kept | _marked(values), values.homes, values.regions)
    schedule = late(flow, kept, values.homes, values.regions)
    return remove_repeats(flow, schedule, simulate(flow, schedule).peak_bytes)


def _collection(joint: Joint, values: Values) -> frozenset[int]:
    return _some(_marked(values), 'keep="collection", but no value is marked', 'h = graph.mark(h, "h") in the model')


def _speed(joint: Joint, values: Values) -> frozenset[int]:
    """Outputs of convolutions and matrix products, which take the most time to recompute."""
    operations, writer = joint.flow.operations, joint.flow.writer
    found = frozenset(storage for storage in values.made if operations[writer[storage]].flops)
    return _some(found, 'keep="speed", but there is no convolution and no product', 'keep="memory"')


def _memory(joint: Joint, values: Values) -> frozenset[int]:
    """About the square root of the values that separate inputs from outputs; empty if no value separates them."""
    flow = joint.flow
    shared = _shared(flow)
    found = every_sqrt(flow, separating_storages(flow, shared))
    return found | shared if found else found


def _shared(flow: Dataflow) -> frozenset[int]:
    """Small values that are read throughout, such as an attention mask. If they are kept, other values can separate."""
    last = {storage: index for index, one in enumerate(flow.operations[: flow.forward]) for storage in one.reads}
    throughout = {s for s, index in last.items() if s in flow.writer and index - flow.writer[s] > flow.forward // 2}
    size = sum(flow.sizes_bytes[storage] for storage in throughout)
    tokens = {storage for storage, size in enumerate(flow.sizes_bytes) if not size}
    is_small = size * 8 <= sum(flow.sizes_bytes[storage] for storage in last if storage in flow.writer)
    return frozenset(tokens | throughout) if is_small else frozenset(tokens)


POLICIES: dict[str, Callable[[Joint, Values], frozenset[int]]] = {
    "collection": _collection,
    "speed": _speed,
    "memory": _memory,
}


def _marked(values: Values) -> frozenset[int]:
    return frozenset[int]().union(*values.marks.values())


def _named(names: Sequence[str], values: Values) -> frozenset[int]:
    """The storages for ``names``. Each is matched as a full name, else as a pattern, else as a part of names."""
    known = {**values.modules, **values.marks}
    found, faults = frozenset[int](), []
    for name in names:
        matches = [name] if name in known else fnmatch.filter(known, name) or [one for one in known if name in one]
        found = found.union(*(known[match] for match in matches))
        if not matches:
            near = get_close_matches(name, known, 3, 0.3) or sorted(known)[:3]
            works = f"keep={near}" if near else 'graph.mark(h, "h") in the model, then keep=["h"]'
            faults.append(Fault("a name in keep is that of no module or mark of the traced call", repr(name), works))
    check(faults)
    return _some(found, f"keep={list(names)!r}", 'the name of a module that computes something, or keep="memory"')


def _some(found: frozenset[int], received: str, works: str) -> frozenset[int]:
    if not found:
        raise_fault(Fault("keep selects no value", received, works))
    return found
