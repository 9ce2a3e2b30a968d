"""Backend: the graph level under ``torch.compile``: Dynamo's graph, our schedule, Inductor's kernels.

A compiler that fuses moves work, and so memory: what it inlines into a later kernel keeps its inputs alive until then.
So a plan is not taken at its word. Inductor is asked, before it makes code, for the peak of the kernels that it has
decided on; where that is above the plan's, the call is planned again with so much in reserve. What a kernel writes over
its input, in place, counts twice in that peak: it is a bound, and near where products and convolutions are.
"""
from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from torchckpt.errors import ArgumentError, CaptureError, CheckpointError, Fault, raise_faults
from torchckpt.features import GRAPH, INDUCTOR
from torchckpt.graph.again import under_autograd
from torchckpt.graph.capture import explained
from torchckpt.graph.choose import Chooser, Costs
from torchckpt.graph.costs import Cost
from torchckpt.graph.emit import emit
from torchckpt.graph.fusion import Fusion
from torchckpt.graph.joint import Joint, joint_of
from torchckpt.graph.keep import Keep
from torchckpt.graph.notes import hide_marks, restore_marks
from torchckpt.graph.private.dynamo import break_of, by_operator, outer_frame, refreshed
from torchckpt.graph.private.inductor import by_inductor
from torchckpt.graph.private.trace import require
from torchckpt.graph.progress import Stopwatch, Watch, log
from torchckpt.graph.updates import Updates
from torchckpt.model.remat.budget import Budget
from torchckpt.model.remat.dataflow import Schedule
from torchckpt.model.remat.memory import simulate
from torchckpt.model.remat.plan import Plan

__all__ = ["Backend", "Planner", "backend"]

Inner = Literal["inductor", "eager"]

_ATTEMPTS = 8
"""How often a call is planned again, with more in reserve for what fusion adds."""


class Planner(Protocol):
    """What plans one joint graph, such as a :class:`~torchckpt.graph.choose.Chooser`."""

    plan: Plan
    replay: bool
    inputs: Collection[int]
    watch: Watch

    def cost(self, node: fx.Node) -> Cost: ...

    def __call__(self, joint: Joint) -> Schedule: ...


def backend(
    budget: Budget | None = None,
    keep: Keep | Plan = None,
    inner: Inner = "inductor",
    costs: Costs = "roofline",
    rng: Literal["keep", "replay"] = "keep",
    exact: bool = False,
) -> Backend:
    """A backend of ``torch.compile`` that holds a byte budget, or keeps what it is told to.

    >>> backend = graph.backend(budget="6GiB")
    >>> model = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    >>> backend.plans                       # one of each graph that was compiled

    What Dynamo cannot trace it runs as it is, without a word, unless it is told ``fullgraph=True``: then there is no
    plan. Around ``DistributedDataParallel`` it traces nothing: compile what is inside.

    Args:
        budget, keep, costs, exact: as :func:`~torchckpt.graph.rematerialize` takes them.
        inner: ``"inductor"`` compiles the forward and the backward of the schedule: operations are fused, and the last
            bits may differ; ``"eager"`` runs them as they are, bit-equal to the model.
        rng: ``"keep"`` or ``"replay"``, with ``inner="eager"``. Inductor keeps seeds, of eight bytes, and draws again.

    Raises:
        ArgumentError: an argument breaks a rule.
        CaptureError: at a call: Dynamo has broken the graph, or its sizes are not known.
        BudgetInfeasible: at a call: no schedule was found within the budget.
    """
    if isinstance(budget, fx.GraphModule):  # it is a backend itself
        rule = "graph.backend() returns a backend, and is none"
        works = 'torch.compile(model, backend=graph.backend(budget="6GiB"), fullgraph=True, dynamic=False)'
        return _raising(ArgumentError(f"backend(): {Fault(rule, 'backend=graph.backend', works)}"))
    return Backend(partial(Chooser, "backend()", keep, budget, costs, rng, exact), inner, told=True)


