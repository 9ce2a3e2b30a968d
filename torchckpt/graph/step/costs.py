"""Costs: seconds, FLOPs and bytes of an operation: counted from its shapes, measured in a run of it, or given."""
from __future__ import annotations

import operator
import time
import warnings
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from torchckpt.errors import named, text_of
from torchckpt.graph.private.runtime import (
    allocations,
    branches_of,
    is_branching,
    is_check,
    is_collective,
    is_mutable,
    parts_of,
    signed,
    storage_number,
    without_modes,
)
from torchckpt.graph.private.surroundings import without_autocast
from torchckpt.graph.step.repeat import generator_state, replayed
from torchckpt.tensors import flop_formula, tensors_in

__all__ = ["Cost", "CostOf", "Costs", "Measure", "cost_of", "flops_of", "roofline", "with_seconds"]


_Kind: TypeAlias = tuple[torch.dtype, tuple[int, ...]]
"""The dtype and shape of a tensor."""


class Cost(NamedTuple):
    """The cost of one operation. What stands behind ``flops`` is known where it was run.

    ``workspace_bytes`` are allocated at the highest point beside the outputs. For each returned tensor, ``made_bytes``
    has the bytes of its storage (0 if an earlier one shares it), and ``kinds`` its kind. ``draws`` says whether random
    numbers were drawn although the operator is not tagged as random.
    """

    seconds: float = 0.0
    flops: int = 0
    workspace_bytes: int = 0
    made_bytes: tuple[int, ...] = ()
    draws: bool = False
    kinds: tuple[_Kind | None, ...] = ()


CostOf: TypeAlias = Callable[[fx.Node], Cost]
"""Returns the cost of an operation, given its node."""

_FLOPS_PER_BYTE = {"cpu": 10.0, "cuda": 20.0}
"""FLOPs in float32 that a device computes while it moves one byte: a CPU with AVX2, an H100 (its data sheet)."""

Costs: TypeAlias = "str | Mapping[str, float]"
"""``"roofline"``, ``"profile"``, or seconds by the names of operators."""


def cost_of(node: fx.Node, measure: Measure, costs: Costs = "roofline") -> Cost:
    """The cost of an operation, with what shapes do not tell and a run on made-up numbers does."""
    run = measure.of(node)
    if costs == "profile":
        return run._replace(flops=flops_of(node))
    seconds, flops, *_ = roofline(node) if isinstance(costs, str) else with_seconds(node, costs)
    return run._replace(seconds=seconds, flops=flops)


def roofline(node: fx.Node) -> Cost:
    """Seconds and FLOPs, counted from shapes. The workspace is 0: it is known only after a run.

    The seconds are the larger of the time to compute and the time to move bytes (the roofline model, Williams 2009), on
    a device that moves one gigabyte per second: memory bounds pointwise operations, arithmetic bounds matrix products.
    """
    flops = flops_of(node)
    seconds = max(_moved_bytes(node), flops / _FLOPS_PER_BYTE.get(_device(node), 20.0)) * 1e-9
    return Cost(seconds, flops)


def with_seconds(node: fx.Node, seconds: Mapping[str, float]) -> Cost:
    """A cost with the user's seconds, by operator (``aten.mm``, ``aten.mm.default``) or node name; else counted."""
    target = str(node.target)
    for name in (node.name, target, target.rpartition(".")[0]):
        if name in seconds:
            return Cost(float(seconds[name]), flops_of(node))
    return roofline(node)


def flops_of(node: fx.Node) -> int:
    """FLOPs of matrix products, convolutions and attention, as torch counts them; 0 for other operations.

    Control flow counts as its branch with the most FLOPs.
    """
    branches = [sum(map(flops_of, branch.graph.nodes)) for branch in branches_of(node)]
    if branches:
        return max(branches)
    count = flop_formula(getattr(node.target, "overloadpacket", None))
    if count is None:
        return 0
    values = fx.node.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    arguments, named = cast(tuple[Any, Any], values)
    return int(count(*arguments, **named, out_val=node.meta["val"]))


def _moved_bytes(node: fx.Node) -> int:
    """The bytes of the tensors that ``node`` reads and writes, by their shapes."""
    tensors = [tensor for part in (*node.all_input_nodes, node) for tensor in tensors_in(part.meta.get("val"))]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _device(node: fx.Node) -> str:
    return next((tensor.device.type for tensor in tensors_in(node.meta.get("val"))), "cpu")


