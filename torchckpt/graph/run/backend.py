"""Backend: the graph level under ``torch.compile``: Dynamo's graph, our schedule, Inductor's kernels.

Fusion changes memory: an operation that Inductor inlines into a later kernel keeps its inputs alive until then. So the
peak is checked before code is made: Inductor estimates the peak of the kernels that it has decided on. If that is above
the plan's peak, the call is planned again with the difference in reserve. A kernel that overwrites its input in place
counts twice in the estimate, so the estimate is an upper bound. It is close where matrix products and convolutions
dominate.
"""
from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from torchckpt.errors import ArgumentError, BudgetInfeasible, CaptureError, CheckpointError, Fault, called, raise_fault
from torchckpt.features import GRAPH, INDUCTOR
from torchckpt.graph.annotations import hide_marks, restore_marks
from torchckpt.graph.keep import Keep
from torchckpt.graph.planner import Costs, GraphPlanner
from torchckpt.graph.private.dynamo import break_of, by_inductor, by_operator, compile_lock, outer_frame, refreshed
from torchckpt.graph.private.runtime import storage_number
from torchckpt.graph.private.trace import require
from torchckpt.graph.progress import log, stopwatch
from torchckpt.graph.step.compiled import Fusion, Updates
from torchckpt.graph.step.costs import Cost
from torchckpt.graph.step.emit import emit
from torchckpt.graph.step.halves import Halves
from torchckpt.graph.step.joint import Joint, joint_of
from torchckpt.graph.step.repeat import under_autograd
from torchckpt.graph.trace.capture import explained
from torchckpt.planning.budget import Budget
from torchckpt.planning.remat.flow.memory import simulate
from torchckpt.planning.remat.plan import Plan
from torchckpt.tensors import version_of

__all__ = ["Backend", "backend"]

Inner = Literal["inductor", "eager"]

_ATTEMPTS = 8
"""The largest number of plans for one call, each with more bytes in reserve for what fusion adds."""


@called("backend()")
def backend(
    budget: Budget | None = None,
    keep: Keep | Plan = None,
    inner: Inner = "inductor",
    costs: Costs = "roofline",
    rng: Literal["keep", "replay"] = "keep",
    exact: bool = False,
) -> Backend:
    """A ``torch.compile`` backend that trains within a byte budget, or keeps the values that ``keep`` names.

    >>> backend = graph.backend(budget="6GiB")
    >>> model = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    >>> backend.plans                       # one for each graph that was compiled

    Pass ``fullgraph=True``: without it, Dynamo silently runs code that it cannot trace as plain Python, and there is no
    plan. Dynamo traces nothing around ``DistributedDataParallel``: compile the module inside.

    Args:
        budget, keep, costs, exact: as :func:`~torchckpt.graph.rematerialize` takes them.
        inner: ``"inductor"`` compiles the forward and the backward of the schedule: operations are fused, and the last
            bits may differ; ``"eager"`` runs them as they are, bit-equal to the model.
        rng: ``"keep"`` or ``"replay"``, with ``inner="eager"``. Inductor always keeps seeds, of 8 bytes each, and draws
            again from them.

    Raises:
        ArgumentError: an argument breaks a rule.
        CaptureError: at a call: Dynamo has broken the graph, or a size is symbolic.
        BudgetInfeasible: at a call: no schedule was found within the budget.
    """
    if isinstance(budget, fx.GraphModule):  # the user passed graph.backend itself as the backend
        rule = "graph.backend itself is no backend; a call of it returns one"
        works = 'torch.compile(model, backend=graph.backend(budget="6GiB"), fullgraph=True, dynamic=False)'
        return _raising(ArgumentError(str(Fault(rule, "backend=graph.backend", works))), "backend()")
    return Backend(partial(GraphPlanner, keep, budget, costs, rng, exact, {}), inner, told=True)