class Backend:
    """What :func:`backend` returns. ``plans`` are those of the graphs that were compiled, in their order.

    Args:
        planner: makes what plans a graph.
        inner: what runs it.
        told: whether each graph is a line in the log.
    """

    def __init__(self, planner: Callable[[], Planner], inner: Inner = "inductor", told: bool = False) -> None:
        if inner not in ("inductor", "eager"):
            raise_faults("backend()", [Fault('inner is "inductor" or "eager"', repr(inner), 'inner="inductor"')])
        require(GRAPH)
        if inner == "inductor":
            require(INDUCTOR)
        planner()  # its arguments are checked at once
        self.__name__ = "torchckpt"  # what torch.compile's messages call it
        self.plans: list[Plan] = []
        self.planning_seconds = 0.0  # of the last graph
        self._planner, self._inner, self._told = planner, inner, told

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Raise at the first call what compiling raised: Dynamo would wrap it in an error of its own."""
        watch, planner = Stopwatch(), self._planner()
        planner.inputs = [place for place, given in enumerate(inputs) if not isinstance(given, nn.Parameter)]
        try:
            _refuse_break(module)
            _refuse_symbols(module)
            with explained():
                make = _compiled if self._inner == "inductor" else _emitted
                run = make(module, inputs, planner)
        except CheckpointError as error:
            return _raising(error)
        self.planning_seconds = planner.watch.planning_seconds
        plan = getattr(planner, "plan", None)  # where nothing is differentiated, nothing is planned
        if plan is not None:
            self.plans.append(plan)
        if self._told:
            number = f"graph {len(self.plans)} of torch.compile"
            log("backend()", module, number, watch.seconds, self.planning_seconds, plan)
        return run


def _emitted(module: fx.GraphModule, inputs: Sequence[Any], planner: Planner) -> Callable[..., Any]:
    def partition(
        module: fx.GraphModule, inputs: Sequence[Any], *, num_fwd_outputs: int, **ignored: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        joint = joint_of(module, num_fwd_outputs, planner.cost, planner.replay)
        schedule = planner(joint)
        return emit(joint, schedule, simulate(joint.flow, schedule).boundary)

    return by_operator(module, inputs, partition)


def _compiled(module: fx.GraphModule, inputs: Sequence[Any], planner: Planner) -> Callable[..., Any]:
    reserve_bytes = 0
    for _ in range(_ATTEMPTS):
        attempt = _Attempt(planner, reserve_bytes)
        try:
            run = attempt.compiled(copy.deepcopy(module), inputs)
        except _Exceeds as found:
            reserve_bytes += found.excess_bytes
        else:
            if hasattr(planner, "plan"):
                planner.plan = planner.plan.lowered(attempt.spare_bytes)
            return run
    rule = "what Inductor allocates is what is planned, or less"
    received = f"{reserve_bytes} bytes more, after {_ATTEMPTS} plans"
    raise CaptureError(str(Fault(rule, received, 'a larger budget; or inner="eager"')))


class _Exceeds(Exception):
    """The compiled graphs need so many bytes more than were planned."""

    def __init__(self, excess_bytes: int) -> None:
        super().__init__(excess_bytes)
        self.excess_bytes = excess_bytes


class _Attempt:
    """A joint graph, a schedule of it with ``reserve_bytes`` beside each operation, and what its kernels allocate."""

    def __init__(self, planner: Planner, reserve_bytes: int) -> None:
        self._planner, self._reserve_bytes = planner, reserve_bytes
        self._planned_bytes = self._needed_bytes = 0

    @property
    def spare_bytes(self) -> int:
        """What was planned and is not needed, as Inductor counts it: it fuses more than was thought."""
        return self._planned_bytes - self._needed_bytes

    def compiled(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return by_inductor(module, inputs, self._partition, hide_marks, self._watch, self._workspace_bytes)

    def _partition(
        self, module: fx.GraphModule, inputs: Sequence[Any], *, num_fwd_outputs: int, **ignored: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        restore_marks(module.graph)
        updates = Updates(module.graph, num_fwd_outputs)
        joint = joint_of(refreshed(module), num_fwd_outputs + updates.values, self._cost)
        fusion = Fusion(joint)
        schedule = self._planner(fusion.joint)
        memory = simulate(fusion.joint.flow, schedule)
        self._planned_bytes, self._unseen_bytes = memory.peak_bytes, _unseen_bytes(joint, memory.saved)
        expanded = fusion.expanded(schedule)
        forward, backward = emit(joint, expanded, simulate(joint.flow, expanded).boundary)
        updates.write(forward.graph)
        return _plain(forward), _plain(backward)

    def _cost(self, node: fx.Node) -> Cost:
        """What is no product and no convolution is fused, most of it, and allocates what its shapes say."""
        cost = self._planner.cost(node)
        if cost.flops:
            return cost._replace(workspace_bytes=self._reserve_bytes + cost.workspace_bytes)
        return cost._replace(workspace_bytes=self._reserve_bytes, made_bytes=())

    def _workspace_bytes(self, node: fx.Node) -> int:
        return self._planner.cost(node).workspace_bytes

    def _watch(self, is_backward: bool, peak_bytes: int) -> None:
        needed_bytes = peak_bytes + (self._unseen_bytes if is_backward else 0)
        self._needed_bytes = max(self._needed_bytes, needed_bytes)
        if needed_bytes > self._planned_bytes:
            raise _Exceeds(needed_bytes - self._planned_bytes)


def _unseen_bytes(joint: Joint, saved: Sequence[int]) -> int:
    """Alive in the backward, though the compiler does not count it: gradients of outputs, outputs that it reads not."""
    flow = joint.flow
    writes = [s for operation in flow.operations[: flow.forward] for s in operation.writes]
    arriving = flow.operations[flow.forward].writes if joint.tangents else ()
    return sum(flow.sizes_bytes[s] for s in {*arriving, *flow.results.intersection(writes)} - set(saved))


def _plain(module: fx.GraphModule) -> fx.GraphModule:
    """As a compiler wants it: a call like any other, nothing in place, inputs of the joint graph by their names."""
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
    found, outside = break_of(module), outer_frame()
    works = "torch.compile(model, backend=..., fullgraph=True), which says what breaks it; or graph.rematerialize()"
    if found is not None:
        received = f"a break {found[1]}: {found[0].splitlines()[0]}"
    elif outside is not None:
        received = f"a function by itself, called {outside}"
    else:
        return
    if "optimize_ddp" in received:
        received = "the buckets of DistributedDataParallel, a graph for each"
        works = "torch._dynamo.config.optimize_ddp = False; or DistributedDataParallel(graph.rematerialize(model, ...))"
    rule = "a schedule is that of one graph, and a budget too: each part of a graph that breaks would take it whole"
    raise CaptureError(str(Fault(rule, received, works)))


def _refuse_symbols(module: fx.GraphModule) -> None:
    for node in module.graph.nodes:
        sizes = [size for value in pytree.tree_leaves(_value_of(node)) for size in _sizes(value)]
        symbols = [size for size in sizes if not isinstance(size, int)]
        if symbols:
            rule = "bytes are counted for sizes that are known when the call is compiled"
            works = "torch.compile(model, backend=..., dynamic=False): each shape is compiled, and planned, on its own"
            raise CaptureError(str(Fault(rule, f"{node.name} has the size {symbols[0]}", works)))


def _value_of(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _sizes(value: Any) -> Iterable[Any]:
    return value.shape if isinstance(value, Tensor) else [value] if isinstance(value, torch.SymInt) else []


def _raising(error: CheckpointError) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        raise error

    return run
