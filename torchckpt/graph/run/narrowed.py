"""Narrowed: what a plan takes in a backward that the gradients of some outputs do not reach.

The forward stays that of all outputs, since a loss may read them at the next call. What it saves for the missing
gradients alone is freed when the backward starts.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import fx

from torchckpt.graph.step.joint import Joint
from torchckpt.graph.step.partial import Absent, Unread
from torchckpt.planning.remat.flow.dataflow import Operation
from torchckpt.planning.remat.plan import Plan

__all__ = ["narrowed"]


def narrowed(joint: Joint, plan: Plan, unread: Unread) -> Plan:
    """The part of ``plan`` that runs without what is ``unread``."""
    flow, narrow = plan.flow, _Narrow(joint, plan, unread.missing)
    staying = flow.results.intersection(flow.operations[flow.forward].writes)  # gradients of outputs, before torch 2.13
    results = narrow.stand_ins(flow.results) - unread.released | staying
    steps = narrow.live_steps(results)
    kept = sorted(set(steps))
    place = {index: position for position, index in enumerate(kept)}
    operations = tuple(narrow.operations[index] for index in kept)
    passing = flow.forward_results | unread.released & flow.results
    flow = replace(flow, operations=operations, results=results, forward_results=passing)
    paths = tuple(plan.paths[index] for index in kept)
    return replace(plan, flow=flow, schedule=tuple(place[index] for index in steps), paths=paths, whole=plan)


class _Narrow:
    """The operations that are left, by their index in ``joint``, and what stands for the storages of the others."""

    def __init__(self, joint: Joint, plan: Plan, missing: frozenset[fx.Node]) -> None:
        self._joint, self._plan, self._absent = joint, plan, Absent(joint, missing)
        self.operations: dict[int, Operation] = {}
        arrived = frozenset[int]().union(*(joint.storages[node] for node in joint.tangents if node not in missing))
        absent = frozenset[int]().union(*(joint.storages[node] for node in missing)) - arrived
        self._stands: dict[int, frozenset[int]] = dict.fromkeys(absent, frozenset())
        for index, node in enumerate(joint.nodes):
            operation = self._operation(plan.flow.operations[index], node)
            if operation is not None:
                self.operations[index] = operation

    def stand_ins(self, storages: Iterable[int]) -> frozenset[int]:
        """``storages`` without those of absent values; a sum with one absent part is its other part."""
        return frozenset[int]().union(*(self._stands.get(storage, {storage}) for storage in storages))

    def live_steps(self, results: frozenset[int]) -> Sequence[int]:
        """The steps of the plan but those of its backward that make nothing that is read."""
        schedule, boundary = self._plan.schedule, self._plan.boundary
        first = {schedule[step]: step for step in reversed(range(len(schedule)))}
        needed, live = set(results), []
        for step in reversed(range(len(schedule))):
            index = schedule[step]
            if index not in self.operations:
                continue
            is_first, node = first[index] == step, self._joint.nodes[index]
            run = self.operations[index] if is_first else self.operations[index].repeat
            makes = needed.intersection(run.writes) - (frozenset() if is_first else results)
            if makes or step < boundary or (is_first and (node is None or node.is_impure())):
                live.append(index)
                needed -= makes
                needed.update(run.reads)
        return live[::-1]

    def _operation(self, operation: Operation, node: fx.Node | None) -> Operation | None:
        """``operation`` without its absent inputs. None, if it does not run."""
        if node is None:  # autograd makes zeros of missing gradients, while all that was saved is still there
            return replace(operation, reads=self._plan.memory.saved)
        reads, absent = tuple(self.stand_ins(operation.reads)), self._absent
        if node in absent.nodes:
            self._stands.update(dict.fromkeys(operation.writes, frozenset()))
            return None
        if absent.is_copied(node):
            return replace(operation, reads=reads, workspace_bytes=0)
        if node in absent.same:
            self._stands.update(dict.fromkeys(operation.writes, frozenset(reads)))
            return None
        more = sum(absent.bytes_of(source) for source in node.all_input_nodes if source in absent.nodes)  # zeros
        if self._joint.sums.get(node) in absent.same:  # it is not added in place
            more += absent.bytes_of(node)
        again = operation.substitute and self._operation(operation.substitute, node)
        return replace(
            operation, reads=reads, workspace_bytes=operation.workspace_bytes + more, substitute=again
        )