class Backend:
    """The backend that :func:`backend` returns. ``plans`` has the plan of each compiled graph, in order.

    Args:
        planner: returns a new planner for each graph.
        inner: ``"inductor"`` or ``"eager"``; what runs the planned graph.
        told: whether each graph adds a line to the log.
    """

    def __init__(self, planner: Callable[[], GraphPlanner], inner: Inner = "inductor", told: bool = False) -> None:
        if inner not in ("inductor", "eager"):
            raise_fault(Fault('inner is neither "inductor" nor "eager"', repr(inner), 'inner="inductor"'))
        require(GRAPH)
        if inner == "inductor":
            require(INDUCTOR)
        planner()  # its arguments are checked at once
        self.__name__ = "torchckpt"  # the name in torch.compile's messages
        self.plans: list[Plan] = []
        self.planning_seconds = 0.0  # of the last graph
        self._planner, self._inner, self._told = planner, inner, told

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph. An error of planning is raised at the first call: Dynamo would wrap it in its own error."""
        seconds, planner = stopwatch(), self._planner()
        planner.program = tuple(str(node.target) for node in module.graph.nodes)  # the same for all sizes
        planner.inputs = [place for place, value in enumerate(inputs) if not isinstance(value, nn.Parameter)]
        try:
            _refuse_break(module)
            _refuse_symbols(module)
            with compile_lock(), explained():  # Dynamo has the lock, and other callers have not
                make = _compiled if self._inner == "inductor" else _emitted
                run = make(module, inputs, planner)
        except CheckpointError as error:
            return _raising(error, "backend()" if self._told else "rematerialize()")
        self.planning_seconds = planner.watch.planning_seconds
        plan = getattr(planner, "plan", None)  # where nothing is differentiated, nothing is planned
        if plan is not None:
            self.plans.append(plan)
        if self._told:
            reason = partial("graph {} of torch.compile".format, len(self.plans))
            log("backend()", module, reason, seconds(), self.planning_seconds, plan)
        return _SameOverlaps(run, planner.inputs)


class _SameOverlaps:
    """Calls ``run``, whose graph changes some inputs, and refuses inputs that lie in others of them than at first.

    Dynamo has no guard for that (pytorch/pytorch#139789): without this, the call would read the old values of a buffer
    that it changes. Ends when it has one.
    """

    def __init__(self, run: Callable[..., Any], places: Collection[int]) -> None:
        self._run, self._places = run, tuple(places)
        self._changed: tuple[int, ...] | None = None  # places; None before the first call
        self._overlaps = set[tuple[int, int]]()

    def __call__(self, *inputs: Any) -> Any:
        if self._changed and self._overlaps_of(inputs) != self._overlaps:
            rule = "an input lies in a buffer that the call changes in some calls of the compiled graph, not in all"
            received = "one that does not, after one that did" if self._overlaps else "one that does"
            raise CaptureError(str(Fault(rule, received, "x = x.clone() before the call")))
        is_first = self._changed is None
        tensors = [place for place in self._places if isinstance(inputs[place], Tensor)] if is_first else []
        versions = {place: version_of(inputs[place]) for place in tensors}
        outputs = self._run(*inputs)
        if is_first:
            self._changed = tuple(place for place, version in versions.items() if version_of(inputs[place]) != version)
            self._overlaps = self._overlaps_of(inputs)
        self._refuse_views(inputs, outputs)
        return outputs

    def _refuse_views(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Refuse a view of an input that is a part of a changed one: AOTAutograd makes it of the whole."""
        for changed, place in self._overlaps:
            known = [_layout(inputs[changed]), _layout(inputs[place])]
            storage = storage_number(inputs[place])
            views = [output for output in outputs if isinstance(output, Tensor) and storage_number(output) == storage]
            if known[0] != known[1] and any(_layout(view) not in known for view in views):
                rule = "the call changes a buffer, and returns a view of an input that is a part of it"
                received = f"an input of shape {tuple(inputs[place].shape)}, of which a view is returned"
                raise CaptureError(str(Fault(rule, received, "x = x.clone() before the call")))

    def _overlaps_of(self, inputs: Sequence[Any]) -> set[tuple[int, int]]:
        """The pairs of a changed input and another one that share a storage."""
        if not self._changed:
            return set()
        tensors = {place: inputs[place] for place in self._places if isinstance(inputs[place], Tensor)}
        storages = {place: storage_number(tensor) for place, tensor in tensors.items()}
        pairs = ((changed, place) for changed in self._changed for place in storages if place != changed)
        return {(changed, place) for changed, place in pairs if storages[place] == storages[changed]}


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def _emitted(module: fx.GraphModule, inputs: Sequence[Any], planner: GraphPlanner) -> Callable[..., Any]:
    halves = Halves(planner.cost, planner, planner.replay)
    run = by_operator(module, inputs, halves.partition, halves.backward)

    def call(*inputs: Any) -> Any:
        outputs = run(*inputs)
        halves.watch(outputs)
        return outputs

    return call


def _compiled(module: fx.GraphModule, inputs: Sequence[Any], planner: GraphPlanner) -> Callable[..., Any]:
    try:
        return _fitted(module, inputs, planner)
    except BudgetInfeasible as error:
        infeasible = error
    for _ in range(_ATTEMPTS):  # the least of a plan is not that of its kernels
        try:
            _fitted(module, inputs, planner.within(int(infeasible.least_bytes)))
        except BudgetInfeasible as error:
            infeasible = error
        else:
            break
    raise infeasible


def _fitted(
    module: fx.GraphModule, inputs: Sequence[Any], planner: GraphPlanner, room_bytes: float | None = None
) -> Callable[..., Any]:
    """The compiled graph. Its kernels may need ``room_bytes``; by default those of the budget."""

    def workspace_bytes(node: fx.Node) -> int:
        return planner.cost(node).workspace_bytes

    reserve_bytes = 0
    for _ in range(_ATTEMPTS):
        attempt = _Attempt(planner, reserve_bytes, room_bytes)
        hooks = attempt.partition, hide_marks, attempt.watch, workspace_bytes
        try:
            run = by_inductor(copy.deepcopy(module), inputs, *hooks)
        except _Exceeds as error:
            reserve_bytes += error.args[0]
        except BudgetInfeasible as error:
            if reserve_bytes and room_bytes is None:  # kernels of the least plan may need less than those of others
                least = planner.within(int(error.least_bytes) - reserve_bytes)
                with suppress(BudgetInfeasible):
                    run = _fitted(module, inputs, least, planner.room_bytes)
                    planner.plan = replace(least.plan, budget_bytes=planner.plan.budget_bytes)
                    return run
            raise
        else:
            if hasattr(planner, "plan"):
                planner.plan = planner.plan.lowered(attempt.spare_bytes)
            return run
    rule = "Inductor allocates more than the planned bytes"
    received = f"{reserve_bytes} bytes more, after {_ATTEMPTS} plans"
    works = 'graph.backend(inner="eager"); or graph.rematerialize(model, engine="eager")'
    raise CaptureError(str(Fault(rule, received, works)))


class _Exceeds(Exception):
    """The compiled graphs need so many bytes more than the plan, and there is no room for them."""


class _Attempt:
    """One attempt: plan with ``reserve_bytes`` added to each operation, compile, and compare the kernels' peak."""

    def __init__(self, planner: GraphPlanner, reserve_bytes: int, room_bytes: float | None) -> None:
        self._planner, self._reserve_bytes, self._room_bytes = planner, reserve_bytes, room_bytes
        self._planned_bytes, self._needed_bytes = 0, 0

    @property
    def spare_bytes(self) -> int:
        """Planned bytes that the kernels do not need, as Inductor counts: it fuses more than the plan assumes. Below 0
        they need more."""
        return self._planned_bytes - self._needed_bytes

    def partition(
        self, module: fx.GraphModule, inputs: Sequence[Any], *, num_fwd_outputs: int, **ignored: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        restore_marks(module.graph)
        updates = Updates(module.graph, num_fwd_outputs)
        joint = joint_of(refreshed(module), num_fwd_outputs + updates.values, self._cost)
        fusion = Fusion(joint)
        schedule = self._planner(fusion.joint)
        memory = simulate(fusion.joint.flow, schedule)
        self._planned_bytes, self._unseen_bytes = memory.peak_bytes, _unseen_bytes(joint, memory.saved)
        self._room_bytes = self._planner.room_bytes if self._room_bytes is None else self._room_bytes
        expanded = fusion.expanded(schedule)
        forward, backward = emit(joint, expanded, simulate(joint.flow, expanded).boundary)
        updates.write(forward.graph)
        return _plain(forward), _plain(backward)

    def _cost(self, node: fx.Node) -> Cost:
        """The cost of an operation under fusion. One without FLOPs is mostly fused: only its shapes count."""
        cost = self._planner.cost(node)
        if cost.flops:
            return cost._replace(workspace_bytes=self._reserve_bytes + cost.workspace_bytes)
        return cost._replace(workspace_bytes=self._reserve_bytes, made_bytes=())

    def watch(self, is_backward: bool, peak_bytes: int) -> None:
        needed_bytes = peak_bytes + (self._unseen_bytes if is_backward else 0)
        self._needed_bytes = max(self._needed_bytes, needed_bytes)
        if self._room_bytes is not None and needed_bytes > self._room_bytes:  # it is None where nothing is planned
            raise _Exceeds(needed_bytes - self._planned_bytes)


def _unseen_bytes(joint: Joint, saved: Sequence[int]) -> int:
    """Bytes alive in the backward that Inductor does not count: gradients of outputs, and outputs that it does not
    read."""
    flow = joint.flow
    writes = [s for operation in flow.operations[: flow.forward] for s in operation.writes]
    arriving = flow.operations[flow.forward].writes if joint.tangents else ()
    return sum(flow.sizes_bytes[s] for s in {*arriving, *flow.results.intersection(writes)} - set(saved))


def _plain(module: fx.GraphModule) -> fx.GraphModule:
    """``module`` in the form that Inductor takes: standard calls, nothing in place, the joint graph's input names."""
    for node in module.graph.nodes:
        if node.op == "placeholder" and node.name.startswith("saved_primals"):
            node.target = node.name = node.name.removeprefix("saved_")
        elif node.target is torch.ops.aten.mul_.Tensor:
            node.target = torch.ops.aten.mul.Tensor
        elif node.target is under_autograd:
            node.target, node.args = node.args[0], node.args[1:]
    module.graph.set_codegen(fx.graph.CodeGen())
    module.recompile()
    return module


def _refuse_break(module: fx.GraphModule) -> None:
    graph_break, outside = break_of(module), outer_frame()
    works = "torch.compile(model, backend=..., fullgraph=True), which says what breaks it; or graph.rematerialize()"
    if graph_break is not None:
        reason, place = graph_break
        received = f"a break {place}: {reason.splitlines()[0]}"
    elif outside is not None:
        received = f"a function by itself, called {outside}"
    else:
        return
    if "optimize_ddp" in received:
        received = "the buckets of DistributedDataParallel, a graph for each"
        works = "torch._dynamo.config.optimize_ddp = False; or DistributedDataParallel(graph.rematerialize(model, ...))"
    rule = "Dynamo has broken the graph: each part would use the whole budget"
    raise CaptureError(str(Fault(rule, received, works)))


def _refuse_symbols(module: fx.GraphModule) -> None:
    for node in module.graph.nodes:
        values = pytree.tree_leaves(node.meta.get("example_value"))
        sizes = [size for value in values for size in (value.shape if isinstance(value, Tensor) else [value])]
        symbols = [size for size in sizes if isinstance(size, torch.SymInt)]
        if symbols:
            rule = "a size is not known when the call is compiled, so its bytes cannot be counted"
            works = "torch.compile(model, backend=..., dynamic=False): each shape is compiled, and planned, on its own"
            raise CaptureError(str(Fault(rule, f"{node.name} has the size {symbols[0]}", works)))


def _raising(error: CheckpointError, function: str) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        with called(function):
            raise error

    return run
