"""Keep: from what the user says is to be kept, to the storages that are, and to the schedule that follows."""
from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import TypeAlias

from torchckpt.errors import Fault, raise_faults
from torchckpt.graph.joint import Joint
from torchckpt.graph.values import Value, Values
from torchckpt.model.remat.dataflow import Dataflow, Schedule
from torchckpt.model.remat.improve import undo
from torchckpt.model.remat.late import late
from torchckpt.model.remat.memory import simulate
from torchckpt.model.remat.planner import least
from torchckpt.model.remat.select import every_sqrt
from torchckpt.model.remat.separators import separating_storages

__all__ = ["POLICIES", "Keep", "check_keep", "kept_by", "schedule_of"]

Keep: TypeAlias = str | Sequence[str] | Callable[[Value], bool] | None
"""A policy's name; names of modules and marks, or patterns of them; or a function that is asked about each value."""


def check_keep(caller: str, keep: Keep) -> None:
    """Raise an ArgumentError unless ``keep`` is one of the forms that there are."""
    if isinstance(keep, str) and keep not in POLICIES:
        near = get_close_matches(keep, POLICIES, 1) or ["speed"]
        known = ", ".join(f'"{name}"' for name in POLICIES)
        works = f'keep="{near[0]}"; or keep=["{keep}"], if it is the name of a module or a mark'
        raise_faults(caller, [Fault(f"keep is one of {known}, a list of names, or a function", repr(keep), works)])
    names = isinstance(keep, Sequence) and all(isinstance(name, str) for name in keep)
    if not (keep is None or names or callable(keep)):
        raise_faults(caller, [Fault("keep is a policy, a list of names, or a function", repr(keep), 'keep="memory"')])


def kept_by(keep: Keep, joint: Joint) -> frozenset[int]:
    """The storages to keep. Results of the step, and what cannot be had again, are kept beside them.

    Raises:
        ArgumentError: the policy is unknown, a name is, or nothing is selected.
    """
    check_keep("keep", keep)
    values = Values(joint)
    if keep is None:
        return frozenset(storage for storage, depth in values.depths.items() if depth == 0)
    if isinstance(keep, str):
        return POLICIES[keep](joint, values)
    if callable(keep):
        wanted = frozenset(s for s in values.made if keep(values.value(s)))
        return _some(wanted, "a function that wants none", "keep=lambda value: value.flops > 0")
    return _named(keep, values)


def schedule_of(joint: Joint, keep: Keep) -> Schedule:
    """What is dropped is recomputed late: right before its first use in the backward.

    With ``keep=None`` regions alone say what is dropped, and marks inside them what is not. Otherwise a repeat is
    spared where the peak does not need it: of what is alive when the backward starts, say.
    """
    flow, values = joint.flow, Values(joint)
    kept = kept_by(keep, joint)
    if keep == "memory" and not kept:
        return least(flow).schedule
    if keep is None:
        return late(flow, kept | _marked(values), values.homes, values.regions)
    schedule = late(flow, kept, values.homes, values.regions)
    return undo(flow, schedule, simulate(flow, schedule).peak_bytes)


def _collection(joint: Joint, values: Values) -> frozenset[int]:
    return _some(_marked(values), 'keep="collection", but no value is marked', 'h = graph.mark(h, "h") in the model')


def _speed(joint: Joint, values: Values) -> frozenset[int]:
    """Outputs of convolutions and products of matrices: all that is dear to recompute."""
    operations, writer = joint.flow.operations, joint.flow.writer
    found = frozenset(storage for storage in values.made if operations[writer[storage]].flops)
    return _some(found, 'keep="speed", but there is no convolution and no product', 'keep="memory"')


def _memory(joint: Joint, values: Values) -> frozenset[int]:
    """About the square root of the values that separate inputs from outputs; none where there are none."""
    flow = joint.flow
    shared = _shared(flow)
    found = every_sqrt(flow, separating_storages(flow, shared))
    return found | shared if found else found


def _shared(flow: Dataflow) -> frozenset[int]:
    """Small values that are read throughout, as an attention mask is: kept, they do not hinder others to separate."""
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
    """A name as it is, else as a pattern, else as a part of names."""
    known = {**values.modules, **values.marks}
    found, faults = frozenset[int](), []
    for name in names:
        matches = [name] if name in known else fnmatch.filter(known, name) or [one for one in known if name in one]
        found = found.union(*(known[match] for match in matches))
        if not matches:
            near = get_close_matches(name, known, 3, 0.3) or sorted(known)[:3]
            works = f"keep={near}" if near else 'graph.mark(h, "h") in the model, then keep=["h"]'
            faults.append(Fault("a name in keep is that of a module or a mark of the traced call", repr(name), works))
    raise_faults("keep", faults)
    return _some(found, f"keep={list(names)!r}", 'the name of a module that computes something, or keep="memory"')


def _some(found: frozenset[int], received: str, works: str) -> frozenset[int]:
    if not found:
        raise_faults("keep", [Fault("what is kept is one value at least", received, works)])
    return found