# a run ----------------------------------------------------------------------------------------------------------------


_SEEN = "seen"
"""Key in a node's ``meta``: the kinds of tensors that its operation returned in a run."""


class Measure:
    """Measures operations, once for each combination of shapes, strides, dtypes, devices and constants.

    A kernel may copy its input to another layout, or hold one buffer for each thread. Shapes do not tell this, so the
    kernel is run on random numbers, with all integers 0, and again with all integers 1; the larger result counts. (An
    embedding bag without words allocates nothing, for example.) If the kernel raises on both, a copy of all its inputs
    and outputs is assumed as its workspace, and a warning says so.

    Args:
        rounds: how often an operation is timed; the least time counts. Default: 0, it is run but not timed.
    """

    def __init__(self, rounds: int = 0) -> None:
        self._rounds = rounds
        self._measured: dict[Hashable, Cost] = {}

    def of(self, node: fx.Node) -> Cost:
        key = _signature(node)
        if key not in self._measured:
            self._measured[key] = self._run(node)
        node.meta[_SEEN] = self._measured[key].kinds
        return self._measured[key]

    def _run(self, node: fx.Node) -> Cost:
        target = node.target
        if not callable(target) or is_collective(target) or is_mutable(target):
            return Cost()
        # An assertion may fail on made-up numbers, which stops a GPU for good. Meta tensors have no bytes.
        if is_check(target) or "meta" in map(_device, [node, *node.all_input_nodes]):
            return Cost()
        runs, refused = list[Cost](), ""
        for whole in (0, 1) if _may_be_ones(node) else (0,):
            try:
                with without_modes(), without_autocast(), torch.no_grad(), torch.random.fork_rng():
                    runs += self._runs_on(node, whole)
            except Exception as error:  # made-up numbers may be invalid arguments
                if "Profiler is already enabled" in text_of(error):  # torch allows one profiler at a time
                    return Cost()
                refused = refused or named(error).splitlines()[0]
        if runs:
            return max(runs, key=lambda run: run.workspace_bytes)._replace(
                seconds=max(run.seconds for run in runs),
                made_bytes=tuple(map(max, zip(*(run.made_bytes for run in runs)))),
                kinds=runs[0].kinds,
                draws=any(run.draws for run in runs),
            )
        warnings.warn(
            f"{node.target} cannot be measured: on made-up numbers it raises {refused}; "
            "its workspace counts as a copy of all that it reads and writes", stacklevel=2,
        )
        return Cost(workspace_bytes=_moved_bytes(node))

    def _runs_on(self, node: fx.Node, whole: int) -> list[Cost]:
        """Measure runs on random numbers, with all integers equal to ``whole``; one run for each branch."""
        value = partial(_followed if "rnn" in str(node.target) else _made_up, whole=whole)
        arguments, named = fx.node.map_arg((node.args, node.kwargs), value)
        if node.target is replayed:
            arguments = (generator_state(str(arguments[1])), *arguments[1:])  # random bytes are not a valid state
        inputs = set(map(storage_number, tensors_in((arguments, named))))
        target = cast(Callable[..., Any], node.target)
        ways = [(torch.tensor(way), *arguments[1:]) for way in (True, False)] if is_branching(target) else [arguments]
        return [self._measure(partial(target, *values, **named), inputs, _device(node)) for values in ways]

    def _measure(self, run: Callable[[], Any], inputs: set[int], device: str) -> Cost:
        """Measure one run. ``inputs`` are the storages that it reads, which are not counted as made."""
        before, results = generator_state(device), list[Any]()
        seconds = min((_timed(run) for _ in range(self._rounds)), default=0.0)
        changes = allocations(lambda: results.append(run()), device)
        workspace_bytes = max(accumulate(changes), default=0) - sum(changes)
        known, sizes = set(inputs), []
        for tensor in tensors_in(results):
            parts = parts_of(tensor)
            is_new = any(storage_number(part) not in known for part in parts)
            sizes.append(sum(part.untyped_storage().nbytes() for part in parts) if is_new else 0)
            known.update(map(storage_number, parts))
        leaves = pytree.tree_leaves(results)
        kinds = tuple((leaf.dtype, tuple(leaf.shape)) if isinstance(leaf, Tensor) else None for leaf in leaves)
        draws = not torch.equal(before, generator_state(device))
        return Cost(seconds, 0, workspace_bytes, tuple(sizes), draws, kinds)


