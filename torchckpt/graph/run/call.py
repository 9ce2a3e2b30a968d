"""Call: a module's call, traced for one kind of inputs, and run from the trace afterwards."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from torchckpt.errors import CaptureError, Fault
from torchckpt.graph.annotations import named_modules
from torchckpt.graph.choose.planner import GraphPlanner
from torchckpt.graph.private.dynamo import compiling_whole, recompile_limit_hit
from torchckpt.graph.progress import log_unread
from torchckpt.graph.run.backend import Backend, version_of
from torchckpt.graph.step.joint import Joint
from torchckpt.graph.step.partial import Absent, Unread
from torchckpt.graph.trace.capture import TRACE_LOCK, Capture, Halves
from torchckpt.graph.trace.guard import argument_names, places_of
from torchckpt.graph.trace.side_effects import restoring_modules
from torchckpt.planning.remat.flow.dataflow import Operation
from torchckpt.planning.remat.plan import Plan

__all__ = ["Call", "CompiledCall", "inputs_of", "state_of"]


class Call:
    """A traced call of a model, for one kind of inputs; what runs is ``run``: ``model`` itself, or a module that shares
    its contents."""

    def __init__(
        self, model: nn.Module, run: nn.Module, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any],
        planner: GraphPlanner,
    ) -> None:
        self._model, self._run, self._names = model, run, names
        leaves, self._structure = pytree.tree_flatten((args, kwargs))
        self._leaves = [Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves]  # keeps no tensor alive
        tensors = inputs_of(state_of(model), leaves)
        self._places = places_of(tensors[: len(names)], tensors[len(names) :])
        self._firsts = [self._places.index(place) for place in range(max(self._places, default=-1) + 1)]
        paths = (path for path, leaf in argument_names(args, kwargs) if isinstance(leaf, Tensor))
        data = dict(zip(self._places[len(names) :], paths))
        planner.inputs = frozenset(data)
        self.halves = Halves(planner.cost, planner, planner.replay, self._note)
        distinct = [tensors[first] for first in self._firsts]
        with restoring_modules(model), planner.watch.tracing(type(model).__name__) as tell:
            self._capture = Capture(self._function, distinct, data, self.halves, tell)
        self._capture.witness.refuse_left()
        plan: Plan | None = getattr(planner, "plan", None)
        self._plans = {Unread(): plan}  # by what a backward went without
        self._noted = {Unread().missing}
        self.planning_seconds = planner.watch.planning_seconds

    @property
    def plan(self) -> Plan | None:
        """The plan, as the latest backward ran it; None where nothing is differentiated."""
        unread, whole = self.halves.unread, self._plans[Unread()]
        if whole is not None and unread not in self._plans:
            self._plans[unread] = _narrowed(self.halves.joint, whole, unread)
        return self._plans[unread]

    def _note(self, unread: Unread) -> None:
        """Log a backward the first time that it goes without these gradients."""
        if unread.missing not in self._noted:
            self._noted.add(unread.missing)
            log_unread(self._model, len(unread.missing), lambda: self.plan)

    def __call__(self, tensors: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call. ``tensors`` are the parameters and buffers, then the tensors among the arguments."""
        outputs, replaced = self._capture([tensors[first] for first in self._firsts])
        if replaced:
            with TRACE_LOCK.calling():  # a trace at the same time would undo this
                for name, value in replaced.items():
                    owner, _, buffer = name.rpartition(".")
                    setattr(self._model.get_submodule(owner), buffer, value)
        return outputs

    def _function(self, *tensors: Tensor) -> Any:
        every = [tensors[place] for place in self._places]
        state, data = dict(zip(self._names, every)), iter(every[len(self._names) :])
        leaves = [next(data) if leaf is Tensor else leaf for leaf in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        replaced: dict[str, Tensor] = {}
        with named_modules(self._run, lambda: replaced.update(_replaced(self._run, state))):
            return torch.func.functional_call(self._run, state, args, kwargs), replaced


class CompiledCall:
    """A call compiled by Dynamo and Inductor, which choose the compiled code by the arguments of each call."""

    def __init__(self, model: nn.Module, backend: Backend, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._run = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
        with torch.random.fork_rng(), _keeping_buffers(model), compiling_whole():
            self._run(*args, **kwargs)
        self.plan: Plan | None = backend.plans[-1] if backend.plans else None
        self.planning_seconds = backend.planning_seconds

    def __call__(self, tensors: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return self._run(*args, **kwargs)
        except recompile_limit_hit():  # something else has changed that Dynamo looks at, as its own reset
            with compiling_whole():
                return self._run(*args, **kwargs)


@contextmanager
def _keeping_buffers(model: nn.Module) -> Iterator[None]:
    """Run a forward inside this context; afterwards ``model`` has its buffers, with their values. One that was not
    changed is not written to: graphs that saved it wait for their backward."""
    owned = [(module, dict(module._buffers)) for module in model.modules()]
    before = [(buffer, version_of(buffer), buffer.detach().clone()) for buffer in model.buffers()]
    yield
    for module, buffers in owned:
        module._buffers.update(buffers)
    with torch.no_grad():
        for buffer, version, value in before:
            if version_of(buffer) != version:
                buffer.copy_(value)


def _replaced(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The new values, by name, of buffers that the forward has replaced, as in ``self.mean = ...``."""
    now = {name: buffer for name, buffer in model.named_buffers() if state.get(name, buffer) is not buffer}
    for name, buffer in now.items():
        before = state[name]
        if (before.shape, before.dtype) != (buffer.shape, buffer.dtype):
            rule = "the forward replaces a buffer by one of another shape or dtype"
            received = f"{name}: {tuple(before.shape)} became {tuple(buffer.shape)}"
            raise CaptureError(str(Fault(rule, received, f"self.{name}.copy_(value)")))
    return {name: buffer.detach() for name, buffer in now.items()}


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def inputs_of(state: dict[str, Tensor], leaves: Sequence[Any]) -> list[Tensor]:
    """The tensors that a trace takes: the state, then the tensors among the arguments."""
    return [*state.values(), *(leaf for leaf in leaves if isinstance(leaf, Tensor))]


def _narrowed(joint: Joint, plan: Plan, unread: Unread) -> Plan:
    """The part of ``plan`` that a backward runs without what is ``unread``.

    The forward stays that of all outputs, since a loss may read them at the next call. What it saves for the missing
    gradients alone is freed when the backward starts.
    """
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