def _timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter() - start


def _signature(node: fx.Node) -> Hashable:
    """The operator, and its arguments with shapes, dtypes and devices in place of values."""
    return node.target, repr(fx.node.map_arg((node.args, node.kwargs), lambda used: _kinds(_likely(used))))


def _kinds(value: Any) -> str:
    if isinstance(value, fx.GraphModule):
        return f"graph {id(value)}"
    return repr(pytree.tree_map_only(Tensor, _kind, value))


def _kind(tensor: Tensor) -> Hashable:
    if tensor.layout != torch.strided:
        return tuple(tensor.shape), tensor.dtype, tensor.device
    signs = tensor.is_conj(), tensor.is_neg()
    return tuple(tensor.shape), tensor.stride(), tensor.untyped_storage().nbytes(), tensor.dtype, tensor.device, signs


# made-up values -------------------------------------------------------------------------------------------------------


def _followed(node: fx.Node, whole: int) -> Any:
    """The value of ``node``: really computed for a recurrent layer, whose backward reads its buffer; else made up."""
    views = [node]
    while views[-1].op == "call_function" and len(views[-1].all_input_nodes) == 1:
        views.append(views[-1].all_input_nodes[0])
    layer = views.pop()
    name = str((layer.target, *layer.args[:1])) if layer.op == "call_function" else ""
    if "rnn" not in name or "backward" in name:
        return _made_up(node, whole)
    values: dict[fx.Node, Any] = {}
    for step in (layer, *reversed(views)):
        arguments = fx.node.map_arg(step.args, lambda used: values[used] if used in values else _made_up(used, whole))
        values[step] = cast(Callable[..., Any], step.target)(*arguments)
    return values[node]


def _likely(node: fx.Node) -> Any:
    """The traced value of ``node``, with the dtype and shape that its operation returned in a run.

    The two may differ. A layer norm's statistics are traced in the dtype of its data, but a CPU makes them in the dtype
    of its weights. The offsets of an embedding bag are traced as empty.
    """
    value: Any = node.meta.get("val")
    if not isinstance(value, Tensor):
        return value
    seen = _seen(node)
    dtype = _seen_dtype(node) or value.dtype
    value = value if value.dtype == dtype else value.to(dtype)
    return value if seen is None or value.numel() else value.new_empty(seen[1])


def _seen(node: fx.Node) -> _Kind | None:
    source, place = cast(tuple[fx.Node, int], node.args) if node.target is operator.getitem else (node, 0)
    seen: tuple[_Kind | None, ...] = source.meta.get(_SEEN) or ()
    return seen[place] if seen else None


def _seen_dtype(node: fx.Node) -> torch.dtype | None:
    seen = _seen(node)
    if seen is not None:
        return seen[0]
    read = node.all_input_nodes  # the base, if the node is a view
    is_alike = len(read) == 1 and getattr(read[0].meta.get("val"), "dtype", None) == node.meta["val"].dtype
    return _seen_dtype(read[0]) if is_alike else None


def _made_up(node: fx.Node, whole: int) -> Any:
    return pytree.tree_map_only(Tensor, partial(_drawn, whole=whole), _likely(node))


def _drawn(like: Tensor, whole: int) -> Tensor:
    if like.layout != torch.strided:
        return torch.zeros(like.shape, dtype=like.dtype, layout=like.layout, device=like.device)
    size = like.untyped_storage().nbytes() // like.element_size()
    is_tiny = like.dtype.is_floating_point and like.element_size() == 1  # fp8 and fp4, of which torch draws no numbers
    storage = torch.full((size,), whole, dtype=torch.uint8 if is_tiny else like.dtype, device=like.device)
    if storage.is_floating_point():
        storage.uniform_()
    return signed(storage.view(like.dtype).as_strided(like.shape, like.stride()), like)


def _may_be_ones(node: fx.Node) -> bool:
    """Whether the integers among the inputs may all be 1 and still be valid indices: no size or count is below 2."""
    tensors = [tensor for used in node.all_input_nodes for tensor in tensors_in(_likely(used))]
    has_integers = any(not (tensor.is_floating_point() or tensor.is_complex()) for tensor in tensors)
    sizes = [size for tensor in tensors for size in tensor.shape]
    counts = [value for value in pytree.tree_leaves((node.args, node.kwargs)) if type(value) is int]
    return has_integers and all(size > 1 for size in [*sizes, *counts])
